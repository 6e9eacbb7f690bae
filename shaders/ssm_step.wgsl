// Mamba-2's convolution, scan and gate for a few positions, one after the other.
//
// c = silu(bias + sum_i w[i] * u[t-K+1+i]);  dt = clamp(softplus(d + dt_bias));  a = exp(-dt * exp(A_log))
// s = a * s + dt * x (outer) B;  o = s . C + D * x;  v = o * silu(z)
//
// proj     f32 [rows, PROJ]: z | x | B | C | dt
// ring     f32 [RING, channels]: the convolution's inputs by position modulo RING
// state    vec4<f32> [snapshots, heads, P, N / 4]: row j of the batch leaves snapshot j where there are snapshots
// v        f32 [rows, inner];  squares  f32 [rows, heads * SLICES]: sum of v² of a workgroup's channels
// A workgroup has P_BLOCK channels of one head; a team one channel at a time, its lanes along N.
// Sums: lanes, then the team; squares in channel order. `model.md` §1.4 steps 2 to 7.

struct Params {
    // words in `vectors`
    conv: u32,
    conv_bias: u32,
    a_log: u32,
    d_skip: u32,
    dt_bias: u32,
    // vec4 from snapshot to snapshot; 0 where there is one
    snapshot: u32,
    dt_min: f32,
    dt_max: f32,
}

@group(0) @binding(2) var<uniform> params: Params;
@group(0) @binding(3) var<storage, read> vectors: array<f32>;
@group(0) @binding(4) var<storage, read> proj: array<f32>; // [rows, PROJ]
@group(0) @binding(5) var<storage, read_write> ring: array<f32>; // [RING, channels]
@group(0) @binding(6) var<storage, read_write> state: array<vec4<f32>>; // [snapshots, heads, P, N / 4]
@group(0) @binding(7) var<storage, read_write> v: array<f32>; // [rows, inner]
@group(0) @binding(8) var<storage, read_write> squares: array<f32>; // [rows, heads * SLICES]

override HEADS: u32;
override P: u32; // channels of a head
override GROUPS: u32;
override N: u32; // d_state, a multiple of 4
override TAPS: u32;
override RING: u32; // at least TAPS - 1 + rows of a batch
override PROJ: u32; // floats from row to row of `proj`
override P_BLOCK: u32; // channels of a workgroup, divides P
override CONV_CELLS: u32; // ROWS * (P_BLOCK + 2 N)
override OUT_CELLS: u32; // ROWS * P_BLOCK

var<workgroup> conv: array<f32, CONV_CELLS>; // a row: x of the block | B | C
// channels whose state a lane holds from the start
const HELD: u32 = 2u;

var<workgroup> gate: array<f32, OUT_CELLS>;
var<workgroup> step_size: array<f32, ROWS>;
var<workgroup> gated: array<f32, OUT_CELLS>;

fn silu(x: f32) -> f32 {
    return x / (1.0 + exp(-x));
}

fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    // ln(1 + e) where 1 + e would lose e
    return max(x, 0.0) + select(log(1.0 + e), e * (1.0 - 0.5 * e), e < 1e-3);
}

