//! Which experts lie on the device from the start (`runtime.md` §5).
//!
//! Numbers in, lists out: the loader makes the plan, the device reserves the
//! places, the submitter uploads in the plan's order.

use crate::ids::{ExpertIx, LayerIx, PlaceIx};

/// What is known of one layer's experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerFacts<'a> {
    /// Routed experts of the layer.
    pub experts: usize,
    /// Experts chosen for a row.
    pub top_k: usize,
    /// Bytes of the largest expert: every place can hold any of them.
    pub expert_bytes: u64,
    /// Experts by use, most used first; those it leaves out follow in index order.
    pub hot: &'a [ExpertIx],
}

/// One layer's places and who fills them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bank {
    /// Experts of the layer, resident or not.
    pub experts: usize,
    /// Bytes of one place.
    pub place_bytes: u64,
    /// The first occupant of each place, by place.
    pub residents: Vec<ExpertIx>,
}

impl Bank {
    /// Places, all filled from the start.
    #[must_use]
    pub fn places(&self) -> usize {
        self.residents.len()
    }

    /// Whether every expert is resident.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.places() == self.experts
    }
}

/// The plan for all layers, the draft layer's last.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// One per layer.
    pub banks: Vec<Bank>,
}

impl Residency {
    /// Shares `budget_bytes` out over the layers; `None` is enough for all.
    ///
    /// All experts are resident when they fit. Otherwise every layer gets an
    /// equal share, at least `top_k` places even where that is more than the
    /// budget ([`Residency::bytes`] tells), and what equal shares leave over
    /// goes round the layers place by place.
    #[must_use]
    pub fn new(layers: &[LayerFacts<'_>], budget_bytes: Option<u64>) -> Self {
        let places = match budget_bytes {
            Some(budget) if all_bytes(layers) > budget => shares(layers, budget),
            _ => layers.iter().map(|layer| layer.experts).collect(),
        };
        let banks = layers.iter().zip(places).map(|(layer, places)| bank(layer, places)).collect();
        Self { banks }
    }

    /// The same with no bank larger than `bank_bytes`: what one buffer of the device can be, and a shader see of it. The
    /// hottest experts stay.
    #[must_use]
    pub fn capped(mut self, bank_bytes: u64) -> Self {
        for bank in &mut self.banks {
            let holds = bank_bytes.checked_div(bank.place_bytes).unwrap_or(u64::MAX);
            bank.residents.truncate(usize::try_from(holds).unwrap_or(usize::MAX));
        }
        self
    }

    /// Bytes of all places.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.banks.iter().map(|bank| bank.place_bytes * bank.places() as u64).sum()
    }

    /// Places of all layers together.
    #[must_use]
    pub fn places(&self) -> usize {
        self.banks.iter().map(Bank::places).sum()
    }

    /// Whether no layer can miss.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.banks.iter().all(Bank::is_full)
    }

    /// What to upload, in order: the hottest of every layer, then the next of
    /// every layer, so that a load that is cut short serves all layers alike.
    pub fn upload_order(&self) -> impl Iterator<Item = (LayerIx, ExpertIx, PlaceIx)> + '_ {
        let most = self.banks.iter().map(Bank::places).max().unwrap_or(0);
        (0..most).flat_map(move |place| {
            self.banks.iter().enumerate().filter_map(move |(layer, bank)| {
                let expert = *bank.residents.get(place)?;
                Some((LayerIx::from(layer), expert, PlaceIx::from(place)))
            })
        })
    }
}

