//! All weights of a decoder, named by what they do.
//!
//! Matrices stay in the mapped file; vectors and small exact tensors are f32
//! copies (a few megabytes in the 30B model).

use super::tensors::Matrix;

/// One block: its input norm and its mixer.
#[derive(Debug)]
pub struct Block {
    /// `[hidden]`
    pub norm: Vec<f32>,
    /// What follows the norm.
    pub mixer: Mixer,
}

/// A block's weights beyond its norm.
#[derive(Debug)]
pub enum Mixer {
    /// `model.md` §1.4
    Mamba(Box<MambaWeights>),
    /// `model.md` §1.3
    Attention(AttentionWeights),
    /// `model.md` §1.5
    Moe(Box<MoeWeights>),
    /// `model.md` §1.6
    Mlp(MlpWeights),
}

/// `model.md` §1.4
#[derive(Debug)]
pub struct MambaWeights {
    /// `[inner + channels + heads, hidden]`, rows `[z | x | B | C | dt]`
    pub in_proj: Matrix,
    /// `[hidden, inner]`
    pub out_proj: Matrix,
    /// `[channels, K]`; tap `K - 1` multiplies the current position
    pub conv: Vec<f32>,
    /// `[channels]`
    pub conv_bias: Vec<f32>,
    /// `[heads]`
    pub a_log: Vec<f32>,
    /// `[heads]`
    pub d_skip: Vec<f32>,
    /// `[heads]`
    pub dt_bias: Vec<f32>,
    /// `[inner]`, the gated group norm
    pub norm: Vec<f32>,
}

/// `model.md` §1.3
#[derive(Debug)]
pub struct AttentionWeights {
    /// `[heads * head_dim, hidden]`
    pub q: Matrix,
    /// `[kv_heads * head_dim, hidden]`
    pub k: Matrix,
    /// `[kv_heads * head_dim, hidden]`
    pub v: Matrix,
    /// `[hidden, heads * head_dim]`
    pub o: Matrix,
}

/// `model.md` §1.5
#[derive(Debug)]
pub struct MoeWeights {
    /// Router `[experts, hidden]`, f32
    pub gate: Vec<f32>,
    /// `e_score_correction_bias [experts]`: selects, never weighs
    pub bias: Vec<f32>,
    /// One per routed expert.
    pub experts: Vec<MlpWeights>,
    /// The expert every row goes through.
    pub shared: MlpWeights,
    /// `fc1 [latent, hidden]` and `fc2 [hidden, latent]` of latent models
    pub latent: Option<[Matrix; 2]>,
}

/// Two matrices with relu² between: an expert, the shared expert or a dense block.
#[derive(Debug)]
pub struct MlpWeights {
    /// `[inter, in]`
    pub up: Matrix,
    /// `[in, inter]`
    pub down: Matrix,
}

/// The multi-token-prediction layer (`model.md` §2).
#[derive(Debug)]
pub struct DraftWeights {
    /// `[hidden]`, on the next token's embedding
    pub enorm: Vec<f32>,
    /// `[hidden]`, on the decoder's hidden row
    pub hnorm: Vec<f32>,
    /// `[hidden, 2 * hidden]`, columns `[embedding | hidden]`
    pub eh_proj: Matrix,
    /// `[hidden]`
    pub attention_norm: Vec<f32>,
    /// Over its own KV.
    pub attention: AttentionWeights,
    /// `[hidden]`
    pub moe_norm: Vec<f32>,
    /// Its own bank.
    pub moe: Box<MoeWeights>,
    /// `[hidden]`
    pub final_norm: Vec<f32>,
}

/// The decoder.
#[derive(Debug)]
pub struct DecoderWeights {
    /// `[vocab, hidden]`
    pub embedding: Matrix,
    /// In order.
    pub blocks: Vec<Block>,
    /// `[hidden]`
    pub final_norm: Vec<f32>,
    /// `[vocab, hidden]`
    pub head: Matrix,
    /// Present when the file holds `mtp.layers.0.eh_proj.weight`.
    pub draft: Option<Box<DraftWeights>>,
}
