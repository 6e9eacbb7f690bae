//! What invocations of a workgroup must see of their teams, whatever size those have.
//!
//! The twin of `lanes.wgsl`: teams of equal size number the workgroup's invocations without gaps, each team consecutive
//! ones, and sums and pairs stay within a team.

/// What an invocation saw: lanes of its team, its number, its team, the sum of the team's numbers, the larger and the sum
/// of its pair's numbers.
pub type Seen = [u32; 6];

/// Checks a workgroup's invocations.
///
/// # Errors
///
/// What is wrong, for people.
pub fn lanes(seen: &[Seen]) -> Result<(), String> {
    let size = seen.first().map_or(0, |first| first[0]);
    let all = seen.len() as u32;
    if size < 2 || !all.is_multiple_of(size) {
        return Err(format!("teams of {size} lanes among {all} invocations"));
    }
    let mut numbers: Vec<u32> = seen.iter().map(|s| s[1]).collect();
    numbers.sort_unstable();
    if !numbers.iter().copied().eq(0..all) {
        return Err(format!("with teams of {size} lanes the invocations are not numbered 0 to {}", all - 1));
    }
    for &[lanes, number, team, sum, larger, both] in seen {
        let first = number / size * size;
        let wanted =
            [size, number, number / size, size * first + size * (size - 1) / 2, number | 1, 2 * (number & !1) + 1];
        let found = [lanes, number, team, sum, larger, both];
        if found != wanted {
            return Err(format!(
                "invocation {number} of a team of {size} lanes sees [lanes, number, team, sum, larger, both] {found:?} \
                 instead of {wanted:?}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What invocations see where teams have `real` lanes and the kernel believes in `believed`.
    fn workgroup(real: u32, believed: u32, all: u32) -> Vec<Seen> {
        let number = |local: u32| local / real * believed + local % real;
        (0..all)
            .map(|local| {
                let first = local / real * real;
                let sum = (first..first + real).map(number).sum();
                let pair = [number(local), number(local ^ 1)];
                [believed, number(local), local / real, sum, pair[0].max(pair[1]), pair[0] + pair[1]]
            })
            .collect()
    }

    #[test]
    fn every_size_is_right_as_itself_and_wrong_as_another() {
        for real in [4, 8, 16, 32, 64, 128] {
            for believed in [4, 8, 16, 32, 64, 128] {
                assert_eq!(lanes(&workgroup(real, believed, 256)).is_ok(), real == believed, "{real} as {believed}");
            }
        }
        assert!(lanes(&[]).is_err());
    }

    #[test]
    fn sums_and_pairs_of_other_teams_are_seen() {
        for field in 0..6 {
            let mut seen = workgroup(8, 8, 64);
            seen[17][field] += 1;
            assert!(lanes(&seen).is_err(), "field {field}");
        }
    }
}
