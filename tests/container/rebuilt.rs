//! Checkpoints rebuilt from the oracle's rule are the oracle's, bit for bit.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use safetensors::SafeTensors;

use crate::common::{oracle, oracle_dir};
use crate::weights::{Case, Stored};

/// Every tensor of a checkpoint's files.
fn stored(checkpoint: &Path) -> HashMap<String, Stored> {
    let mut all = HashMap::new();
    for entry in fs::read_dir(checkpoint).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            let file = fs::read(path).unwrap();
            for (name, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
                let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
                all.insert(name, Stored { dtype, shape, bytes });
            }
        }
    }
    all
}

#[test]
fn the_rule_gives_the_recorded_digests() {
    let mut checked = 0;
    for name in ["tiny", "wide", "tiny-groups", "tiny-mlp", "tiny-latent", "tiny-clamp", "tiny-nemo"] {
        let Some(dir) = oracle(&format!("fixtures/{name}")) else { continue };
        let case = Case::read(&dir);
        case.check_digest(&case.tensors(|_| None));
        checked += 1;
    }
    assert!(checked > 0, "tiny is bundled");
}

#[test]
fn the_rule_gives_the_files_of_tiny_and_kernel() {
    let Some(oracle) = oracle_dir() else { return };
    for name in ["tiny", "kernel"] {
        let dir = oracle.join("fixtures").join(name);
        let files = stored(&dir.join("checkpoint"));
        let case = Case::read(&dir);
        let tensors = case.tensors(|name| files.get(name).cloned());
        assert_eq!(tensors.len(), files.len());
        for (name, tensor) in &tensors {
            let file = &files[name];
            assert_eq!((file.dtype, &file.shape), (tensor.dtype, &tensor.shape), "{name}");
            assert!(file.bytes == tensor.bytes, "{name}");
        }
        case.check_digest(&tensors);
    }
}
