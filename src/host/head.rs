//! The head: logits or, without ever holding them, the best id (`model.md` §1.8).

use super::kernels::{Set, cut, prepare, tile};
use crate::host::Pool;
use crate::ids::TokenId;
use crate::knobs::Activations;
use crate::model::tensors::Matrix;

/// The greedy choice for one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// The id with the largest logit, the lowest on a tie.
    pub id: TokenId,
    /// Its logit.
    pub logit: f32,
    /// The second largest logit; negative infinity where the vocabulary has one id.
    pub runner_up: f32,
}

impl Pick {
    const NONE: Self = Self { id: TokenId(0), logit: f32::NEG_INFINITY, runner_up: f32::NEG_INFINITY };

    fn see(&mut self, id: TokenId, logit: f32) {
        if logit > self.logit || logit.is_nan() {
            *self = Self { id, logit, runner_up: self.logit };
        } else if logit > self.runner_up {
            self.runner_up = logit;
        }
    }
}

/// The best id for each row of `normed [n, hidden]`. A NaN among the logits becomes the pick's logit.
pub(crate) fn picks(pool: &Pool, head: &Matrix, act: Activations, normed: &[f32]) -> Vec<Pick> {
    let input = prepare(pool, head, act, normed);
    let set = Set::of(pool.isa());
    let ranges = cut(pool, head, head.payload().len());
    let mut best = vec![vec![Pick::NONE; input.n()]; ranges.len()];
    let work = ranges.into_iter().zip(&mut best).collect();
    pool.each(work, |(rows, best): (std::ops::Range<usize>, &mut Vec<Pick>)| {
        tile(set, head, rows.clone(), &input, |r, i, y| {
            y.iter().enumerate().for_each(|(k, y)| best[i].see(TokenId::from(rows.start + r + k), *y));
        });
    });
    let mut all = vec![Pick::NONE; input.n()];
    for part in best {
        for (all, part) in all.iter_mut().zip(part) {
            if all.logit.is_nan() {
                continue;
            }
            all.see(part.id, part.logit);
            if part.runner_up > all.runner_up {
                all.runner_up = part.runner_up;
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_of_equals_and_the_second_best() {
        let mut pick = Pick::NONE;
        for (id, logit) in [1.0, 3.0, 2.0, 3.0].into_iter().enumerate() {
            pick.see(TokenId::from(id), logit);
        }
        assert_eq!(pick, Pick { id: TokenId(1), logit: 3.0, runner_up: 3.0 });
    }

    #[test]
    fn the_fused_argmax_is_that_of_the_logits() {
        let (rows, cols) = (1003, 7);
        let value = |i: usize| ((i * 7919) % 1009) as f32 / 500.0 - 1.0;
        let payload = (0..rows * cols).flat_map(|i| value(i).to_le_bytes()).collect();
        let head = Matrix::from_payload("head", crate::model::tensors::Codec::F32, [rows, cols], payload);
        let normed: Vec<f32> = (0..5 * cols).map(|i| value(i * 31 + 5)).collect();
        let pool = Pool::new(3);
        let mut logits = vec![0.0; 5 * rows];
        super::super::matmul(&pool, &head, &normed, Activations::F32, &mut logits);
        let seen = picks(&pool, &head, Activations::F32, &normed);
        for (pick, logits) in seen.iter().zip(logits.chunks_exact(rows)) {
            let mut sorted = logits.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            assert_eq!((pick.logit, pick.runner_up), (sorted[0], sorted[1]));
            assert_eq!(pick.id.index(), logits.iter().position(|l| *l == sorted[0]).unwrap());
        }
    }
}
