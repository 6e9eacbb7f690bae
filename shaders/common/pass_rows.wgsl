// Tiles of a pass: the rows in order.
struct Tile {
    // row of the encoded activations, and how many
    first: u32,
    count: u32,
    // vec4 in `weights` where the matrix' place begins
    place: u32,
}

fn tile_at(index: u32) -> Tile {
    let first = index * TILE_ROWS;
    return Tile(first, min(TILE_ROWS, max(flight.rows, first) - first), 0u);
}

fn pick_at(row: u32) -> u32 {
    return row;
}
