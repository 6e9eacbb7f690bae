//! Selection biases that make a router as uneven as wanted.

use super::random::Random;

/// Rows the biases are fitted on.
const ROWS: usize = 1500;
/// Rounds of the fit, the last third with small steps.
const ROUNDS: usize = 80;
/// No expert is chosen for more of the rows than this.
const RATE_MAX: f64 = 0.95;

/// How popular the experts of a layer are, by rank.
pub(super) struct Popularity {
    /// What is added to a score for selection alone.
    pub(super) biases: Vec<f32>,
    /// The rate of selection that follows; all together `top_k`.
    pub(super) rates: Vec<f64>,
}

/// Fits biases so that rank `r` is selected at a rate proportional to `(r + 1)^-zipf` where router logits are N(0, 1)
/// and scores their sigmoids.
pub(super) fn fit(experts: usize, top_k: usize, zipf: f64, seed: u64) -> Popularity {
    let law: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-zipf)).collect();
    let all: f64 = law.iter().sum();
    let wanted: Vec<f64> = law.iter().map(|rate| (rate / all * top_k as f64).min(RATE_MAX)).collect();
    let mut random = Random::new(seed, "router scores");
    let scores: Vec<f32> = (0..ROWS * experts).map(|_| 1.0 / (1.0 + (-random.normal()).exp())).collect();
    let mut biases = vec![0f32; experts];
    let mut rates = measure(&scores, &biases, top_k);
    for round in 0..ROUNDS {
        let step = if round < ROUNDS * 2 / 3 { 0.06 } else { 0.02 };
        for ((bias, wanted), rate) in biases.iter_mut().zip(&wanted).zip(&rates) {
            let off = (wanted + 1e-4).ln() - (rate + 1e-4).ln();
            *bias += step * off.clamp(-2.0, 2.0) as f32;
        }
        rates = measure(&scores, &biases, top_k);
    }
    Popularity { biases, rates }
}

/// The rate at which each expert is among the `top_k` of a row.
fn measure(scores: &[f32], biases: &[f32], top_k: usize) -> Vec<f64> {
    let mut rates = vec![0.0; biases.len()];
    let mut order: Vec<usize> = (0..biases.len()).collect();
    for row in scores.chunks_exact(biases.len()) {
        if top_k < order.len() {
            order.select_nth_unstable_by(top_k, |&a, &b| (row[b] + biases[b]).total_cmp(&(row[a] + biases[a])));
        }
        order[..top_k].iter().for_each(|&expert| rates[expert] += 1.0 / ROWS as f64);
    }
    rates
}

/// The experts of the layer whose tensors have this prefix, most popular first.
pub(super) fn order(seed: u64, prefix: &str, experts: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..experts).collect();
    Random::new(seed, &format!("{prefix} order")).shuffle(&mut order);
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popularity_follows_the_law() {
        for (zipf, top_k) in [(0.8, 6), (0.0, 6), (1.2, 2)] {
            let fitted = fit(128, top_k, zipf, 3);
            assert!((fitted.rates.iter().sum::<f64>() - top_k as f64).abs() < 1e-6);
            let all: f64 = (1..=128).map(|rank| f64::from(rank).powf(-zipf)).sum();
            for rank in [0, 3, 15, 63] {
                let wanted = ((rank + 1) as f64).powf(-zipf) / all * top_k as f64;
                let seen = fitted.rates[rank];
                assert!((seen / wanted - 1.0).abs() < 0.4, "zipf {zipf}, rank {rank}: {seen} for {wanted}");
            }
        }
    }

    #[test]
    fn all_experts_at_once_leave_nothing_to_choose() {
        assert!(fit(4, 4, 0.8, 1).rates.iter().all(|rate| (rate - 1.0).abs() < 1e-9));
        assert!(order(1, "a", 0).is_empty() && order(1, "a", 1) == [0]);
    }
}
