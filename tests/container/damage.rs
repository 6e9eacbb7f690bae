//! Damaged and foreign files: each is refused with the reason, none panics.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use riparian::model::container::Container;
use riparian::model::hash::hash64;
use riparian::model::open::from_container;
use riparian::model::verify::VerifyError;
use riparian::model::{Summary, verify};
use serde_json::{Value, json};

use crate::common::oracle;

/// A file taken apart, to be changed and put together again with right hashes.
#[derive(Clone)]
struct Parts {
    envelope: Vec<u8>,
    header: Vec<u8>,
    directory: Vec<u8>,
    data: Vec<u8>,
    vocab: Vec<u8>,
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

impl Parts {
    fn of(file: &[u8]) -> Self {
        let section = |at| {
            let (offset, len) = (u64_at(file, at) as usize, u64_at(file, at + 8) as usize);
            file[offset..offset + len].to_vec()
        };
        let envelope = file[..128].to_vec();
        Self { envelope, header: section(0x10), directory: section(0x20), data: section(0x30), vocab: section(0x50) }
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.header).unwrap()
    }

    fn file(&self) -> Vec<u8> {
        let mut file = self.envelope.clone();
        let mut place = |at: usize, align: usize, bytes: &[u8]| {
            file.resize(file.len().next_multiple_of(align), 0);
            let start = file.len() as u64;
            file.extend(bytes);
            put(&mut file, at, &start.to_le_bytes());
            put(&mut file, at + 8, &(bytes.len() as u64).to_le_bytes());
        };
        place(0x10, 1, &self.header);
        place(0x20, 1, &self.directory);
        place(0x30, 4096, &self.data);
        place(0x50, 1, &self.vocab);
        put(&mut file, 0x70, &hash64(&self.header).to_le_bytes());
        put(&mut file, 0x78, &hash64(&self.directory).to_le_bytes());
        file
    }

    fn records(&self) -> usize {
        u64_at(&self.directory, 0) as usize
    }

    /// The record of a tensor.
    fn record(&mut self, name: &str) -> &mut [u8] {
        let pool = u64_at(&self.directory, 8) as usize;
        let at = (0..self.records()).map(|i| 16 + 56 * i).find(|&at| {
            let start = u32::from_le_bytes(self.directory[at..at + 4].try_into().unwrap()) as usize;
            let len = usize::from(u16::from_le_bytes([self.directory[at + 4], self.directory[at + 5]]));
            self.directory[pool + start..pool + start + len] == *name.as_bytes()
        });
        let at = at.unwrap_or_else(|| panic!("{name}"));
        &mut self.directory[at..at + 56]
    }

    fn refusal(&self) -> String {
        open(self.file()).unwrap_err()
    }
}

fn original() -> Vec<u8> {
    fs::read(oracle("cmf/nemo-q4tp.cmf").expect("bundled")).unwrap()
}

/// Everything a file goes through on open; the error as text.
fn open(file: Vec<u8>) -> Result<(), String> {
    let container = Container::from_bytes(Path::new("file.cmf"), Arc::new(file)).map_err(|error| error.to_string())?;
    from_container(container).map(drop).map_err(|error| error.to_string())
}

const UP: &str = "model.layers.1.mlp.experts.0.up_proj.weight";
const Q: &str = "model.layers.3.mixer.q_proj.weight";

#[test]
fn taken_apart_and_put_together_it_opens() {
    open(original()).unwrap();
    open(Parts::of(&original()).file()).unwrap();
}

