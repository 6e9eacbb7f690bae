// What a route leaves for the layer's experts and its sum, in `routes` (u32).
// Batch b of ROWS rows has UNION_WORDS words: the number of experts its rows chose, then for each, ascending:
// expert, place or NONE, the rows that chose it (a bit a row), and for each row which of its picks it is.
// From `weights_at` on: TOP_K weights (f32) a row, its picks in ascending order of the experts.
const ENTRY: u32 = 3u + ROWS;

fn union_words(top_k: u32) -> u32 {
    return 1u + ROWS * top_k * ENTRY;
}
