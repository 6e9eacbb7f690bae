//! The largest logit, the lowest id on a tie, and the largest of the rest.
//!
//! Source: `model.md` §1.8. The margin over the runner-up is what decides
//! whether a different id may be excused (`runtime.md` §3a).

use crate::ids::TokenId;

/// The winner of one row of logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// The chosen id.
    pub id: TokenId,
    /// Its logit.
    pub logit: f32,
    /// The largest logit of any other id; `-inf` if there is no other.
    pub runner_up: f32,
}

impl Pick {
    /// How far the winner is ahead; 0 on an exact tie.
    #[must_use]
    pub fn margin(&self) -> f32 {
        self.logit - self.runner_up
    }
}

/// Picks from `[vocab]` logits.
///
/// # Panics
///
/// If there are none.
#[must_use]
pub fn argmax(logits: &[f32]) -> Pick {
    let mut pick = Pick { id: TokenId(0), logit: logits[0], runner_up: f32::NEG_INFINITY };
    for (id, logit) in logits.iter().enumerate().skip(1) {
        if *logit > pick.logit {
            pick = Pick { id: TokenId::from(id), logit: *logit, runner_up: pick.logit };
        } else {
            pick.runner_up = pick.runner_up.max(*logit);
        }
    }
    pick
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_a_stable_sort(logits in prop::collection::vec(-4i8..4, 1..30)) {
            let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
            let mut order: Vec<usize> = (0..logits.len()).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let pick = argmax(&logits);
            prop_assert_eq!(pick.id.index(), order[0]);
            prop_assert_eq!(pick.logit, logits[order[0]]);
            prop_assert_eq!(pick.runner_up, order.get(1).map_or(f32::NEG_INFINITY, |i| logits[*i]));
        }
    }

    #[test]
    fn all_at_minus_infinity_is_the_first() {
        assert_eq!(argmax(&[f32::NEG_INFINITY; 3]).id, TokenId(0));
    }
}
