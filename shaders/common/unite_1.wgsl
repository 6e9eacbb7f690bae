// One row's picks, ascending: their own union.
fn unite(ids: Ids) {
    for (var t = thread(ids); t < TOP_K; t += WG) {
        let e = ranked[t];
        var before = 0u;
        for (var j = 0u; j < TOP_K; j++) {
            before += select(0u, 1u, ranked[j] < e);
        }
        if (e != NO_EXPERT) {
            chosen[before] = e;
            chosen_by[before] = 1u;
            chosen_at[before] = before;
        }
        if (t == 0u) {
            union_count = select(0u, TOP_K, e != NO_EXPERT);
        }
    }
    workgroupBarrier();
}
