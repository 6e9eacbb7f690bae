//! The numbers that decide every shape of a model (`model.md` §1.1).

use crate::ids::{BlockIx, LayerIx};

/// What a block's mixer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockKind {
    /// Mamba-2, `M` in the pattern.
    Mamba,
    /// Attention without positions, `*`.
    Attention,
    /// Mixture of experts, `E`.
    Moe,
    /// Dense MLP, `-`.
    Mlp,
}

/// Attention blocks (`model.md` §1.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionGeometry {
    /// Query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

impl AttentionGeometry {
    /// Width of all query heads together.
    #[must_use]
    pub const fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of all key (or value) heads together: floats a position adds to K and to V.
    #[must_use]
    pub const fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Mamba-2 blocks (`model.md` §1.4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MambaGeometry {
    /// Heads.
    pub heads: usize,
    /// Width of a head, `P`.
    pub head_dim: usize,
    /// B/C groups, `G`; divides `heads`.
    pub groups: usize,
    /// State size, `N`.
    pub d_state: usize,
    /// Taps of the convolution, `K`.
    pub d_conv: usize,
    /// Limits of the step size after softplus; `[0, inf]` clamps nothing.
    pub dt_limit: [f32; 2],
}

impl MambaGeometry {
    /// `D`: heads times head width.
    #[must_use]
    pub const fn inner(&self) -> usize {
        self.heads * self.head_dim
    }

    /// `C`: channels the convolution runs over, `[x | B | C]`.
    #[must_use]
    pub const fn conv_channels(&self) -> usize {
        self.inner() + 2 * self.groups * self.d_state
    }

    /// Rows of `in_proj`: `[z | x | B | C | dt]`.
    #[must_use]
    pub const fn in_proj_rows(&self) -> usize {
        self.inner() + self.conv_channels() + self.heads
    }

    /// Floats of the conv state: `[channels, K - 1]`.
    #[must_use]
    pub const fn conv_state_len(&self) -> usize {
        self.conv_channels() * (self.d_conv - 1)
    }

    /// Floats of the scan state: `[heads, P, N]`.
    #[must_use]
    pub const fn ssm_state_len(&self) -> usize {
        self.inner() * self.d_state
    }
}

/// MoE blocks (`model.md` §1.5).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeGeometry {
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts chosen for a row.
    pub top_k: usize,
    /// Width of a routed expert.
    pub inter: usize,
    /// Width of the shared expert.
    pub shared_inter: usize,
    /// Width the routed experts read and write when it is not `hidden`.
    pub latent: Option<usize>,
    /// Router groups; 1 means no groups.
    pub n_group: usize,
    /// Groups a row may choose from.
    pub topk_group: usize,
    /// Factor on the routed weights.
    pub scale: f32,
    /// Whether the chosen weights are normalised to sum to one before the factor.
    pub norm_topk: bool,
}

/// Shapes of one model. Read from the file's `llm_config`, never assumed.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding and of the head.
    pub vocab: usize,
    /// Epsilon of every RMS norm.
    pub norm_eps: f32,
    /// Kind of each block, in order.
    pub blocks: Vec<BlockKind>,
    /// Present when a block or the draft layer attends.
    pub attention: Option<AttentionGeometry>,
    /// Present when a block is Mamba.
    pub mamba: Option<MambaGeometry>,
    /// Present when a block or the draft layer has experts.
    pub moe: Option<MoeGeometry>,
    /// Width of the dense MLP blocks, when there are any.
    pub mlp_inter: Option<usize>,
    /// Whether the file holds the draft (multi-token prediction) layer.
    pub draft: bool,
    /// The model's own bound on positions.
    pub max_positions: usize,
}

impl Geometry {
    /// Blocks of one kind, in order.
    pub fn blocks_of(&self, kind: BlockKind) -> impl Iterator<Item = BlockIx> + '_ {
        (self.blocks.iter().enumerate()).filter(move |(_, k)| **k == kind).map(|(i, _)| BlockIx::from(i))
    }

    /// Banks of the decoder, without the draft layer's.
    #[must_use]
    pub fn decoder_layers(&self) -> usize {
        self.blocks_of(BlockKind::Moe).count()
    }

    /// All banks: the decoder's, then the draft layer's if there is one.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.decoder_layers() + usize::from(self.draft)
    }

    /// The draft layer's bank.
    #[must_use]
    pub fn draft_layer(&self) -> Option<LayerIx> {
        self.draft.then(|| LayerIx::from(self.decoder_layers()))
    }

    /// The bank of an MoE block.
    ///
    /// # Panics
    ///
    /// If the block is no MoE block.
    #[must_use]
    pub fn layer_of(&self, block: BlockIx) -> LayerIx {
        assert_eq!(self.blocks[block.index()], BlockKind::Moe, "{block:?} has no bank");
        LayerIx::from(self.blocks[..block.index()].iter().filter(|k| **k == BlockKind::Moe).count())
    }
}
