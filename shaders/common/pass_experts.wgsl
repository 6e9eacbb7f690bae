// Tiles of a pass: rows sorted by the expert that they picked, each tile of one expert (`prefill_sort`).
struct Tile {
    // row of the encoded activations, and how many
    first: u32,
    count: u32,
    // vec4 in `weights` where the expert's place begins
    place: u32,
}

fn tile_at(index: u32) -> Tile {
    if (index >= list[0]) {
        return Tile(0u, 0u, 0u);
    }
    let at = 4u + 4u * index;
    return Tile(list[at + 1u], list[at + 2u], list[at] * params.place);
}

// row * TOP_K + pick of a sorted row
fn pick_at(row: u32) -> u32 {
    return list[params.order + 2u * row];
}
