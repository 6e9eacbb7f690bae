//! What an engine is compared with, whoever recorded it.

use riparian::ids::{ExpertIx, TokenId};
use riparian::knobs::Activations;
use riparian::model::geometry::{BlockKind, Geometry};
use riparian::reference::Conventions;
use serde_json::Value;

use crate::tensors::{Tensors, swap_outer};

/// Everything recorded for one model and one prompt. Parts that were not recorded are `None` or empty.
#[derive(Debug)]
pub(crate) struct Reference {
    pub(crate) name: String,
    /// The arithmetic it was recorded in.
    pub(crate) act: Activations,
    /// Prompt rows, `[T, hidden]`
    pub(crate) rows: Vec<f32>,
    /// `[T]`; empty where the rows are no plain embeddings
    pub(crate) prompt: Vec<TokenId>,
    /// One per block.
    pub(crate) blocks: Vec<BlockReference>,
    /// `[T, hidden]`, after the final norm
    pub(crate) normed: Option<Vec<f32>>,
    /// `[T, vocab]`, or `[vocab]` after the last row
    pub(crate) logits: Option<Vec<f32>>,
    pub(crate) greedy: GreedyReference,
    pub(crate) draft: Option<DraftReference>,
}

/// What was recorded of one block.
#[derive(Debug, Default)]
pub(crate) struct BlockReference {
    /// `[T, hidden]`, the residual after it
    pub(crate) residual: Option<Vec<f32>>,
    pub(crate) routes: Option<RouteReference>,
    /// After the prompt.
    pub(crate) state: StateReference,
    /// After the prompt and all greedy ids but the last.
    pub(crate) end: StateReference,
}

/// Routing of the prompt's rows.
#[derive(Debug)]
pub(crate) struct RouteReference {
    /// `[T, experts]`
    pub(crate) logits: Option<Vec<f32>>,
    /// `[T, k]`, best first
    pub(crate) picks: Vec<ExpertIx>,
    /// `[T, k]`
    pub(crate) weights: Option<Vec<f32>>,
    /// `[T]`; without it nothing is excused
    pub(crate) gaps: Option<Vec<f32>>,
}

/// A block's state in the host's layout.
#[derive(Debug, Default)]
pub(crate) struct StateReference {
    /// `[channels, K - 1]`
    pub(crate) conv: Option<Vec<f32>>,
    /// `[heads, P, N]`
    pub(crate) ssm: Option<Vec<f32>>,
    /// `[positions, kv_heads * head_dim]`
    pub(crate) k: Option<Vec<f32>>,
    /// `[positions, kv_heads * head_dim]`
    pub(crate) v: Option<Vec<f32>>,
}

/// The greedy continuation.
#[derive(Debug)]
pub(crate) struct GreedyReference {
    /// `[P]`
    pub(crate) ids: Vec<TokenId>,
    /// `[P]`, best minus second best logit
    pub(crate) margins: Vec<f32>,
    /// `[T + P - 1]`, smallest router gap at each position; empty where it was not recorded
    pub(crate) path_gaps: Vec<f32>,
    /// Some logits of each step: ids `[P, n]` and logits `[P, n]`
    pub(crate) logits: Option<(Vec<TokenId>, Vec<f32>)>,
}

/// The draft layer.
#[derive(Debug)]
pub(crate) struct DraftReference {
    /// Ids whose embeddings the layer reads after the prompt, beyond the prompt's own.
    pub(crate) path: Vec<TokenId>,
    /// `m`, `[n, hidden]`
    pub(crate) rows: Vec<f32>,
    /// `[n, k]`
    pub(crate) picks: Option<Vec<ExpertIx>>,
    /// The layer's keys and values, `[n, kv_heads * head_dim]`.
    pub(crate) kv: StateReference,
    /// Drafts `[n]` under each convention that was recorded; the margins belong to the default ones.
    pub(crate) ids: Vec<(Conventions, Vec<TokenId>)>,
    /// `[n]`; without it nothing is excused
    pub(crate) margins: Option<Vec<f32>>,
    pub(crate) speculation: Vec<SpeculationReference>,
}

