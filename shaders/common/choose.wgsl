// The experts of ROWS rows, from the router's logits (`model.md` §1.5 steps 2 to 4): chosen by rank, ties to the lower
// expert, then in ascending order; and the union over the rows.
override EXPERTS: u32;
override TOP_K: u32;
override N_GROUP: u32;
override TOPK_GROUP: u32;
override SCORES: u32; // ROWS * EXPERTS
override PICKS: u32; // ROWS * TOP_K
override GROUPS: u32; // ROWS * N_GROUP
override AT_CELLS: u32; // ROWS * PICKS

const NO_EXPERT: u32 = 0xffffffffu;
const LOWEST: f32 = -3.0e38;

var<workgroup> score: array<f32, SCORES>;
var<workgroup> chance: array<f32, SCORES>; // sigmoid of the logits
var<workgroup> strength: array<f32, GROUPS>;
var<workgroup> ranked: array<u32, PICKS>; // [ROWS, TOP_K] by rank
var<workgroup> leads: array<u32, PICKS>; // 1 where an expert appears first
var<workgroup> chosen: array<u32, PICKS>; // the union, ascending
var<workgroup> chosen_by: array<u32, PICKS>; // rows of each, a bit a row
var<workgroup> chosen_at: array<u32, AT_CELLS>; // [union, ROWS] which of the row's picks it is
var<workgroup> union_count: u32;

fn sigmoid(v: f32) -> f32 {
    return 1.0 / (1.0 + exp(-v));
}

fn logit(row: u32, expert: u32) -> f32 {
    return routing[params.logits + row * EXPERTS + expert];
}

// In uniform control flow.
fn choose(ids: Ids, first: u32, rows: u32) {
    for (var t = thread(ids); t < ROWS * EXPERTS; t += WG) {
        let r = t / EXPERTS;
        let e = t % EXPERTS;
        var s = LOWEST;
        if (first + r < rows) {
            let p = sigmoid(logit(first + r, e));
            chance[t] = p;
            // a logit that is not a number is never chosen before one that is
            s = max(p + bitcast<f32>(words[params.bias + e]), LOWEST);
        }
        score[t] = s;
    }
    for (var t = thread(ids); t < ROWS * TOP_K; t += WG) {
        ranked[t] = NO_EXPERT;
    }
    if (thread(ids) == 0u) {
        union_count = 0u;
    }
    workgroupBarrier();
    if (N_GROUP > 1u) {
        let width = EXPERTS / N_GROUP;
        for (var t = thread(ids); t < ROWS * N_GROUP; t += WG) {
            var best = LOWEST;
            var second = LOWEST;
            for (var j = 0u; j < width; j++) {
                let s = score[t * width + j];
                second = max(second, min(best, s));
                best = max(best, s);
            }
            strength[t] = best + second;
        }
        workgroupBarrier();
        for (var t = thread(ids); t < ROWS * EXPERTS; t += WG) {
            let group = t / width;
            let base = group / N_GROUP * N_GROUP;
            var stronger = 0u;
            for (var j = base; j < base + N_GROUP; j++) {
                if (strength[j] > strength[group] || (strength[j] == strength[group] && j < group)) {
                    stronger++;
                }
            }
            if (stronger >= TOPK_GROUP) {
                score[t] = LOWEST;
            }
        }
        workgroupBarrier();
    }
    for (var t = thread(ids); t < ROWS * EXPERTS; t += WG) {
        let base = t / EXPERTS * EXPERTS;
        let mine = score[t];
        var rank = 0u;
        for (var j = base; j < base + EXPERTS; j++) {
            let other = score[j];
            rank += select(0u, 1u, other > mine || (other == mine && j < t));
        }
        if (rank < TOP_K && first + t / EXPERTS < rows) {
            ranked[t / EXPERTS * TOP_K + rank] = t - base;
        }
    }
    workgroupBarrier();
    unite(ids);
}
