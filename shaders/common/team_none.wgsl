// Teams of invocations that sum together: 32 consecutive ones, through workgroup memory, where the adapter has no
// subgroups. Every function here needs uniform control flow.

override WG: u32;

struct Ids {
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
}

var<workgroup> team_cells: array<f32, WG>;

fn lanes(ids: Ids) -> u32 {
    return 32u;
}

fn lane(ids: Ids) -> u32 {
    return ids.local % 32u;
}

fn team(ids: Ids) -> u32 {
    return ids.local / 32u;
}

fn teams(ids: Ids) -> u32 {
    return WG / 32u;
}

// The invocation's number in the workgroup, such that a team's are consecutive.
fn thread(ids: Ids) -> u32 {
    return ids.local;
}

// Sum over the team, in every lane.
fn team_sum(ids: Ids, v: f32) -> f32 {
    team_cells[ids.local] = v;
    workgroupBarrier();
    for (var step = 16u; step > 0u; step /= 2u) {
        if (ids.local % 32u < step) {
            team_cells[ids.local] += team_cells[ids.local + step];
        }
        workgroupBarrier();
    }
    let sum = team_cells[ids.local / 32u * 32u];
    workgroupBarrier();
    return sum;
}

// Maximum over two neighbouring invocations.
fn pair_max(ids: Ids, v: u32) -> u32 {
    team_cells[ids.local] = bitcast<f32>(v);
    workgroupBarrier();
    let other = bitcast<u32>(team_cells[ids.local ^ 1u]);
    workgroupBarrier();
    return max(v, other);
}

// Sum over two neighbouring invocations.
fn pair_add(ids: Ids, v: f32) -> f32 {
    team_cells[ids.local] = v;
    workgroupBarrier();
    let other = team_cells[ids.local ^ 1u];
    workgroupBarrier();
    return v + other;
}