/// Speculative decoding with one depth.
#[derive(Debug)]
pub(crate) struct SpeculationReference {
    /// Drafts a round.
    pub(crate) depth: usize,
    /// `[rounds, depth]`
    pub(crate) drafts: Vec<TokenId>,
    /// `[rounds]`
    pub(crate) accepted: Vec<usize>,
    /// `[rounds, depth]`
    pub(crate) margins: Vec<f32>,
}

/// Drops the oldest of `[channels, K]` columns, which the next step does not need.
fn conv_state(columns: Vec<f32>, taps: usize) -> Vec<f32> {
    columns.chunks_exact(taps).flat_map(|row| row[1..].to_vec()).collect()
}

impl Reference {
    /// The recordings of a folder in `oracle/fixtures` (`oracle/README.md`).
    pub(crate) fn of_fixture(name: &str, tensors: &Tensors, geometry: &Geometry) -> Self {
        let embedded = tensors.maybe_f32("embeds");
        let prompt = if embedded.is_some() { tensors.ids("input_ids") } else { Vec::new() };
        let rows = embedded.unwrap_or_else(|| tensors.f32("inputs_embeds"));
        let positions = rows.len() / geometry.hidden;
        let state = |prefix: &str, i: usize| {
            let kv = |name: &str| {
                let values = tensors.maybe_f32(&format!("{prefix}{name}_cache.{i}"))?;
                Some(swap_outer(&values, geometry.attention.expect("attends").kv_heads, positions))
            };
            StateReference {
                conv: (tensors.maybe_f32(&format!("{prefix}conv_state.{i}")))
                    .map(|columns| conv_state(columns, geometry.mamba.expect("has Mamba blocks").d_conv)),
                ssm: tensors.maybe_f32(&format!("{prefix}ssm_state.{i}")),
                k: kv("k"),
                v: kv("v"),
            }
        };
        let blocks = (0..geometry.blocks.len()).map(|i| BlockReference {
            residual: Some(tensors.f32(&format!("hidden.{i}"))),
            routes: tensors.maybe_i32(&format!("topk_idx.{i}")).map(|picks| RouteReference {
                logits: tensors.maybe_f32(&format!("router_logits.{i}")),
                picks: picks.into_iter().map(ExpertIx::from).collect(),
                weights: tensors.maybe_f32(&format!("topk_weight.{i}")),
                gaps: tensors.maybe_f32(&format!("topk_gap.{i}")),
            }),
            state: state("", i),
            end: state("end_", i),
        });
        let greedy = GreedyReference {
            ids: tensors.ids("greedy_ids"),
            margins: tensors.f32("greedy_gap"),
            path_gaps: tensors.maybe_f32("path_topk_gap").unwrap_or_default(),
            logits: Some((tensors.ids("greedy_top8_ids"), tensors.f32("greedy_top8_logits"))),
        };
        Self {
            name: name.to_owned(),
            act: Activations::F32,
            blocks: blocks.collect(),
            normed: tensors.maybe_f32("final_hidden"),
            logits: tensors.maybe_f32("logits").or_else(|| tensors.maybe_f32("logits_last")),
            draft: tensors.maybe_f32("mtp.depth1_hidden").map(|rows| fixture_draft(tensors, rows, &greedy.ids)),
            greedy,
            prompt,
            rows,
        }
    }

    /// Where only the ids of a continuation are known.
    pub(crate) fn of_ids(name: &str, rows: Vec<f32>, greedy: GreedyReference) -> Self {
        Self {
            name: name.to_owned(),
            act: Activations::F32,
            rows,
            prompt: Vec::new(),
            blocks: Vec::new(),
            normed: None,
            logits: None,
            greedy,
            draft: None,
        }
    }

