//! Checkpoints in every layout, converted in every profile.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use riparian::ids::{ExpertIx, TokenId};
use riparian::model::convert::{ConvertOptions, Quant, Report, convert};
use riparian::model::layout::Role;
use riparian::model::mmap::Access;
use riparian::model::tensors::Codec;
use riparian::model::{self, Model, OpenOptions, Summary, verify};
use safetensors::SafeTensors;
use serde_json::json;
use tempfile::TempDir;

use crate::common::{oracle, oracle_dir, tiny_transcribe_dir};
use crate::weights::{Case, Layout, Stored, write_checkpoint};

const QUANTS: [Quant; 3] = [Quant::Exact, Quant::Q8_2f, Quant::Q4tp];

fn with(quant: Quant) -> ConvertOptions {
    ConvertOptions { quant, ..ConvertOptions::default() }
}

/// Converts, opens and verifies.
fn converted(checkpoint: &Path, out: &Path, options: &ConvertOptions) -> (Arc<Model>, Report) {
    let mut last = (0, 0);
    let report = convert(checkpoint, out, options, |progress| {
        assert!(progress.tensors == last.0 + 1 && progress.bytes >= last.1, "progress goes forward");
        assert!(progress.bytes <= progress.bytes_total && progress.tensors <= progress.tensors_total);
        last = (progress.tensors, progress.bytes);
    })
    .unwrap_or_else(|error| panic!("{}: {error}", checkpoint.display()));
    assert_eq!(last.0, report.tensors);
    assert_eq!(fs::metadata(out).unwrap().len(), report.bytes);
    let model = model::open(out, &OpenOptions::default()).unwrap();
    assert_eq!(verify(&model.container, |_| {}).unwrap().tensors, report.tensors);
    (model, report)
}

/// `oracle/cmf/read_cmf.py`, which was written from the format's page alone.
fn independent_reader(file: &Path) {
    let Some(script) = oracle_dir().map(|dir| dir.join("cmf/read_cmf.py")) else { return };
    let Ok(run) = Command::new("python3").arg(script).arg(file).output() else {
        eprintln!("no python3: the independent reader was not asked");
        return;
    };
    let said = String::from_utf8_lossy(&run.stdout);
    assert!(
        run.status.success() && said.contains("every hash right"),
        "{said}{}",
        String::from_utf8_lossy(&run.stderr)
    );
}

/// Relative root mean square distance of two tensors.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let off: f64 = a.iter().zip(b).map(|(a, b)| square(f64::from(a - b))).sum();
    let all: f64 = a.iter().map(|a| square(f64::from(*a))).sum();
    if off == 0.0 { 0.0 } else { (off / all).sqrt() }
}

/// Every tensor of the quantised model is near its exact one, and as near as its codec can be.
fn compare(exact: &Model, model: &Model) {
    assert_eq!(exact.geometry, model.geometry);
    assert_eq!(exact.container.tensors().len(), model.container.tensors().len());
    for want in exact.container.tensors() {
        let got = model.container.tensor(want.name()).unwrap();
        assert_eq!(want.shape(), got.shape(), "{}", want.name());
        let limit = match got.codec() {
            Codec::F32 | Codec::F16 | Codec::Bf16 => 0.0,
            Codec::Q8_2f => 0.012,
            Codec::Q4tp => 0.13,
        };
        let off = distance(&want.to_f32(), &got.to_f32());
        assert!(off <= limit, "{got:?}: {off}");
    }
}