#[test]
fn a_cut_file_is_refused_wherever_it_is_cut() {
    let file = original();
    let container = Container::from_bytes(Path::new("file.cmf"), Arc::new(file.clone())).unwrap();
    let data = u64_at(&file, 0x30) as usize;
    let mut cuts = vec![0, 1, 64, 127, 128];
    for at in [0x10, 0x20, 0x30, 0x50] {
        let (start, len) = (u64_at(&file, at) as usize, u64_at(&file, at + 8) as usize);
        cuts.extend([start, start + len / 2, start + len - 1]);
        cuts.extend((start + len < file.len()).then_some(start + len));
    }
    // Inside an expert.
    let expert = container.tensor(UP).unwrap().payload();
    let start = file[data..].windows(expert.len()).position(|window| window == expert).unwrap();
    cuts.extend([data + start + 1, data + start + expert.len() / 2]);
    for cut in cuts {
        let error = open(file[..cut].to_vec()).unwrap_err();
        let want = if cut < 128 { "is too short for a CMF file" } else { "reaches past the file's" };
        assert!(error.contains(want), "cut at {cut}: {error}");
    }
}

#[test]
fn a_flipped_byte_is_found() {
    let file = original();
    for (at, section) in [(0x10, "header"), (0x20, "directory"), (0x50, "vocab")] {
        let (start, len) = (u64_at(&file, at) as usize, u64_at(&file, at + 8) as usize);
        for position in [start, start + len / 2, start + len - 1] {
            let mut bad = file.clone();
            bad[position] ^= 0x10;
            let error = open(bad).unwrap_err();
            assert!(error.contains(&format!("the {section} is damaged: its hash is ")), "{section}: {error}");
        }
    }
    // In a payload: opens, and the check names the tensor.
    let mut parts = Parts::of(&file);
    let offset = u64_at(parts.record(UP), 32) as usize;
    parts.data[offset + 5] ^= 1;
    let container = Container::from_bytes(Path::new("file.cmf"), Arc::new(parts.file())).unwrap();
    let error = verify(&container, |_| {}).unwrap_err();
    let VerifyError::Damaged(damages) = &error else { panic!("{error}") };
    assert_eq!(damages.iter().map(|damage| &damage.name[..]).collect::<Vec<_>>(), [UP]);
    assert!(error.to_string().starts_with(&format!("1 tensor is damaged: {UP} (hash ")), "{error}");
}

#[test]
fn the_envelope_s_faults_are_named() {
    let file = original();
    let with = |at: usize, value: &[u8]| {
        let mut file = file.clone();
        put(&mut file, at, value);
        open(file).unwrap_err()
    };
    assert!(with(0, b"GGUF").contains("not a CMF file"));
    assert!(with(4, &3u32.to_le_bytes()).contains("CMF version 3, wanted 2"));
    for (bit, name) in [
        (1, "masks section"),
        (3, "delta masks"),
        (4, "hot packs"),
        (5, "loop masks"),
        (6, "stand-alone skill"),
        (7, "prism hadamard"),
        (8, "prism affine"),
        (9, "skills v2"),
        (10, "router v2"),
        (11, "decision profile"),
        (12, "bounded attention state"),
        (13, "frozen genome"),
        (14, "reserved"),
        (15, "block diffusion"),
        (31, "unknown"),
    ] {
        let error = with(12, &(1u32 | 1 << bit).to_le_bytes());
        assert!(error.contains(&format!("required feature bit {bit} ({name}) is not supported")), "{error}");
    }
    // Bit 2 may be missing although the file has q8_2f.
    let mut without = file.clone();
    put(&mut without, 12, &1u32.to_le_bytes());
    open(without).unwrap();
    for at in [0x10, 0x20] {
        assert!(with(at + 8, &0u64.to_le_bytes()).contains("is empty"));
    }
    for at in [0x10, 0x20, 0x30, 0x40, 0x50, 0x60] {
        assert!(with(at, &[u64::MAX.to_le_bytes(), 1u64.to_le_bytes()].concat()).contains("reaches past"));
        assert!(with(at, &[1u64.to_le_bytes(), u64::MAX.to_le_bytes()].concat()).contains("reaches past"));
    }
    let askew = u64_at(&file, 0x30) + 64;
    assert!(with(0x30, &[askew.to_le_bytes(), 64u64.to_le_bytes()].concat()).contains("wanted a multiple of 4096"));
    // A hash of 0 was not recorded.
    let mut unrecorded = file.clone();
    put(&mut unrecorded, 0x70, &[0; 16]);
    open(unrecorded).unwrap();
}

