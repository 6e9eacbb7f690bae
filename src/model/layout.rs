//! Which tensors a decoder has: names, shapes and uses (`cmf.md` §7).
//!
//! The one list behind opening, converting and summing up.

use super::config::TextConfig;
use super::geometry::{AttentionGeometry, BlockKind, Geometry, MambaGeometry, MoeGeometry};

/// The tensor whose presence says that a file has the draft layer.
pub const DRAFT_MARK: &str = "mtp.layers.0.eh_proj.weight";

/// How a tensor may be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// f32, f16 or bf16; a converter keeps the source's.
    Exact,
    /// f32, f16 or bf16; a converter writes f32 (`model.md` §1.7).
    ExactF32,
    /// Any codec; q8_2f in both quantised profiles.
    Matrix,
    /// Any codec; q4tp in the q4tp profile.
    Expert,
}

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The table of input rows.
    Embedding,
    /// The output matrix.
    Head,
    /// Mamba blocks.
    Mamba,
    /// Attention blocks.
    Attention,
    /// Routed experts of the decoder.
    Routed,
    /// Shared experts and latent projections.
    Shared,
    /// Router and correction bias.
    Router,
    /// Dense MLP blocks.
    Mlp,
    /// Norms between the blocks.
    Norm,
    /// The draft layer but for its routed experts.
    Draft,
    /// The draft layer's routed experts.
    DraftRouted,
    /// Speech and diarization towers, projection.
    Perception,
    /// The word timestamp head.
    Timestamps,
    /// Anything else a file holds.
    Other,
}

impl Role {
    /// A word for it, for tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Head => "head",
            Self::Mamba => "mamba",
            Self::Attention => "attention",
            Self::Routed => "routed experts",
            Self::Shared => "shared experts",
            Self::Router => "routers",
            Self::Mlp => "dense mlp",
            Self::Norm => "norms",
            Self::Draft => "draft layer",
            Self::DraftRouted => "draft experts",
            Self::Perception => "perception",
            Self::Timestamps => "timestamps",
            Self::Other => "other",
        }
    }
}

/// A tensor that a decoder needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Its name in a CMF file.
    pub name: String,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// How it may be stored.
    pub kind: Kind,
    /// What it is for.
    pub role: Role,
}

/// The prefix of a block's mixer: Mamba and attention lie under `mixer`, MoE and dense blocks under `mlp`.
#[must_use]
pub fn mixer(block: usize, kind: BlockKind) -> String {
    let part = match kind {
        BlockKind::Mamba | BlockKind::Attention => "mixer",
        BlockKind::Moe | BlockKind::Mlp => "mlp",
    };
    format!("model.layers.{block}.{part}.")
}

/// Every tensor of the decoder and its draft layer, in the order a step reads them. Lazy, block by block: a config may
/// promise more tensors than any file has.
pub fn decoder(config: &TextConfig) -> impl Iterator<Item = Wanted> + '_ {
    let blocks = config.geometry.blocks.iter().enumerate();
    list(config, |list| list.embedding())
        .chain(blocks.flat_map(move |(i, &kind)| list(config, |list| list.block(i, kind))))
        .chain(list(config, |list| list.head(config.tied_head)))
        .chain(list(config, |list| {
            if config.geometry.draft {
                list.draft();
            }
        }))
}

/// What `fill` adds to an empty list.
fn list(config: &TextConfig, fill: impl FnOnce(&mut List<'_>)) -> std::vec::IntoIter<Wanted> {
    let mut list = List { geometry: &config.geometry, conv_bias: config.conv_bias, wanted: Vec::new() };
    fill(&mut list);
    list.wanted.into_iter()
}

struct List<'a> {
    geometry: &'a Geometry,
    conv_bias: bool,
    wanted: Vec<Wanted>,
}

