//! References that the plain decoder makes itself, where no other implementation recorded any: int8 activations above
//! all. The plain decoder has been compared with the recorded references before.

use riparian::ids::TokenId;
use riparian::knobs::Activations;
use riparian::model::state::{BlockState, KvState, SequenceState};
use riparian::reference::{Capture, Conventions, MoeCapture, PlainDecoder, Speculation};

use crate::case::Case;
use crate::reference::{
    BlockReference, DraftReference, GreedyReference, Reference, RouteReference, SpeculationReference, StateReference,
};

impl Reference {
    /// Runs the plain decoder over a case's prompt and `steps` ids, and everything the case's draft layer can show.
    pub(crate) fn record(case: &Case, act: Activations, steps: usize) -> Self {
        let plain = PlainDecoder::new(&case.geometry, case.weights(), act);
        let (hidden, rows) = (case.geometry.hidden, case.reference.rows.clone());
        let mut state = SequenceState::new(&case.geometry);
        let mut capture = Capture::default();
        let prompt = plain.forward(&rows, &mut state, Some(&mut capture));

        let mut end = SequenceState::new(&case.geometry);
        let greedy = plain.greedy(&rows, &mut end, steps);
        let ids = greedy.ids();
        let draft = case.geometry.draft.then(|| {
            let path: Vec<f32> = rows.iter().copied().chain(plain.embed(&ids)).collect();
            let read = plain.forward(&path[..path.len() - hidden], &mut SequenceState::new(&case.geometry), None);
            let (mut kv, mut moe) = (KvState::default(), MoeCapture::default());
            let out = plain.draft_rows(Conventions::default(), &path[hidden..], &read.normed, &mut kv, Some(&mut moe));
            let picks = plain.head(&out);
            DraftReference {
                path: ids.clone(),
                rows: out,
                picks: Some(moe.picks),
                kv: StateReference { k: Some(kv.k), v: Some(kv.v), ..StateReference::default() },
                ids: vec![(Conventions::default(), picks.iter().map(|pick| pick.id).collect())],
                margins: Some(picks.iter().map(|pick| pick.margin()).collect()),
                speculation: (1..=3)
                    .map(|depth| {
                        let mut state = SequenceState::new(&case.geometry);
                        speculation(plain.speculate(Conventions::default(), &rows, &mut state, steps, depth), depth)
                    })
                    .collect(),
            }
        });

        let blocks = capture.residual.into_iter().zip(capture.moe).zip(state.blocks).zip(end.blocks);
        let blocks = blocks.map(|(((residual, moe), state), end)| BlockReference {
            residual: Some(residual),
            routes: (!moe.picks.is_empty()).then_some(RouteReference {
                logits: Some(moe.logits),
                picks: moe.picks,
                weights: Some(moe.weights),
                gaps: Some(moe.gaps),
            }),
            state: state_reference(state),
            end: state_reference(end),
        });
        Self {
            name: case.reference.name.clone(),
            act,
            prompt: case.reference.prompt.clone(),
            blocks: blocks.collect(),
            logits: Some(plain.logits(&prompt.normed)),
            normed: Some(prompt.normed),
            greedy: GreedyReference {
                ids,
                margins: greedy.picks.iter().map(|pick| pick.margin()).collect(),
                path_gaps: greedy.path_gaps,
                logits: None,
            },
            draft,
            rows,
        }
    }
}

fn speculation(done: Speculation, depth: usize) -> SpeculationReference {
    let drafts = || done.rounds.iter().flat_map(|round| &round.drafts);
    SpeculationReference {
        depth,
        drafts: drafts().map(|draft| draft.id).collect::<Vec<TokenId>>(),
        accepted: done.rounds.iter().map(|round| round.accepted).collect(),
        margins: drafts().map(|draft| draft.margin()).collect(),
    }
}

fn state_reference(state: BlockState) -> StateReference {
    match state {
        BlockState::Mamba(state) => {
            StateReference { conv: Some(state.conv), ssm: Some(state.ssm), ..StateReference::default() }
        }
        BlockState::Attention(kv) => StateReference { k: Some(kv.k), v: Some(kv.v), ..StateReference::default() },
        BlockState::None => StateReference::default(),
    }
}
