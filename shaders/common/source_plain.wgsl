// Rows as they are.
fn source16(row: u32, unit: u32) -> Sixteen {
    return inner16(row, unit);
}
