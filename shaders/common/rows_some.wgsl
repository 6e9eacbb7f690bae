// Products are wanted of some of the activation rows alone, a bit a row; the same ones for the whole workgroup.
var<private> wanted_rows: u32;

fn wanted(row: u32) -> bool {
    return (wanted_rows >> row & 1u) == 1u;
}