#[test]
fn the_directory_s_faults_are_named() {
    let parts = Parts::of(&original());
    let record = |name: &str, change: &dyn Fn(&mut [u8])| {
        let mut parts = parts.clone();
        change(parts.record(name));
        parts.refusal()
    };
    for (code, want) in [
        (3, format!("tensor {UP}: dtype q8_row (code 3) is not supported; convert with the profile q8_2f or q4tp")),
        (6, format!("tensor {UP}: dtype u8 (code 6) is not supported")),
        (21, format!("tensor {UP}: dtype mxfp4 (code 21) is not supported")),
        (16, format!("tensor {UP}: dtype q2tp (code 16) is not supported: the 2-bit q2tp profile")),
        (22, format!("tensor {UP}: unknown dtype code 22")),
        (255, format!("tensor {UP}: unknown dtype code 255")),
        (9, format!("tensor {UP}: payload of ")),
    ] {
        let error = record(UP, &|record| record[6] = code);
        assert!(error.contains(&want), "{error}");
    }
    assert!(record(UP, &|record| record[7] = 7).contains("7 dimensions, at most 6 are possible"));
    assert!(record(UP, &|record| put(record, 8, &[0; 4])).contains("shape [0, 64] has no elements"));
    assert!(record(UP, &|record| put(record, 8, &[255; 8])).contains("q4tp cannot hold shape"));
    assert!(record(UP, &|record| record[7] = 1).contains("q4tp cannot hold shape [32]"));
    assert!(record(UP, &|record| put(record, 12, &63u32.to_le_bytes())).contains("q4tp cannot hold shape [32, 63]"));
    let seen = record(UP, &|record| put(record, 40, &1u64.to_le_bytes()));
    assert!(seen.contains("payload of 1 bytes, q4tp of shape [32, 64] has 1216"), "{seen}");
    assert!(record(UP, &|record| record[32] += 1).contains("wanted a multiple of 64"));
    assert!(
        record(UP, &|record| put(record, 32, &(1u64 << 40).to_le_bytes())).contains("reaches past the data section's")
    );
    assert!(record(UP, &|record| put(record, 32, &(u64::MAX - 63).to_le_bytes())).contains("reaches past"));
    assert!(record(UP, &|record| put(record, 0, &[255; 4])).contains("lies outside the pool's"));

    let mut overlapping = parts.clone();
    let offset = u64_at(overlapping.record(Q), 32);
    put(overlapping.record(UP), 32, &offset.to_le_bytes());
    let error = overlapping.refusal();
    assert!(error.contains("overlap") && error.contains(Q) && error.contains(UP), "{error}");

    let mut twice = parts.clone();
    let name = twice.record("model.layers.1.mlp.experts.1.up_proj.weight")[..6].to_vec();
    put(twice.record(UP), 0, &name);
    assert!(twice.refusal().contains("tensor model.layers.1.mlp.experts.1.up_proj.weight occurs twice"));

    let mut binary = parts.clone();
    let pool = u64_at(&binary.directory, 8) as usize;
    binary.directory[pool] = 0xFF;
    assert!(binary.refusal().contains("the name is not UTF-8"));

    for count in [u64::MAX, 1 << 40, parts.records() as u64 + 1] {
        let mut counted = parts.clone();
        put(&mut counted.directory, 0, &count.to_le_bytes());
        assert!(counted.refusal().contains("directory records do not fit"));
    }
    let mut short = parts.clone();
    short.directory.truncate(8);
    assert!(short.refusal().contains("directory records do not fit"));
}

