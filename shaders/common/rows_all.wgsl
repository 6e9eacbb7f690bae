// Products are wanted of every activation row.
fn wanted(row: u32) -> bool {
    return true;
}
