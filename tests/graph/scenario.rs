//! What a seed says will happen: a device, how the actors go about it, sessions, faults.

use std::sync::Arc;
use std::time::Duration;

use riparian::actors::GraphOptions;
use riparian::actors::completer::ServeOptions;
use riparian::device::scripted::Script;
use riparian::device::{DraftAbility, UNLANDED_MAX};
use riparian::ids::TokenId;
use riparian::invariants::Broken;
use riparian::policy::admission::{AdmissionOptions, Policy};
use riparian::policy::ahead::AheadOptions;
use riparian::policy::serve::ServeCosts;

use crate::random::Random;

/// One session's script.
#[derive(Clone, Debug)]
pub(crate) struct User {
    /// `[n, hidden]`
    pub(crate) prompt: Vec<f32>,
    /// Rows of each feed.
    pub(crate) chunks: Vec<usize>,
    pub(crate) eos: Arc<[TokenId]>,
    pub(crate) max_new: Option<usize>,
    pub(crate) drafts: bool,
    /// Cancels, or drops its handle, after so many of its own moves; moves go on by themselves.
    pub(crate) leaves: Option<(usize, bool)>,
    /// Asks for the state once it has fed all.
    pub(crate) reads: bool,
}

/// Everything a seed decides, but for whose turn it is.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) script: Script,
    /// `None`: nothing takes over.
    pub(crate) fallback: Option<Script>,
    /// Opening the fallback fails.
    pub(crate) fallback_fails: bool,
    pub(crate) options: GraphOptions,
    pub(crate) users: Vec<User>,
    /// The loader is there, and fails one fetch in so many (0: none).
    pub(crate) loader: bool,
    pub(crate) fetch_fails_one_in: usize,
    pub(crate) losses: usize,
    pub(crate) hangs: usize,
    pub(crate) deaths: usize,
    /// How often each class of action is chosen, relative to the others.
    pub(crate) weights: [u32; 16],
}

impl Scenario {
    pub(crate) fn new(seed: u64, broken: Broken) -> Self {
        let r = &mut Random::new(seed);
        let layers = if r.one_in(12) { 0 } else { r.within(1, 3) };
        let top_k = r.within(1, 3);
        let experts = top_k + r.within(0, 4);
        let places = if r.one_in(4) { experts } else { r.within(top_k, experts) };
        let drafts = r.pick(&[DraftAbility::None, DraftAbility::OnDevice, DraftAbility::ByHost]);
        let kv_positions = r.within(4, 40);
        let hangs = usize::from(r.one_in(16));
        let script = Script {
            seed: r.next() as u32,
            layers,
            experts,
            top_k,
            places,
            hot: places,
            miss_one_in: r.pick(&[1, 1, 2, 3, 6, 0]),
            vocab: 61,
            wrong_one_in: r.pick(&[0, 1, 2, 4]),
            slots: r.within(1, 3),
            kv_positions,
            prefill_rows: r.within(1, 6),
            verify_rows: if drafts == DraftAbility::None { 1 } else { r.within(2, 5) },
            drafts,
            spare_place: r.one_in(2),
            staging: UNLANDED_MAX + r.within(0, 6),
            upload_staging: r.within(1, 3),
            landing_deadline: (hangs > 0).then_some(Duration::from_millis(50)),
            names_blocks: !seed.is_multiple_of(3),
            broken,
        };
        let other_drafts = r.pick(&[DraftAbility::None, DraftAbility::OnDevice, DraftAbility::ByHost]);
        let takes_over = Script {
            places: experts,
            slots: r.within(1, 3),
            prefill_rows: r.within(1, 8),
            drafts: other_drafts,
            verify_rows: if other_drafts == DraftAbility::None { 1 } else { r.within(2, 5) },
            staging: UNLANDED_MAX + r.within(0, 3),
            landing_deadline: None,
            ..script.clone()
        };
        let mut options = GraphOptions::default();
        options.submitter.ahead = AheadOptions {
            batches_max: r.within(1, 4) as u32,
            routes_max: if r.one_in(3) { Some(r.within(1, 5)) } else { None },
            survival_min: r.share(),
            peek_min: r.share(),
            learn: r.pick(&[0.02, 0.3]),
            flight_max: Duration::from_millis(150),
        };
        options.submitter.batched_prefill = !r.one_in(5);
        options.submitter.drafts = !r.one_in(6);
        options.submitter.broken = broken;
        options.admission = (!r.one_in(4)).then(|| AdmissionOptions {
            policy: r.pick(&[Policy::Baseline, Policy::RecencyFrequency]),
            positions_per_upload: r.within(1, 3) as u32,
            at_a_time: r.within(1, 8),
            after_prefill: r.within(0, 2),
        });
        let us = Duration::from_micros;
        options.serve = ServeOptions {
            uploads_max: r.within(0, 3),
            costs: ServeCosts { host_expert: us(10), host_row: us(1), upload: us(r.pick(&[1, 5, 100])) },
        };
        let model = script.model();
        let users = (0..r.within(1, 4))
            .map(|user| {
                let rows = if r.one_in(10) { r.within(kv_positions - 1, kv_positions + 1) } else { r.within(1, 12) };
                let mut prompt: Vec<f32> = (0..rows).flat_map(|at| model.prompt_row(user as u64, at)).collect();
                if r.one_in(25) {
                    // a row that is not finite
                    let at = r.below(prompt.len());
                    prompt[at] = r.pick(&[f32::NAN, f32::INFINITY]);
                }
                let (mut chunks, mut left) = (Vec::new(), rows);
                while left > 0 {
                    let chunk = r.within(1, left.min(7));
                    chunks.push(chunk);
                    left -= chunk;
                }
                let leaves = r.one_in(4).then(|| (r.within(0, 60), r.one_in(2)));
                User {
                    prompt,
                    chunks,
                    eos: (0..r.pick(&[0, 0, 1, 3])).map(|_| TokenId(r.below(61) as u32)).collect(),
                    max_new: if r.one_in(3) { None } else { Some(r.within(0, 14)) },
                    drafts: !r.one_in(6),
                    leaves,
                    reads: r.one_in(8),
                }
            })
            .collect();
        let weight = |r: &mut Random| r.pick(&[100, 100, 100, 40, 10, 2]);
        Self {
            seed,
            fallback: (!r.one_in(4)).then_some(takes_over),
            fallback_fails: r.one_in(6),
            script,
            options,
            users,
            loader: !r.one_in(8),
            fetch_fails_one_in: r.pick(&[0, 0, 3]),
            losses: usize::from(r.one_in(5)),
            hangs,
            deaths: usize::from(r.one_in(8)),
            weights: std::array::from_fn(|_| weight(r)),
        }
    }

    /// What a user's session must give if nothing ends it early.
    pub(crate) fn plain(&self, user: &User) -> Vec<TokenId> {
        let capacity = self.script.kv_positions;
        self.script.model().plain(&user.prompt, &user.eos, user.max_new.unwrap_or(usize::MAX), capacity)
    }

    /// Rows the device can hold of the prompt: feeds beyond are refused whole.
    pub(crate) fn fits(&self, user: &User) -> bool {
        user.prompt.len() / 2 <= self.script.kv_positions
    }
}
