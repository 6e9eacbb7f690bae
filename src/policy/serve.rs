//! Which missing experts the host computes and which are uploaded and computed on the device.
//!
//! Both ways run side by side, so the layer is done when the slower of the two
//! is. The host reads each expert's weights once for all its rows; an upload
//! costs the same whatever the rows, and the device's work on it is small.

use std::time::Duration;

/// Measured costs of one machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServeCosts {
    /// The host, an expert.
    pub host_expert: Duration,
    /// The host, each row of an expert.
    pub host_row: Duration,
    /// Uploading one expert.
    pub upload: Duration,
}

/// Picks the experts to upload, as indices into `rows` (rows that want each missing expert), at most `uploads_max`.
///
/// The widest go first: they cost the host most and an upload no more than others.
#[must_use]
pub fn split(rows: &[usize], uploads_max: usize, costs: ServeCosts) -> Vec<usize> {
    let host = |rows: usize| costs.host_expert + costs.host_row * u32::try_from(rows).unwrap_or(u32::MAX);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(rows[i]), i));
    let mut left: Duration = rows.iter().map(|&n| host(n)).sum();
    let (mut best, mut best_time) = (0, left);
    for (n, &i) in order.iter().enumerate().take(uploads_max) {
        left -= host(rows[i]);
        let time = left.max(costs.upload * (n as u32 + 1));
        if time < best_time {
            (best, best_time) = (n + 1, time);
        }
    }
    order.truncate(best);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs(expert: u64, row: u64, upload: u64) -> ServeCosts {
        let us = Duration::from_micros;
        ServeCosts { host_expert: us(expert), host_row: us(row), upload: us(upload) }
    }

    #[test]
    fn a_slow_bus_leaves_all_to_the_host() {
        assert!(split(&[1, 1, 1], 8, costs(70, 1, 400)).is_empty());
        assert!(split(&[], 8, costs(1, 1, 1)).is_empty());
    }

    #[test]
    fn a_fast_bus_takes_its_share_of_the_widest() {
        // host alone 400; two uploads 160 beside 200
        assert_eq!(split(&[1, 5, 1, 9], 8, costs(96, 1, 80)), [3, 1]);
        assert_eq!(split(&[1, 5, 1, 9], 1, costs(96, 1, 80)), [3]);
        assert!(split(&[1, 5, 1, 9], 0, costs(96, 1, 80)).is_empty());
    }

    #[test]
    fn no_split_is_slower_than_the_host_alone() {
        for upload in 1..200 {
            let rows = [4, 1, 1, 2, 9];
            let c = costs(20, 3, upload);
            let up = split(&rows, 5, c);
            let time = |n: usize| 20 + 3 * n as u64;
            let host: u64 = (0..5).filter(|i| !up.contains(i)).map(|i| time(rows[i])).sum();
            assert!(host.max(upload * up.len() as u64) <= rows.iter().map(|&n| time(n)).sum());
        }
    }
}