impl List<'_> {
    fn add(&mut self, name: String, shape: &[usize], kind: Kind, role: Role) {
        self.wanted.push(Wanted { name, shape: shape.to_vec(), kind, role });
    }

    fn norm(&mut self, name: String, role: Role) {
        self.add(name, &[self.geometry.hidden], Kind::Exact, role);
    }

    fn embedding(&mut self) {
        let shape = [self.geometry.vocab, self.geometry.hidden];
        self.add("model.embed_tokens.weight".into(), &shape, Kind::Matrix, Role::Embedding);
    }

    fn head(&mut self, tied: bool) {
        self.norm("model.norm.weight".into(), Role::Norm);
        if !tied {
            let shape = [self.geometry.vocab, self.geometry.hidden];
            self.add("lm_head.weight".into(), &shape, Kind::Matrix, Role::Head);
        }
    }

    fn draft(&mut self) {
        let (draft, hidden) = (Role::Draft, self.geometry.hidden);
        self.norm("mtp.layers.0.enorm.weight".into(), draft);
        self.norm("mtp.layers.0.hnorm.weight".into(), draft);
        self.add(DRAFT_MARK.into(), &[hidden, 2 * hidden], Kind::Matrix, draft);
        self.norm("mtp.layers.0.norm.weight".into(), draft);
        self.attention("mtp.layers.0.mixer.", draft);
        self.norm("mtp.layers.1.norm.weight".into(), draft);
        self.moe("mtp.layers.1.mlp.", draft, draft, Role::DraftRouted);
        self.norm("mtp.layers.1.final_layernorm.weight".into(), draft);
    }

    fn block(&mut self, i: usize, kind: BlockKind) {
        self.norm(format!("model.layers.{i}.norm.weight"), Role::Norm);
        let prefix = mixer(i, kind);
        match kind {
            BlockKind::Mamba => self.mamba(&prefix),
            BlockKind::Attention => self.attention(&prefix, Role::Attention),
            BlockKind::Moe => self.moe(&prefix, Role::Router, Role::Shared, Role::Routed),
            BlockKind::Mlp => {
                let inter = self.geometry.mlp_inter.expect("read with the blocks");
                self.mlp(&prefix, [inter, self.geometry.hidden], Kind::Matrix, Role::Mlp);
            }
        }
    }

    fn mamba(&mut self, prefix: &str) {
        let mamba: MambaGeometry = self.geometry.mamba.expect("read with the blocks");
        let (hidden, inner, channels) = (self.geometry.hidden, mamba.inner(), mamba.conv_channels());
        let mut add = |name: &str, shape: &[usize], kind| self.add(format!("{prefix}{name}"), shape, kind, Role::Mamba);
        add("in_proj.weight", &[mamba.in_proj_rows(), hidden], Kind::Matrix);
        add("conv1d.weight", &[channels, mamba.d_conv], Kind::Exact);
        for name in ["A_log", "D", "dt_bias"] {
            add(name, &[mamba.heads], Kind::ExactF32);
        }
        add("norm.weight", &[inner], Kind::Exact);
        add("out_proj.weight", &[hidden, inner], Kind::Matrix);
        if self.conv_bias {
            self.add(format!("{prefix}conv1d.bias"), &[channels], Kind::Exact, Role::Mamba);
        }
    }

    fn attention(&mut self, prefix: &str, role: Role) {
        let attention: AttentionGeometry = self.geometry.attention.expect("read with the blocks");
        let (hidden, q, kv) = (self.geometry.hidden, attention.q_width(), attention.kv_width());
        for (name, shape) in [("q", [q, hidden]), ("k", [kv, hidden]), ("v", [kv, hidden]), ("o", [hidden, q])] {
            self.add(format!("{prefix}{name}_proj.weight"), &shape, Kind::Matrix, role);
        }
    }

    fn moe(&mut self, prefix: &str, router: Role, shared: Role, routed: Role) {
        let moe: MoeGeometry = self.geometry.moe.expect("read with the blocks");
        let hidden = self.geometry.hidden;
        let width = moe.latent.unwrap_or(hidden);
        self.add(format!("{prefix}gate.weight"), &[moe.experts, hidden], Kind::ExactF32, router);
        self.add(format!("{prefix}gate.e_score_correction_bias"), &[moe.experts], Kind::ExactF32, router);
        if let Some(latent) = moe.latent {
            self.add(format!("{prefix}fc1_latent_proj.weight"), &[latent, hidden], Kind::Matrix, shared);
        }
        for expert in 0..moe.experts {
            self.mlp(&format!("{prefix}experts.{expert}."), [moe.inter, width], Kind::Expert, routed);
        }
        if let Some(latent) = moe.latent {
            self.add(format!("{prefix}fc2_latent_proj.weight"), &[hidden, latent], Kind::Matrix, shared);
        }
        self.mlp(&format!("{prefix}shared_experts."), [moe.shared_inter, hidden], Kind::Matrix, shared);
    }

    fn mlp(&mut self, prefix: &str, [inter, width]: [usize; 2], kind: Kind, role: Role) {
        self.add(format!("{prefix}up_proj.weight"), &[inter, width], kind, role);
        self.add(format!("{prefix}down_proj.weight"), &[width, inter], kind, role);
    }
}
