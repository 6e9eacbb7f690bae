//! Files the peer wrote: opened, checked against their checkpoints, and every hash recomputed.

use riparian::ids::TokenId;
use riparian::model::container::Container;
use riparian::model::hash::hash64;
use riparian::model::mmap::Access;
use riparian::model::tensors::Codec;
use riparian::model::{self, OpenOptions};

use crate::common::{oracle, tiny_transcribe_dir};

#[test]
fn peer_files_open_both_ways_and_every_hash_is_right() {
    let mut opened = 0;
    for name in ["tiny-f32", "kernel-q4tp", "nemo-exact-mtp", "nemo-q4tp"] {
        let Some(path) = oracle(&format!("cmf/{name}.cmf")) else { continue };
        let mapped = model::open(&path, &OpenOptions { access: Access::Mapped }).unwrap();
        let memory = model::open(&path, &OpenOptions { access: Access::Memory }).unwrap();
        assert_eq!(mapped.geometry, memory.geometry);
        assert_eq!(mapped.geometry.draft, mapped.decoder.draft.is_some());
        assert_eq!(mapped.geometry.draft, ["kernel-q4tp", "nemo-exact-mtp"].contains(&name));
        assert_eq!(mapped.eos, [TokenId(2)], "{name}");
        for (a, b) in mapped.container.tensors().iter().zip(memory.container.tensors()) {
            assert_eq!(hash64(a.payload()), a.hash(), "{name} {a:?}");
            assert_eq!(a.payload(), b.payload(), "{name} {a:?}");
        }
        mapped.container.still_intact().unwrap();
        opened += 1;
    }
    assert!(opened >= 2, "the bundled two at least");
}

#[test]
fn the_peer_s_trained_file_opens() {
    let Some(dir) = tiny_transcribe_dir() else { return };
    let model = model::open(&dir.join("peer/tiny-q4tp.cmf"), &OpenOptions::default()).unwrap();
    assert_eq!(model.eos, [TokenId(2), TokenId(11)]);
    assert_eq!(model.audio_token, Some(TokenId(512)));
    assert!(model.tokenizer().is_some() && model.alignment_tokenizer().is_some());
    let up = model.container.matrix("model.layers.1.mlp.experts.0.up_proj.weight").unwrap();
    assert_eq!(up.codec(), Codec::Q4tp);
}

#[test]
fn vectors_alone_are_no_model() {
    let container = Container::open(&oracle("cmf/vectors/vectors.cmf").expect("bundled"), Access::Mapped).unwrap();
    let error = model::open::from_container(container).unwrap_err().to_string();
    assert!(error.contains("architecture") || error.contains("provenance"), "{error}");
}