#[test]
fn rebuilt_cases_convert_in_every_layout_and_profile() {
    let dir = tempfile::tempdir().unwrap();
    let mut converted_cases = 0;
    for name in ["tiny", "tiny-nemo", "tiny-groups", "tiny-mlp", "tiny-latent", "tiny-clamp"] {
        let Some(fixture) = oracle(&format!("fixtures/{name}")) else { continue };
        let case = Case::read(&fixture);
        let tensors = case.tensors(|_| None);
        let mut exact: Option<Arc<Model>> = None;
        for layout in [Layout::Text, Layout::Stacked, Layout::Nemo] {
            let checkpoint = dir.path().join(format!("{name}-{layout:?}"));
            write_checkpoint(&checkpoint, case.config(), tensors.clone(), layout);
            let out = dir.path().join("out.cmf");
            for quant in QUANTS {
                let (model, report) = converted(&checkpoint, &out, &with(quant));
                assert_eq!(report.unused, [""; 0], "{name} {layout:?}");
                // Width 48 and latent 24 are no multiples of 32: said, and stored as q8_2f.
                let narrow = quant == Quant::Q4tp && model.geometry.moe.is_some();
                assert_eq!(!report.fallbacks.is_empty(), narrow, "{name} {quant}");
                match (&exact, quant) {
                    (None, Quant::Exact) => exact = Some(model),
                    (Some(exact), Quant::Exact) => same(exact, &model),
                    (Some(exact), _) => compare(exact, &model),
                    (None, _) => unreachable!("exact comes first"),
                }
            }
        }
        check_sources(&exact.unwrap(), &tensors);
        converted_cases += 1;
    }
    assert!(converted_cases >= 2, "tiny and tiny-nemo are bundled");
}

/// Whatever the layout, the same file comes out, but for the config's own words.
fn same(a: &Model, b: &Model) {
    assert_eq!(a.geometry, b.geometry);
    for (a, b) in a.container.tensors().iter().zip(b.container.tensors()) {
        assert_eq!((a.name(), a.codec(), a.shape(), a.hash()), (b.name(), b.codec(), b.shape(), b.hash()));
    }
}

/// The exact file's values are the checkpoint's.
fn check_sources(model: &Model, tensors: &[(String, Stored)]) {
    assert_eq!(model.container.tensors().len(), tensors.len());
    for (name, stored) in tensors {
        let block = |rest: &str| {
            let kind = rest.split('.').next().unwrap().parse::<usize>().map(|i| model.geometry.blocks[i]);
            use riparian::model::geometry::BlockKind::{Mlp, Moe};
            let mlp = matches!(kind, Ok(Moe | Mlp));
            format!("model.layers.{}", if mlp { rest.replace(".mixer.", ".mlp.") } else { rest.to_owned() })
        };
        let name = match &name[..] {
            "backbone.embeddings.weight" => "model.embed_tokens.weight".to_owned(),
            "backbone.norm_f.weight" => "model.norm.weight".to_owned(),
            name if name.starts_with("mtp.layers.1.") => name.replace(".mixer.", ".mlp."),
            name => name.strip_prefix("backbone.layers.").map_or_else(|| name.to_owned(), block),
        };
        let tensor = model.container.tensor(&name).unwrap_or_else(|| panic!("{name}"));
        let want: Vec<f32> = match stored.dtype {
            safetensors::Dtype::F32 => {
                stored.bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
            }
            _ => (stored.bytes.as_chunks().0.iter()).map(|bytes| half::bf16::from_le_bytes(*bytes).to_f32()).collect(),
        };
        assert_eq!(tensor.to_f32(), want, "{name}");
    }
}

#[test]
fn committed_checkpoints_convert() {
    let Some(oracle) = oracle_dir() else { return };
    let dir = tempfile::tempdir().unwrap();
    for name in ["tiny", "kernel", "transcribe-tiny"] {
        let checkpoint = oracle.join("fixtures").join(name).join("checkpoint");
        let [exact, q8, q4] = QUANTS.map(|quant| {
            let out = dir.path().join(format!("{name}-{quant}.cmf"));
            let (model, _) = converted(&checkpoint, &out, &with(quant));
            // It is slow: one file of a kind.
            if name != "kernel" || quant == Quant::Q4tp {
                independent_reader(&out);
            }
            model
        });
        compare(&exact, &q8);
        compare(&exact, &q4);
        assert_eq!(exact.geometry.draft, name != "tiny");
        if name == "kernel" {
            // The same checkpoint through the peer's converter: same codecs, errors no larger than its.
            let peer = model::open(&oracle.join("cmf/kernel-q4tp.cmf"), &OpenOptions::default()).unwrap();
            assert_eq!(peer.geometry, q4.geometry);
            against_peer(&exact, &q4, &peer);
        }
    }
}

