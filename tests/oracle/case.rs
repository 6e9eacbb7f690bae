//! A model with its recorded reference, and where to find it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock};

use riparian::ids::TokenId;
use riparian::model::config::{TextConfig, parse_json};
use riparian::model::geometry::Geometry;
use riparian::model::state::SequenceState;
use riparian::model::weights::DecoderWeights;
use riparian::model::{Model, OpenOptions, open};
use riparian::reference::embed::embed;
use riparian::reference::{Forward, PlainDecoder};

use crate::checkpoint::Checkpoint;
use crate::common::oracle;
use crate::reference::Reference;
use crate::tensors::Tensors;
use crate::weights;

/// A model and what is known of it.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) geometry: Geometry,
    weights: Weights,
    pub(crate) reference: Reference,
    path: OnceLock<(Vec<f32>, Forward)>,
}

/// Where a case's weights lie.
#[derive(Debug)]
enum Weights {
    /// In memory, made by the hash rule.
    Rebuilt { checkpoint: Checkpoint, decoder: Box<DecoderWeights> },
    /// In a file.
    Opened(Arc<Model>),
}

impl Case {
    /// A folder of `oracle/fixtures`, loaded once a process; `None` where the whole oracle is wanted and absent.
    pub(crate) fn fixture(name: &'static str) -> Option<Arc<Self>> {
        type Shared = Arc<OnceLock<Option<Arc<Case>>>>;
        static LOADED: LazyLock<Mutex<HashMap<&'static str, Shared>>> = LazyLock::new(Mutex::default);
        let slot = Arc::clone(LOADED.lock().expect("no test fails while it holds this").entry(name).or_default());
        slot.get_or_init(|| Self::load_fixture(name).map(Arc::new)).clone()
    }

    /// As [`Case::fixture`], a copy of the caller's own.
    pub(crate) fn load_fixture(name: &str) -> Option<Self> {
        let folder = oracle(&format!("fixtures/{name}"))?;
        let case = weights::Case::read(&folder);
        let checkpoint = Checkpoint::of_fixture(&case, &folder);
        let own = folder.join("checkpoint/llm_backbone/config.json");
        let config = if case.config().is_null() {
            parse_json(&std::fs::read_to_string(&own).unwrap_or_else(|e| panic!("{}: {e}", own.display())))
                .expect("JSON")
        } else {
            case.config().clone()
        };
        let draft = checkpoint.has("mtp.layers.0.eh_proj.weight");
        let geometry = TextConfig::read(&config, draft).expect("a config").geometry;
        let decoder = Box::new(checkpoint.decoder(&geometry));
        let weights = Weights::Rebuilt { checkpoint, decoder };
        let reference = Reference::of_fixture(name, &Tensors::read(&folder.join("reference.safetensors")), &geometry);
        Some(Self { geometry, weights, reference, path: OnceLock::new() })
    }

    /// A file of `oracle/cmf`; `None` where the whole oracle is wanted and absent.
    pub(crate) fn peer(name: &str) -> Option<Self> {
        let path = oracle(&format!("cmf/{name}.cmf"))?;
        let model = open(&path, &OpenOptions::default()).unwrap_or_else(|e| panic!("{name}: {e}"));
        let json = std::fs::read_to_string(path.with_extension("json")).expect("the recordings beside the file");
        let json = parse_json(&json).expect("JSON");
        let tensors = Tensors::read(&path.with_extension("safetensors"));
        let reference = Reference::of_peer(name, &json, &tensors, &model.geometry);
        let geometry = model.geometry.clone();
        Some(Self { geometry, weights: Weights::Opened(model), reference, path: OnceLock::new() })
    }

    /// A model that is open already.
    pub(crate) fn of_model(model: &Arc<Model>, reference: Reference) -> Self {
        let (geometry, weights) = (model.geometry.clone(), Weights::Opened(Arc::clone(model)));
        Self { geometry, weights, reference, path: OnceLock::new() }
    }

    /// The decoder's weights.
    pub(crate) fn weights(&self) -> &DecoderWeights {
        match &self.weights {
            Weights::Rebuilt { decoder, .. } => decoder,
            Weights::Opened(model) => &model.decoder,
        }
    }

    /// The file's model, unless the weights were rebuilt.
    pub(crate) fn opened(&self) -> Option<&Arc<Model>> {
        match &self.weights {
            Weights::Rebuilt { .. } => None,
            Weights::Opened(model) => Some(model),
        }
    }

    /// A fixture's weights once more, for whoever wants to own or change them; the matrices are handles.
    pub(crate) fn rebuilt(&self) -> DecoderWeights {
        match &self.weights {
            Weights::Rebuilt { checkpoint, .. } => checkpoint.decoder(&self.geometry),
            Weights::Opened(_) => panic!("{} is a file", self.reference.name),
        }
    }

    /// The same model with another reference.
    pub(crate) fn with_reference(mut self, reference: Reference) -> Self {
        self.reference = reference;
        self.path = OnceLock::new();
        self
    }

    /// What the draft layer's reference was made over: the path's rows `[n + 1, hidden]`, and what the plain decoder
    /// says of the first `n`.
    pub(crate) fn path(&self) -> (&[f32], &Forward) {
        let (rows, forward) = self.path.get_or_init(|| {
            let mut rows = self.reference.rows.clone();
            rows.extend(self.embed(&self.reference.draft.as_ref().expect("a case with a draft layer").path));
            let plain = PlainDecoder::new(&self.geometry, self.weights(), self.reference.act);
            let read = &rows[..rows.len() - self.geometry.hidden];
            let forward = plain.forward(read, &mut SequenceState::new(&self.geometry), None);
            (rows, forward)
        });
        (rows, forward)
    }

    /// Embeddings of some ids, `[n, hidden]`.
    pub(crate) fn embed(&self, ids: &[TokenId]) -> Vec<f32> {
        let mut rows = vec![0.0; ids.len() * self.geometry.hidden];
        for (id, row) in ids.iter().zip(rows.chunks_exact_mut(self.geometry.hidden)) {
            embed(&self.weights().embedding, *id, row);
        }
        rows
    }
}
