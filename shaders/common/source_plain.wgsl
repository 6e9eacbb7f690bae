// Rows as they are.
fn first_cell(ids: Ids, first: u32) -> f32 {
    return 0.0;
}

fn prepare(ids: Ids, first: u32, near: f32) {
}

fn source16(row: u32, unit: u32) -> Sixteen {
    return inner16(row, unit);
}

fn finished(r: u32, unit: u32, v: Sixteen) -> Sixteen {
    return v;
}