/// Same names, shapes and codecs as the peer's file, and for each matrix an error no larger.
fn against_peer(exact: &Model, ours: &Model, peer: &Model) {
    let names = |model: &Model| {
        let mut names: Vec<String> = model.container.tensors().iter().map(|t| t.name().to_owned()).collect();
        names.sort();
        names
    };
    assert_eq!(names(ours), names(peer));
    let mut sums: HashMap<Codec, [f64; 2]> = HashMap::new();
    for want in exact.container.tensors() {
        let [a, b] = [ours, peer].map(|model| model.container.tensor(want.name()).unwrap());
        assert_eq!(a.shape(), b.shape(), "{}", want.name());
        // Mamba's scalars are f32 here whatever the source; the peer keeps bf16.
        assert!(a.codec() == b.codec() || a.codec() == Codec::F32 && b.codec() == Codec::Bf16, "{a:?} {b:?}");
        let values = want.to_f32();
        let [a_off, b_off] = [a, b].map(|tensor| distance(&values, &tensor.to_f32()));
        if a.codec().is_quantized() {
            assert!(a_off <= b_off * (1.0 + 1e-6), "{a:?}: {a_off} against the peer's {b_off}");
            let sum = sums.entry(a.codec()).or_default();
            *sum = [sum[0] + a_off, sum[1] + b_off];
        } else {
            assert_eq!(a_off, b_off, "{a:?}");
        }
    }
    for (codec, [ours, peer]) in sums {
        println!("{codec}: error {:.3} of the peer's", ours / peer);
    }
}

#[test]
fn the_trained_model_converts_as_the_peer_does_it() {
    let Some(dir) = tiny_transcribe_dir() else { return };
    let out = tempfile::tempdir().unwrap();
    let checkpoint = dir.join("checkpoint");
    let [exact, q8, q4] = QUANTS.map(|quant| {
        let (model, report) = converted(&checkpoint, &out.path().join(format!("{quant}.cmf")), &with(quant));
        assert_eq!((report.unused, report.notes, report.fallbacks), (vec![], vec![], vec![]));
        model
    });
    compare(&exact, &q8);
    compare(&exact, &q4);
    assert_eq!(q4.eos, [TokenId(2), TokenId(11)]);
    let peer = model::open(&dir.join("peer/tiny-q4tp.cmf"), &OpenOptions::default()).unwrap();
    against_peer(&exact, &q4, &peer);
    assert_eq!(q4.tokenizer(), peer.tokenizer());
    for key in peer.provenance.as_object().unwrap().keys() {
        assert_eq!(q4.provenance[key], peer.provenance[key], "{key}");
    }
    for key in peer.container.header()["arch"].as_object().unwrap().keys() {
        // Defaults of the peer's own that it writes out.
        if !["norm_style", "tie_word_embeddings", "attention_sink"].contains(&&key[..]) {
            let [ours, theirs] = [&q4, &peer].map(|model| model.container.header()["arch"][key].clone());
            let close = ours.as_f64().zip(theirs.as_f64()).is_some_and(|(a, b)| (a - b).abs() < 1e-9);
            assert!(ours == theirs || close, "arch.{key}: {ours} against {theirs}");
        }
    }
    // Perception may be quantised too, for files that need not suit the peer.
    let options = ConvertOptions { perception: Quant::Q8_2f, ..with(Quant::Q4tp) };
    let (small, _) = converted(&checkpoint, &out.path().join("small.cmf"), &options);
    compare(&exact, &small);
    let [before, after] = [&q4, &small].map(|model| Summary::of(&model.container).unwrap());
    let ratio = after.bytes_of(Role::Perception) as f64 / before.bytes_of(Role::Perception) as f64;
    assert!(ratio < 0.6, "perception shrinks to {ratio}");
    let total: u64 = after.roles.iter().map(|size| size.bytes).sum();
    assert!(total + after.vocab_bytes <= after.file_bytes);
    let expert = [[128, 256], [256, 128]].map(|[rows, cols]| Codec::Q4tp.payload_len(rows, cols).unwrap() as u64);
    assert_eq!(after.bytes_of(Role::Routed), 4 * 32 * (expert[0] + expert[1]));
    assert_eq!(after.bytes_of(Role::DraftRouted), 32 * (expert[0] + expert[1]));
    assert_eq!(after.bytes_of(Role::Other), 0);
}