fn all_bytes(layers: &[LayerFacts<'_>]) -> u64 {
    layers.iter().map(|layer| layer.expert_bytes.saturating_mul(layer.experts as u64)).fold(0, u64::saturating_add)
}

/// Places of each layer, some layer not full.
fn shares(layers: &[LayerFacts<'_>], budget: u64) -> Vec<usize> {
    let mut places: Vec<usize> = layers.iter().map(|layer| layer.top_k.min(layer.experts)).collect();
    let floor: u64 = layers.iter().zip(&places).map(|(layer, n)| layer.expert_bytes * *n as u64).sum();
    let mut left = budget.saturating_sub(floor);
    // Equal places, one a layer and round, until a whole round gets nothing.
    let mut gave = true;
    while gave {
        gave = false;
        for (layer, places) in layers.iter().zip(&mut places) {
            if *places < layer.experts && layer.expert_bytes <= left {
                *places += 1;
                left -= layer.expert_bytes;
                gave = true;
            }
        }
    }
    places
}

fn bank(layer: &LayerFacts<'_>, places: usize) -> Bank {
    let mut residents = Vec::with_capacity(places);
    let mut taken = vec![false; layer.experts];
    let rest = (0..layer.experts).map(ExpertIx::from);
    for expert in layer.hot.iter().copied().chain(rest) {
        if residents.len() == places {
            break;
        }
        // A list that names an expert twice, or none of this layer, gives it no second place.
        if let Some(taken) = taken.get_mut(expert.index()).filter(|taken| !**taken) {
            *taken = true;
            residents.push(expert);
        }
    }
    Bank { experts: layer.experts, place_bytes: layer.expert_bytes, residents }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(n: usize, experts: usize, top_k: usize) -> Vec<LayerFacts<'static>> {
        vec![LayerFacts { experts, top_k, expert_bytes: 10, hot: &[] }; n]
    }

    #[test]
    fn a_bank_is_no_larger_than_one_buffer() {
        let hot: Vec<_> = [3, 1].map(ExpertIx::from).to_vec();
        let mut layers: Vec<LayerFacts<'_>> = layers(2, 6, 2);
        layers[1].hot = &hot;
        let whole = Residency::new(&layers, None);
        assert_eq!(whole.clone().capped(60), whole, "it fits to the byte");
        let capped = whole.clone().capped(59);
        assert_eq!(places(&capped), [5, 5]);
        let capped = whole.capped(29);
        assert_eq!(places(&capped), [2, 2]);
        assert_eq!(capped.banks[1].residents, hot, "the hottest stay");
        assert_eq!(capped.bytes(), 40);
    }

    fn places(residency: &Residency) -> Vec<usize> {
        residency.banks.iter().map(Bank::places).collect()
    }

    #[test]
    fn all_are_resident_when_they_fit() {
        for budget in [None, Some(240), Some(u64::MAX)] {
            let residency = Residency::new(&layers(3, 8, 2), budget);
            assert!(residency.is_full());
            assert_eq!((residency.bytes(), residency.places()), (240, 24));
        }
        assert!(!Residency::new(&layers(3, 8, 2), Some(239)).is_full());
    }

    #[test]
    fn shares_are_equal_and_stay_within_the_budget() {
        let residency = Residency::new(&layers(3, 8, 2), Some(140));
        assert_eq!(places(&residency), [5, 5, 4]);
        assert!(residency.bytes() <= 140);
    }

    #[test]
    fn every_layer_can_hold_one_rows_choice() {
        assert_eq!(places(&Residency::new(&layers(3, 8, 2), Some(0))), [2, 2, 2]);
        assert_eq!(places(&Residency::new(&layers(1, 2, 6), Some(0))), [2], "no more places than experts");
    }

    #[test]
    fn a_layer_that_is_full_leaves_its_share_to_the_others() {
        let mut unequal = layers(2, 8, 1);
        unequal[0].experts = 2;
        unequal[1].expert_bytes = 20;
        assert_eq!(places(&Residency::new(&unequal, Some(120))), [2, 5]);
    }

    #[test]
    fn the_hottest_come_first_then_index_order() {
        let hot = [ExpertIx(5), ExpertIx(2), ExpertIx(5), ExpertIx(90)];
        let mut one = layers(1, 6, 1);
        one[0].hot = &hot;
        let residency = Residency::new(&one, Some(40));
        assert_eq!(residency.banks[0].residents, [5, 2, 0, 1].map(ExpertIx));
    }

    #[test]
    fn uploads_go_round_the_layers() {
        let residency = Residency::new(&layers(2, 4, 2), Some(50));
        let order: Vec<_> = residency.upload_order().map(|(l, e, p)| (l.0, e.0, p.0)).collect();
        assert_eq!(order, [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 1), (0, 2, 2)]);
    }

    #[test]
    fn nothing_to_place_is_no_error() {
        let residency = Residency::new(&[], Some(0));
        assert!(residency.is_full() && residency.upload_order().next().is_none());
    }
}