#[test]
fn scales_that_are_no_numbers_are_refused() {
    let parts = Parts::of(&original());
    let half = |name: &str, at: usize, bits: u16| {
        let mut parts = parts.clone();
        let offset = u64_at(parts.record(name), 32) as usize;
        put(&mut parts.data, offset + at, &bits.to_le_bytes());
        parts.refusal()
    };
    // q4tp [32, 64]: nibbles 32 · 2 · 16, then lo and step of each row.
    for bits in [0x7C00, 0xFC00, 0x7E00] {
        assert!(half(UP, 1024 + 4 * 3, bits).contains(&format!("tensor {UP}: ladder of row 3 is not finite")));
        assert!(half(UP, 1024 + 4 * 3 + 2, bits).contains(&format!("tensor {UP}: ladder of row 3 is not finite")));
    }
    // Finite halves, but 2^(lo + 31 · step) is not: lo = 1000.
    assert!(half(UP, 1024, 0x63D0).contains("ladder of row 0 is not finite"));
    // q8_2f [rows, 64]: codes, then row scales, then column fields.
    let rows = u32::from_le_bytes(parts.clone().record(Q)[8..12].try_into().unwrap()) as usize;
    assert!(half(Q, rows * 64 + 2 * 5, 0x7C00).contains(&format!("tensor {Q}: row scale 5 is not finite")));
    assert!(half(Q, rows * 66 + 2 * 63, 0xFE00).contains(&format!("tensor {Q}: column field 63 is not finite")));
}

#[test]
fn models_that_are_none_are_refused() {
    let parts = Parts::of(&original());
    let header = |change: &dyn Fn(&mut Value)| {
        let mut parts = parts.clone();
        let mut json = parts.json();
        change(&mut json);
        parts.header = json.to_string().into_bytes();
        parts.refusal()
    };
    let llm = |key: &'static str, value: Value| {
        header(&move |json| json["provenance"]["nemotron_transcribe"]["llm_config"][key] = value.clone())
    };
    let other = header(&|json| json["arch"]["arch_name"] = json!("qwen3"));
    assert_eq!(other, "the file's architecture is \"qwen3\", wanted \"nemotron3_5_transcribe\"");
    assert!(header(&|json| json["provenance"] = json!({})).contains("has no provenance.nemotron_transcribe"));
    assert!(llm("layers_block_type", json!(["mamba", "sliding"])).contains("block 1 has the type \"sliding\""));
    assert!(llm("hidden_size", json!(96)).contains("has the shape [192, 64], wanted [192, 96]"));
    assert!(llm("n_routed_experts", json!(7)).contains("has the shape [8, 64], wanted [7, 64]"));
    assert!(llm("hidden_size", Value::Null).contains("config key hidden_size is missing"));
    let expert_hot = header(&|json| json["provenance"]["nemotron_transcribe"]["expert_hot"] = json!([[0], [8], [1]]));
    assert_eq!(expert_hot, "expert_hot: list 1 names expert 8, there are 8");
    let twice = header(&|json| json["provenance"]["nemotron_transcribe"]["expert_hot"] = json!([[0, 0], [], []]));
    assert_eq!(twice, "expert_hot: list 0 names expert 0 twice");
    for text in ["", "{", "[]", "\"x\""] {
        let mut parts = parts.clone();
        parts.header = text.as_bytes().to_vec();
        let error = parts.refusal();
        assert!(error.contains("the header does not parse") || error.contains("the header is empty"), "{error}");
    }
    let mut nameless = parts.clone();
    let pool = u64_at(&nameless.directory, 8) as usize;
    let at = u32::from_le_bytes(nameless.record(UP)[..4].try_into().unwrap()) as usize;
    nameless.directory[pool + at] = b'x';
    assert_eq!(nameless.refusal(), format!("tensor {UP} is missing"));
    let mut quantized = parts.clone();
    let (gate, q) = ("model.layers.1.mlp.gate.weight", quantized.record("lm_head.weight").to_vec());
    // The router over the head's payload: overlapping is checked first, so move the head's name away instead.
    put(quantized.record(gate), 6, &q[6..56]);
    put(quantized.record("lm_head.weight"), 6, &parts.clone().record(gate)[6..56]);
    let error = quantized.refusal();
    assert!(error.contains("gate.weight has the shape [192, 64], wanted [8, 64]"), "{error}");
}

