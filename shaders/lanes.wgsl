// What a team is on this adapter: each invocation leaves what it sees of its own, so that a driver which reports one number
// of lanes and runs another is found before anything relies on it.
//
// seen  u32 [WG, 6]: lanes of the team, the invocation's number, its team, the sum of all its team's numbers, the larger and
//       the sum of its pair's numbers
// Sums of whole numbers below 2^24 in f32: exact.

@group(0) @binding(0) var<storage, read_write> seen: array<u32>; // [WG, 6]

@compute @workgroup_size(WG)
fn main(ids: Ids) {
    let own = thread(ids);
    let sum = team_sum(ids, f32(own));
    let larger = pair_max(ids, own);
    let both = pair_add(ids, f32(own));
    let at = 6u * ids.local;
    seen[at] = lanes(ids);
    seen[at + 1u] = own;
    seen[at + 2u] = team(ids);
    seen[at + 3u] = u32(sum);
    seen[at + 4u] = larger;
    seen[at + 5u] = u32(both);
}