/// A checkpoint of the bundled case `tiny`.
fn tiny(dir: &TempDir) -> (PathBuf, Case) {
    let case = Case::read(&oracle("fixtures/tiny").expect("bundled"));
    let checkpoint = dir.path().join("tiny");
    case.write_checkpoint(&checkpoint, Layout::Text);
    (checkpoint, case)
}

fn refusal(checkpoint: &Path) -> String {
    let out = checkpoint.with_extension("refused.cmf");
    let error = convert(checkpoint, &out, &ConvertOptions::default(), |_| {}).unwrap_err().to_string();
    assert!(!out.exists(), "nothing is left of a refused conversion");
    error
}

#[test]
fn hot_experts_are_carried_and_completed() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, _) = tiny(&dir);
    let hot = vec![vec![ExpertIx(3), ExpertIx(1)], vec![], vec![ExpertIx(7)]];
    let options = ConvertOptions { expert_hot: Some(hot), ..ConvertOptions::default() };
    let (model, _) = converted(&checkpoint, &dir.path().join("hot.cmf"), &options);
    let numbers: Vec<Vec<u16>> = model.expert_hot.iter().map(|l| l.iter().map(|e| e.0).collect()).collect();
    assert_eq!(numbers, [[3, 1, 0, 2, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 1, 2, 3, 4, 5, 6]]);
    let options = ConvertOptions { expert_hot: Some(vec![]), ..ConvertOptions::default() };
    let error = convert(&checkpoint, &dir.path().join("none.cmf"), &options, |_| {}).unwrap_err().to_string();
    assert_eq!(error, "expert_hot has 0 lists, wanted one for each of 3 MoE blocks");
}

#[test]
fn an_old_file_survives_a_failed_conversion_and_a_conversion_can_be_repeated() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, _) = tiny(&dir);
    let out = dir.path().join("tiny.cmf");
    converted(&checkpoint, &out, &with(Quant::Q8_2f));
    let before = fs::read(&out).unwrap();
    fs::write(dir.path().join("tiny.cmf.partial"), "left behind by a killed run").unwrap();
    fs::rename(checkpoint.join("model.safetensors"), checkpoint.join("away")).unwrap();
    convert(&checkpoint, &out, &with(Quant::Exact), |_| {}).unwrap_err();
    assert!(fs::read(&out).unwrap() == before);
    fs::rename(checkpoint.join("away"), checkpoint.join("model.safetensors")).unwrap();
    converted(&checkpoint, &out, &with(Quant::Q8_2f));
    assert!(fs::read(&out).unwrap() == before, "the same bytes each time");
    assert!(!dir.path().join("tiny.cmf.partial").exists());
    // Both ways to open it are the same file.
    let memory = model::open(&out, &OpenOptions { access: Access::Memory }).unwrap();
    assert_eq!(memory.container.file_bytes(), before.len() as u64);
}