#[test]
fn shards_find_each_other_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let parts = Parts::of(&original());
    // Two files: one with the first half of the records, the other with the rest, over the same data.
    let records = parts.records();
    for (no, range) in [(1, 0..records / 2), (2, records / 2..records)] {
        let mut shard = parts.clone();
        let mut json = shard.json();
        json["shard"] = json!({"no": no, "count": 2});
        shard.header = json.to_string().into_bytes();
        let pool = shard.directory[16 + 56 * records..].to_vec();
        let mut directory = (range.len() as u64).to_le_bytes().to_vec();
        directory.extend((16 + 56 * range.len() as u64).to_le_bytes());
        directory.extend(&shard.directory[16 + 56 * range.start..16 + 56 * range.end]);
        directory.extend(pool);
        shard.directory = directory;
        fs::write(dir.path().join(format!("m-0000{no}-of-00002.cmf")), shard.file()).unwrap();
    }
    let [first, second] = [1, 2].map(|no| dir.path().join(format!("m-0000{no}-of-00002.cmf")));
    for path in [&first, &second] {
        let container = Container::open(path, Default::default()).unwrap();
        assert_eq!(container.tensors().len(), records);
        assert!(container.vocab().is_some());
        from_container(container).unwrap();
    }
    let alone = dir.path().join("alone.cmf");
    fs::copy(&first, &alone).unwrap();
    let error = Container::open(&alone, Default::default()).unwrap_err().to_string();
    assert!(error.contains("shard 1 of 2 wants a name that ends in -00001-of-00002.cmf"), "{error}");
    fs::copy(&first, &second).unwrap();
    let error = Container::open(&first, Default::default()).unwrap_err().to_string();
    assert!(error.contains("shard 1 of 2, wanted 2 of 2"), "{error}");
    fs::remove_file(&second).unwrap();
    assert!(Container::open(&first, Default::default()).is_err());
}

/// Opens whatever it is and, if it opens, reads all of it.
fn exercise(file: Vec<u8>) {
    let Ok(container) = Container::from_bytes(Path::new("file.cmf"), Arc::new(file)) else { return };
    let _ = verify(&container, |_| {});
    let _ = Summary::of(&container);
    container.tensors().iter().for_each(|tensor| drop(tensor.to_f32()));
    let _ = from_container(container);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    /// Bytes changed anywhere, hashes left as they were.
    #[test]
    fn changed_bytes_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut file = original();
        let head = u64_at(&file, 0x30) as usize;
        for (i, (at, value)) in changes.into_iter().enumerate() {
            // Half of them where the structure is.
            let range = if i % 2 == 0 { head } else { file.len() };
            file[at.index(range)] = value;
        }
        exercise(file);
    }

    /// Bytes changed in header, directory and payloads, and the hashes made right again.
    #[test]
    fn plausible_files_never_panic(
        header in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        directory in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        data in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    ) {
        let mut parts = Parts::of(&original());
        for (changes, bytes) in [(header, &mut parts.header), (directory, &mut parts.directory), (data, &mut parts.data)] {
            for (at, value) in changes {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
        }
        exercise(parts.file());
    }

    /// Numbers of the config changed.
    #[test]
    fn other_configs_never_panic(key in any::<prop::sample::Index>(), value in prop_oneof![
        (0i64..70).prop_map(|n| json!(n)), any::<i64>().prop_map(|n| json!(n)), any::<f64>().prop_map(|x| json!(x)),
        Just(json!(null)), Just(json!(true)), Just(json!("Infinity")), Just(json!([])), Just(json!([0.0, 1.0])), Just(json!({})),
    ]) {
        let mut parts = Parts::of(&original());
        let mut json = parts.json();
        let config = json["provenance"]["nemotron_transcribe"]["llm_config"].as_object_mut().unwrap();
        let keys: Vec<String> = config.keys().cloned().collect();
        config[&keys[key.index(keys.len())]] = value;
        parts.header = json.to_string().into_bytes();
        exercise(parts.file());
    }
}
