// Parts of a step's attention that hold positions (`attn_split`): the others were not written.
override TILE: u32;

fn used_parts(row: u32) -> u32 {
    let length = control.position + row + 1u;
    let per = (length + SPLITS * TILE - 1u) / (SPLITS * TILE) * TILE;
    return (length + per - 1u) / per;
}
