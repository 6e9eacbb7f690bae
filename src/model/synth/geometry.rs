//! Geometries with a name, and a geometry as a file's `llm_config`.

use serde_json::{Value, json};

use crate::model::geometry::{AttentionGeometry, BlockKind, Geometry, MambaGeometry, MoeGeometry};

/// A name no geometry has.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("unknown geometry {0:?}, wanted nano-30b, mini, kernel or tiny")]
pub struct UnknownPreset(pub String);

/// A geometry by name, without the draft layer.
///
/// * `nano-30b`: the published 30B-A3B decoder, 52 blocks
/// * `mini`: its proportions in about half a gigabyte, for machines without a large disk
/// * `kernel`: a few blocks at the smallest widths that every device kernel takes
/// * `tiny`: for tests
///
/// # Errors
///
/// Any other name.
pub fn preset(name: &str) -> Result<Geometry, UnknownPreset> {
    let nano = Geometry {
        hidden: 2688,
        vocab: 131_072,
        norm_eps: 1e-5,
        blocks: blocks("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"),
        attention: Some(AttentionGeometry { heads: 32, kv_heads: 2, head_dim: 128 }),
        mamba: Some(MambaGeometry {
            heads: 64,
            head_dim: 64,
            groups: 8,
            d_state: 128,
            d_conv: 4,
            dt_limit: [0.0, f32::INFINITY],
        }),
        moe: Some(MoeGeometry {
            experts: 128,
            top_k: 6,
            inter: 1856,
            shared_inter: 3712,
            latent: None,
            n_group: 1,
            topk_group: 1,
            scale: 2.5,
            norm_topk: true,
        }),
        mlp_inter: None,
        draft: false,
        max_positions: 262_144,
    };
    Ok(match name {
        "nano-30b" => nano,
        "mini" => Geometry {
            hidden: 1024,
            vocab: 32_768,
            blocks: blocks("MEMEM*EMEMEM*EME"),
            attention: Some(AttentionGeometry { heads: 16, kv_heads: 2, head_dim: 64 }),
            mamba: nano.mamba.map(|mamba| MambaGeometry { heads: 32, d_state: 64, ..mamba }),
            moe: nano.moe.map(|moe| MoeGeometry { experts: 64, inter: 768, shared_inter: 1536, ..moe }),
            ..nano
        },
        "kernel" => Geometry {
            hidden: 256,
            vocab: 1024,
            blocks: blocks("MEM*EMEM*E"),
            attention: Some(AttentionGeometry { heads: 8, kv_heads: 2, head_dim: 128 }),
            mamba: nano.mamba.map(|mamba| MambaGeometry { heads: 8, groups: 2, d_state: 64, ..mamba }),
            moe: nano.moe.map(|moe| MoeGeometry { experts: 16, top_k: 4, inter: 128, shared_inter: 256, ..moe }),
            ..nano
        },
        "tiny" => Geometry {
            hidden: 128,
            vocab: 320,
            blocks: blocks("MEM*EM*E"),
            attention: Some(AttentionGeometry { heads: 4, kv_heads: 1, head_dim: 32 }),
            mamba: nano.mamba.map(|mamba| MambaGeometry { heads: 4, head_dim: 32, groups: 2, d_state: 16, ..mamba }),
            moe: nano.moe.map(|moe| MoeGeometry { experts: 8, top_k: 3, inter: 64, shared_inter: 128, ..moe }),
            ..nano
        },
        other => return Err(UnknownPreset(other.into())),
    })
}

/// Blocks by their letters; only those written here.
fn blocks(letters: &str) -> Vec<BlockKind> {
    let kind = |letter| match letter {
        'M' => BlockKind::Mamba,
        '*' => BlockKind::Attention,
        'E' => BlockKind::Moe,
        _ => BlockKind::Mlp,
    };
    letters.chars().map(kind).collect()
}

/// A geometry as a file's `llm_config` has it (`cmf.md` §6).
#[must_use]
pub fn llm_config(geometry: &Geometry) -> Value {
    let word = |kind: &BlockKind| match kind {
        BlockKind::Mamba => "mamba",
        BlockKind::Attention => "attention",
        BlockKind::Moe => "moe",
        BlockKind::Mlp => "mlp",
    };
    let mut config = json!({
        "hidden_size": geometry.hidden,
        "vocab_size": geometry.vocab,
        "layer_norm_epsilon": shortest(geometry.norm_eps),
        "layers_block_type": geometry.blocks.iter().map(word).collect::<Vec<_>>(),
        "max_position_embeddings": geometry.max_positions,
        "num_nextn_predict_layers": u8::from(geometry.draft),
        "tie_word_embeddings": false,
        "mlp_hidden_act": "relu2",
    });
    if let Some(mamba) = geometry.mamba {
        let [low, high] = mamba.dt_limit;
        let high = if high.is_finite() { json!(shortest(high)) } else { json!({"__float__": "Infinity"}) };
        config["mamba_num_heads"] = json!(mamba.heads);
        config["mamba_head_dim"] = json!(mamba.head_dim);
        config["n_groups"] = json!(mamba.groups);
        config["ssm_state_size"] = json!(mamba.d_state);
        config["conv_kernel"] = json!(mamba.d_conv);
        config["time_step_limit"] = json!([shortest(low), high]);
    }
    if let Some(attention) = geometry.attention {
        config["num_attention_heads"] = json!(attention.heads);
        config["num_key_value_heads"] = json!(attention.kv_heads);
        config["head_dim"] = json!(attention.head_dim);
    }
    if let Some(moe) = geometry.moe {
        config["n_routed_experts"] = json!(moe.experts);
        config["num_experts_per_tok"] = json!(moe.top_k);
        config["moe_intermediate_size"] = json!(moe.inter);
        config["moe_shared_expert_intermediate_size"] = json!(moe.shared_inter);
        config["moe_latent_size"] = json!(moe.latent);
        config["n_group"] = json!(moe.n_group);
        config["topk_group"] = json!(moe.topk_group);
        config["routed_scaling_factor"] = json!(shortest(moe.scale));
        config["norm_topk_prob"] = json!(moe.norm_topk);
    }
    if let Some(inter) = geometry.mlp_inter {
        config["intermediate_size"] = json!(inter);
    }
    config
}

/// The number with as few digits as tell the float apart: 1e-5, not 9.99999974737875e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().expect("a float's own digits")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::config::TextConfig;

    #[test]
    fn a_geometry_is_read_back_as_it_was() {
        for name in ["nano-30b", "mini", "kernel", "tiny"] {
            for draft in [false, true] {
                let mut geometry = Geometry { draft, ..preset(name).unwrap() };
                assert_eq!(TextConfig::read(&llm_config(&geometry), draft).unwrap().geometry, geometry, "{name}");
                geometry.blocks.push(BlockKind::Mlp);
                geometry.mlp_inter = Some(96);
                geometry.mamba.as_mut().unwrap().dt_limit = [0.001, 0.1];
                let moe = geometry.moe.as_mut().unwrap();
                (moe.latent, moe.n_group, moe.topk_group, moe.norm_topk) = (Some(64), 2, 2, false);
                assert_eq!(TextConfig::read(&llm_config(&geometry), draft).unwrap().geometry, geometry, "{name}");
            }
        }
        assert_eq!(preset("nano").unwrap_err(), UnknownPreset("nano".into()));
    }
}
