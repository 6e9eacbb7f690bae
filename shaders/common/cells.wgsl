// 16 outputs of the workgroup, on their way to being encoded.
fn cells16(at: u32) -> Sixteen {
    return Sixteen(
        vec4<f32>(cells[at], cells[at + 1u], cells[at + 2u], cells[at + 3u]),
        vec4<f32>(cells[at + 4u], cells[at + 5u], cells[at + 6u], cells[at + 7u]),
        vec4<f32>(cells[at + 8u], cells[at + 9u], cells[at + 10u], cells[at + 11u]),
        vec4<f32>(cells[at + 12u], cells[at + 13u], cells[at + 14u], cells[at + 15u]),
    );
}
