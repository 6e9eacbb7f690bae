// Rows of a pass as the products read them.
//
// source     f32 rows: see `rows_of_*`
// acts       [rows, COLS] encoded: f32, int8 codes in column order, or halves: see `encode_*`
// act_scale  f32: int8 a group of 32 columns, [rows, COLS / 32]; halves a row, [rows]
// A workgroup makes one row (sorted rows: TOP_K along z); columns past the row's width are zero. Sums in f32, a tree over the workgroup.
// `runtime.md` §3a; `model.md` §1.2.

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let j = ids.group.y + flight.rows * ids.group.z;
    if (!(live() || own_miss(params.layer)) || j >= encoded_rows()) {
        return;
    }
    prepare(ids, j);
    encode(ids, j);
}