// The convolution of a row's channel. Every load is asked for at once: nothing here branches on what another load brings.
fn convolved(channel: u32, row: u32) -> f32 {
    let channels = HEADS * P + 2u * GROUPS * N;
    var sum = vectors[params.conv_bias + channel];
    for (var i = 0u; i < TAPS; i++) {
        // the row of the batch that the tap reads, or one before the batch
        let at = i32(row + i) - i32(TAPS - 1u);
        let position = i32(control.position) + at;
        let kept = ring[u32(max(position, 0)) % RING * channels + channel];
        let fresh = proj[u32(max(at, 0)) * PROJ + HEADS * P + channel];
        let u = select(select(kept, fresh, at >= 0), 0.0, position < 0);
        sum += vectors[params.conv + channel * TAPS + i] * u;
    }
    return silu(sum);
}

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let slices = P / P_BLOCK;
    let head = ids.group.x / slices;
    let slice = ids.group.x % slices;
    let group = head / (HEADS / GROUPS);
    let channels = HEADS * P + 2u * GROUPS * N;
    let width = P_BLOCK + 2u * N;
    let rows = min(flight.rows, ROWS);
    let go = live();
    let a_log = vectors[params.a_log + head];
    let skip = vectors[params.d_skip + head];
    let dt_bias = vectors[params.dt_bias + head];
    // the state that row 0 goes on from is asked for before the convolution
    var held: array<vec4<f32>, HELD>;
    let kept = control.scan_at * params.snapshot;
    for (var h = 0u; h < HELD; h++) {
        let p = min(h * teams(ids) + team(ids), P_BLOCK - 1u);
        held[h] = state[kept + (head * P + slice * P_BLOCK + p) * (N / 4u) + min(lane(ids), N / 4u - 1u)];
    }
    // A row's loads are all asked for before the first of them is used: invocations that have nothing to do repeat others'.
    for (var r = 0u; r < ROWS; r++) {
        if (r < rows) {
            for (var t = 0u; t < max(2u * N, P_BLOCK); t += WG) {
                let k = min(t + thread(ids), 2u * N - 1u);
                let j = min(t + thread(ids), P_BLOCK - 1u);
                let z = proj[r * PROJ + head * P + slice * P_BLOCK + j];
                let d = proj[r * PROJ + HEADS * P + channels + head];
                let y = convolved(HEADS * P + k / N * (GROUPS * N) + group * N + k % N, r);
                let x = convolved(head * P + slice * P_BLOCK + j, r);
                if (t + thread(ids) < 2u * N) {
                    conv[r * width + P_BLOCK + k] = y;
                }
                if (t + thread(ids) < P_BLOCK) {
                    conv[r * width + j] = x;
                    gate[r * P_BLOCK + j] = silu(z);
                }
                if (t + thread(ids) == 0u) {
                    step_size[r] = clamp(softplus(d + dt_bias), params.dt_min, params.dt_max);
                }
            }
        }
    }
    workgroupBarrier();
    if (!go) {
        return;
    }
    let decay = -exp(a_log);
    for (var t = 0u; t < P_BLOCK; t += teams(ids)) {
        let p = t + team(ids);
        let channel = head * P + slice * P_BLOCK + min(p, P_BLOCK - 1u);
        // a row's state goes on to the next in a register where a lane has one cell of it
        var carried = vec4<f32>();
        for (var r = 0u; r < rows; r++) {
            let dt = step_size[r];
            let a = exp(dt * decay);
            let x = conv[r * width + min(p, P_BLOCK - 1u)];
            var sum = 0.0;
            for (var n = lane(ids); n < N / 4u; n += lanes(ids)) {
                let cell = channel * (N / 4u) + n;
                let b_at = r * width + P_BLOCK + 4u * n;
                let c_at = b_at + N;
                let b = vec4<f32>(conv[b_at], conv[b_at + 1u], conv[b_at + 2u], conv[b_at + 3u]);
                let c = vec4<f32>(conv[c_at], conv[c_at + 1u], conv[c_at + 2u], conv[c_at + 3u]);
                if (p < P_BLOCK) {
                    // row 0 goes on from the kept snapshot, each later row from the one before it
                    var s: vec4<f32>;
                    if (r > 0u && N / 4u <= lanes(ids)) {
                        s = carried;
                    } else if (r > 0u) {
                        s = state[(r - 1u) * params.snapshot + cell];
                    } else if (n < lanes(ids) && t / teams(ids) < HELD) {
                        s = held[t / teams(ids)];
                    } else {
                        s = state[kept + cell];
                    }
                    s = a * s + (dt * x) * b;
                    state[r * params.snapshot + cell] = s;
                    carried = s;
                    sum += dot(s, c);
                }
            }
            sum = team_sum(ids, sum);
            if (lane(ids) == 0u && p < P_BLOCK) {
                let y = (sum + skip * x) * gate[r * P_BLOCK + p];
                v[r * (HEADS * P) + channel] = y;
                gated[r * P_BLOCK + p] = y;
            }
        }
    }
    // One workgroup keeps each input; the slots it writes are none that anybody reads in this batch.
    for (var t = thread(ids); t < ROWS * width; t += WG) {
        let r = t / width;
        let j = t % width;
        if (r < rows && (j < P_BLOCK || (slice == 0u && head % (HEADS / GROUPS) == 0u))) {
            let k = j - P_BLOCK;
            let channel = select(
                HEADS * P + k / N * (GROUPS * N) + group * N + k % N,
                head * P + slice * P_BLOCK + j,
                j < P_BLOCK,
            );
            ring[(control.position + r) % RING * channels + channel] = proj[r * PROJ + HEADS * P + channel];
        }
    }
    workgroupBarrier();
    for (var r = thread(ids); r < rows; r += WG) {
        var sum = 0.0;
        for (var p = 0u; p < P_BLOCK; p++) {
            sum += gated[r * P_BLOCK + p] * gated[r * P_BLOCK + p];
        }
        squares[r * (HEADS * slices) + ids.group.x] = sum;
    }
}
