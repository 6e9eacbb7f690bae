// What the convolution of the next pass or step needs of this one: its last TAPS - 1 inputs, by position modulo RING.
//
// proj  f32 [rows, PROJ]: z | x | B | C | dt
// ring  f32 [RING, channels]
// After `prefill_conv` has read the ring. An invocation has one channel of one of the last rows. `model.md` §1.4.

@group(0) @binding(2) var<storage, read> proj: array<f32>; // [rows, PROJ]
@group(0) @binding(3) var<storage, read_write> ring: array<f32>; // [RING, CHANNELS]

override INNER: u32;
override CHANNELS: u32;
override RING: u32;
override PROJ: u32; // floats from row to row of `proj`

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let channel = ids.group.x * WG + thread(ids);
    let back = ids.group.y + 1u;
    if (!live() || back > flight.rows || channel >= CHANNELS) {
        return;
    }
    let row = flight.rows - back;
    ring[(control.position + row) % RING * CHANNELS + channel] = proj[row * PROJ + INNER + channel];
}
