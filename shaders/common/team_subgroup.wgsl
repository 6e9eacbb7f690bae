// Teams of invocations that sum together: a subgroup is a team.
// Any subgroup size that divides the workgroup; lanes are counted inside the subgroup.

override WG: u32;

struct Ids {
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_index) local: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_id) team: u32,
}

fn lanes(ids: Ids) -> u32 {
    return ids.size;
}

fn lane(ids: Ids) -> u32 {
    return ids.lane;
}

fn team(ids: Ids) -> u32 {
    return ids.team;
}

fn teams(ids: Ids) -> u32 {
    return WG / ids.size;
}

// The invocation's number in the workgroup, such that a team's are consecutive.
fn thread(ids: Ids) -> u32 {
    return ids.team * ids.size + ids.lane;
}

// Sum over the team, in every lane.
fn team_sum(ids: Ids, v: f32) -> f32 {
    return subgroupAdd(v);
}

// Maximum over two neighbouring invocations. In uniform control flow.
fn pair_max(ids: Ids, v: u32) -> u32 {
    return max(v, subgroupShuffleXor(v, 1u));
}

// Sum over two neighbouring invocations. In uniform control flow.
fn pair_add(ids: Ids, v: f32) -> f32 {
    return v + subgroupShuffleXor(v, 1u);
}