#[test]
fn checkpoints_that_are_none_are_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, case) = tiny(&dir);
    let config_path = checkpoint.join("config.json");
    let weights_path = checkpoint.join("model.safetensors");
    let (config, weights) = (fs::read_to_string(&config_path).unwrap(), fs::read(&weights_path).unwrap());
    let with_key = |key: &str, value: serde_json::Value| {
        let mut config = case.config().clone();
        config[key] = value;
        fs::write(&config_path, config.to_string()).unwrap();
        let error = refusal(&checkpoint);
        fs::write(&config_path, config_text(&case)).unwrap();
        error
    };
    assert!(with_key("model_type", json!("llama")).starts_with("model_type is \"llama\", wanted nemotron_h"));
    let quantized = with_key("quantization_config", json!({"quant_method": "modelopt"}));
    assert!(quantized.contains("quantised checkpoints (FP8, NVFP4 and others) are not supported"), "{quantized}");
    let shape = with_key("moe_intermediate_size", json!(64));
    assert!(shape.contains("has the shape [48, 64], wanted [64, 64]"), "{shape}");
    let missing = with_key("n_routed_experts", json!(9));
    assert!(missing.contains("[8, 64], wanted [9, 64]"), "{missing}");
    let missing = with_key("hybrid_override_pattern", json!("ME*EMEM"));
    assert!(missing.starts_with("no tensor for model.layers.6.norm.weight, looked for "), "{missing}");
    fs::write(&config_path, "{").unwrap();
    assert!(refusal(&checkpoint).contains("config.json: the config does not parse"));
    fs::write(&config_path, config).unwrap();
    for cut in [0, 7, 100, 5000, weights.len() - 1] {
        fs::write(&weights_path, &weights[..cut]).unwrap();
        assert!(refusal(&checkpoint).contains("model.safetensors is no safetensors file"), "cut at {cut}");
    }
    fs::remove_file(&weights_path).unwrap();
    assert!(refusal(&checkpoint).contains("holds neither model.safetensors nor"));
    fs::write(checkpoint.join("model.safetensors.index.json"), r#"{"weight_map": {"a": "../b"}}"#).unwrap();
    assert!(refusal(&checkpoint).contains("\"../b\" is no file name"));
    // An 8-bit weight.
    fs::remove_file(checkpoint.join("model.safetensors.index.json")).unwrap();
    let mut tensors = case.tensors(|_| None);
    let eighth = tensors.iter_mut().find(|(name, _)| name == "lm_head.weight").unwrap();
    eighth.1.dtype = safetensors::Dtype::F8_E4M3;
    eighth.1.bytes.truncate(512 * 64);
    write_checkpoint(&checkpoint, case.config(), tensors, Layout::Text);
    assert!(refusal(&checkpoint).starts_with("tensor lm_head.weight is F8_E4M3: quantised checkpoints"));
}

fn config_text(case: &Case) -> String {
    case.config().to_string()
}

#[test]
fn shards_of_a_checkpoint_are_put_together() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, case) = tiny(&dir);
    let (whole, _) = converted(&checkpoint, &dir.path().join("whole.cmf"), &with(Quant::Exact));
    // Split in three by turns, `_extra_state` beside them.
    let file = fs::read(checkpoint.join("model.safetensors")).unwrap();
    let views = SafeTensors::deserialize(&file).unwrap();
    let sharded = dir.path().join("sharded");
    fs::create_dir(&sharded).unwrap();
    let mut map = serde_json::Map::new();
    for shard in 0..3 {
        let name = format!("model-{shard}.safetensors");
        let part = views.iter().enumerate().filter(|(i, _)| i % 3 == shard).map(|(_, tensor)| tensor);
        let part: Vec<_> = part.collect();
        part.iter().for_each(|(tensor, _)| drop(map.insert((*tensor).to_owned(), json!(name))));
        safetensors::serialize_to_file(part, None, &sharded.join(name)).unwrap();
    }
    fs::write(sharded.join("config.json"), case.config().to_string()).unwrap();
    fs::write(sharded.join("model.safetensors.index.json"), json!({"weight_map": map}).to_string()).unwrap();
    let (model, _) = converted(&sharded, &dir.path().join("sharded.cmf"), &with(Quant::Exact));
    same(&whole, &model);
    fs::remove_file(sharded.join("model-1.safetensors")).unwrap();
    assert!(refusal(&sharded).contains("model-1.safetensors"));
}
