//! A model with its recorded reference, and where to find it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use riparian::ids::TokenId;
use riparian::model::geometry::{AttentionGeometry, BlockKind, Geometry, MambaGeometry, MoeGeometry};
use riparian::model::weights::DecoderWeights;
use riparian::reference::embed::embed;
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::reference::Reference;
use crate::tensors::Tensors;

/// Fixtures whose references travel with the source; their weights are rebuilt.
pub(crate) const BUNDLED: [&str; 6] = ["tiny", "tiny-groups", "tiny-mlp", "tiny-latent", "tiny-clamp", "tiny-nemo"];

/// A model and what is known of it.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) geometry: Geometry,
    pub(crate) weights: DecoderWeights,
    pub(crate) reference: Reference,
    /// 0 where embeddings are stored exactly, else what one rounding may do.
    pub(crate) embedding_tolerance: f32,
}

/// A file of the oracle: beside the clone, else the part of it that travels with the source.
pub(crate) fn oracle(path: &str) -> Option<PathBuf> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let found = [root.join("../shared/oracle"), root.join("tests/data/oracle")].into_iter().map(|d| d.join(path)).find(|p| p.exists());
    if found.is_none() {
        println!("{path}: not in the bundled subset, and no ../shared/oracle beside the clone; skipped");
    }
    found
}

impl Case {
    /// A folder of `oracle/fixtures`, loaded once a process; `None` where the whole oracle is wanted and absent.
    pub(crate) fn fixture(name: &'static str) -> Option<Arc<Self>> {
        type Shared = Arc<OnceLock<Option<Arc<Case>>>>;
        static LOADED: LazyLock<Mutex<HashMap<&'static str, Shared>>> = LazyLock::new(Mutex::default);
        let slot = Arc::clone(LOADED.lock().expect("no test fails while it holds this").entry(name).or_default());
        slot.get_or_init(|| Self::load_fixture(name).map(Arc::new)).clone()
    }

    fn load_fixture(name: &str) -> Option<Self> {
        let folder = oracle(&format!("fixtures/{name}"))?;
        let text = std::fs::read_to_string(folder.join("case.json")).expect("case.json");
        // the config in it has bare infinities, as published ones do
        let case: Value = serde_json::from_str(&text.replace("Infinity", "1e38")).expect("JSON");
        let mut checkpoint = Checkpoint::rebuild(&case);
        let stored = folder.join("checkpoint");
        let config = if case.get("config").is_some() {
            if case["weights"].as_array().expect("a manifest").iter().any(|entry| entry.get("fitted").is_some()) {
                checkpoint.complete_from(&stored);
            }
            case["config"].clone()
        } else {
            let text = std::fs::read_to_string(stored.join("llm_backbone/config.json")).expect("config.json");
            serde_json::from_str(&text.replace("Infinity", "1e38")).expect("JSON")
        };
        let geometry = geometry(&config);
        let weights = checkpoint.decoder(&geometry);
        let reference = Reference::of_fixture(name, &Tensors::read(&folder.join("reference.safetensors")), &geometry);
        Some(Self { geometry, weights, reference, embedding_tolerance: 0.0 })
    }

    /// Embeddings of some ids, `[n, hidden]`.
    pub(crate) fn embed(&self, ids: &[TokenId]) -> Vec<f32> {
        let mut rows = vec![0.0; ids.len() * self.geometry.hidden];
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(self.geometry.hidden)) {
            embed(&self.weights.embedding, *id, row);
        }
        rows
    }
}

fn geometry(config: &Value) -> Geometry {
    let number = |key: &str| config[key].as_u64().map(|v| v as usize);
    let n = |key: &str| number(key).unwrap_or_else(|| panic!("{key}"));
    let limit = |i: usize| config["time_step_limit"][i].as_f64().map(|v| if v >= 1e30 { f32::INFINITY } else { v as f32 }).unwrap();
    Geometry {
        hidden: n("hidden_size"),
        vocab: n("vocab_size"),
        norm_eps: config["layer_norm_epsilon"].as_f64().unwrap() as f32,
        blocks: (config["hybrid_override_pattern"].as_str().unwrap().chars())
            .map(|c| match c {
                'M' => BlockKind::Mamba,
                '*' => BlockKind::Attention,
                'E' => BlockKind::Moe,
                _ => BlockKind::Mlp,
            })
            .collect(),
        attention: Some(AttentionGeometry { heads: n("num_attention_heads"), kv_heads: n("num_key_value_heads"), head_dim: n("head_dim") }),
        mamba: Some(MambaGeometry {
            heads: n("mamba_num_heads"),
            head_dim: n("mamba_head_dim"),
            groups: n("n_groups"),
            d_state: n("ssm_state_size"),
            d_conv: n("conv_kernel"),
            dt_limit: [limit(0), limit(1)],
        }),
        moe: Some(MoeGeometry {
            experts: n("n_routed_experts"),
            top_k: n("num_experts_per_tok"),
            inter: n("moe_intermediate_size"),
            shared_inter: n("moe_shared_expert_intermediate_size"),
            latent: number("moe_latent_size"),
            n_group: n("n_group"),
            topk_group: n("topk_group"),
            scale: config["routed_scaling_factor"].as_f64().unwrap() as f32,
            norm_topk: true,
        }),
        mlp_inter: number("intermediate_size"),
        draft: number("num_nextn_predict_layers").is_some_and(|n| n > 0),
        max_positions: n("max_position_embeddings"),
    }
}