    /// The recordings beside a file in `oracle/cmf` (the README there).
    pub(crate) fn of_peer(name: &str, json: &Value, tensors: &Tensors, geometry: &Geometry) -> Self {
        let ids = |value: &Value| -> Vec<TokenId> {
            let id = |v: &Value| TokenId(u32::try_from(v.as_u64().expect("an id")).expect("an id"));
            value.as_array().expect("ids").iter().map(id).collect()
        };
        let rows = tensors.f32("input_rows");
        let positions = rows.len() / geometry.hidden;
        let mut blocks: Vec<BlockReference> = geometry.blocks.iter().map(|_| BlockReference::default()).collect();
        blocks.last_mut().expect("a block").residual = Some(tensors.f32("residual"));
        for (j, block) in geometry.blocks_of(BlockKind::Mamba).enumerate() {
            let state = &mut blocks[block.index()].state;
            state.ssm = tensors.maybe_f32(&format!("state.ssm.{j}"));
            state.conv = tensors.maybe_f32(&format!("state.conv.{j}")).map(|columns| {
                let mamba = geometry.mamba.expect("has Mamba blocks");
                swap_outer(&columns, mamba.d_conv - 1, mamba.conv_channels())
            });
        }
        for (j, block) in geometry.blocks_of(BlockKind::Attention).enumerate() {
            let state = &mut blocks[block.index()].state;
            state.k = tensors.maybe_f32(&format!("state.k.{j}"));
            state.v = tensors.maybe_f32(&format!("state.v.{j}"));
        }
        for route in json["routes"].as_array().expect("routes") {
            let experts = route["experts"].as_array().expect("experts");
            assert_eq!(experts.len(), positions, "a route a position");
            let picks = experts.iter().flat_map(&ids).map(|e| ExpertIx::from(e.index())).collect();
            let block = usize::try_from(route["block"].as_u64().expect("a block")).expect("a block");
            blocks[block].routes = Some(RouteReference { logits: None, picks, weights: None, gaps: None });
        }
        let greedy_ids = ids(&json["greedy_ids"]);
        let margins = json["top1_minus_top2"].as_array().expect("margins").iter();
        let all: Vec<TokenId> = (0..geometry.vocab).map(TokenId::from).collect();
        let draft = tensors.maybe_f32("mtp.out").map(|rows| DraftReference {
            path: Vec::new(),
            rows,
            picks: None,
            kv: StateReference {
                k: tensors.maybe_f32("mtp.k"),
                v: tensors.maybe_f32("mtp.v"),
                ..StateReference::default()
            },
            ids: vec![(Conventions::default(), ids(&json["mtp"]["draft_ids"]))],
            margins: None,
            speculation: Vec::new(),
        });
        Self {
            name: name.to_owned(),
            act: Activations::F32,
            rows,
            prompt: ids(&json["prompt_ids"]),
            blocks,
            normed: Some(tensors.f32("normed")),
            logits: None,
            greedy: GreedyReference {
                logits: Some((all.repeat(greedy_ids.len()), tensors.f32("logits"))),
                margins: margins.map(|m| m.as_f64().expect("a margin") as f32).collect(),
                ids: greedy_ids,
                path_gaps: Vec::new(),
            },
            draft,
        }
    }
}

fn fixture_draft(tensors: &Tensors, rows: Vec<f32>, greedy: &[TokenId]) -> DraftReference {
    let ids = [
        (Conventions::default(), "mtp.depth1_ids"),
        (Conventions { prenorm_hidden: true, ..Conventions::default() }, "mtp.depth1_ids_prenorm_hidden"),
        (Conventions { layer_norm: true, ..Conventions::default() }, "mtp.depth1_ids_layernorm_final"),
    ];
    DraftReference {
        path: greedy.to_vec(),
        rows,
        picks: tensors.maybe_i32("mtp.topk_idx").map(|picks| picks.into_iter().map(ExpertIx::from).collect()),
        kv: StateReference::default(),
        ids: ids.into_iter().map(|(conventions, name)| (conventions, tensors.ids(name))).collect(),
        margins: tensors.maybe_f32("mtp.depth1_gap"),
        speculation: (1..=3)
            .map(|depth| SpeculationReference {
                depth,
                drafts: tensors.ids(&format!("mtp.k{depth}.drafts")),
                accepted: tensors.maybe_i32(&format!("mtp.k{depth}.accepted")).expect("accepted counts"),
                margins: tensors.f32(&format!("mtp.k{depth}.gap")),
            })
            .collect(),
    }
}
