// The union of the rows' picks, ascending.
fn unite(ids: Ids) {
    for (var t = thread(ids); t < ROWS * TOP_K; t += WG) {
        let e = ranked[t];
        var lead = select(0u, 1u, e != NO_EXPERT);
        for (var j = 0u; j < t; j++) {
            if (ranked[j] == e) {
                lead = 0u;
            }
        }
        leads[t] = lead;
    }
    workgroupBarrier();
    for (var t = thread(ids); t < ROWS * TOP_K; t += WG) {
        let e = ranked[t];
        if (leads[t] == 1u) {
            var at = 0u;
            var total = 0u;
            for (var j = 0u; j < ROWS * TOP_K; j++) {
                total += leads[j];
                at += select(0u, leads[j], ranked[j] < e);
            }
            var by = 0u;
            for (var r = 0u; r < ROWS; r++) {
                var before = 0u;
                for (var j = r * TOP_K; j < (r + 1u) * TOP_K; j++) {
                    if (ranked[j] == e) {
                        by |= 1u << r;
                    }
                    before += select(0u, 1u, ranked[j] < e);
                }
                chosen_at[at * ROWS + r] = before;
            }
            chosen[at] = e;
            chosen_by[at] = by;
            if (at == 0u) {
                union_count = total;
            }
        }
    }
    workgroupBarrier();
}
