//! The side file with the observed popularity of a model's experts.
//!
//! `MODEL.cmf.hot.json` lies beside `MODEL.cmf`, so that the model is never
//! touched; opening the model reads it and prefers it to the file's own
//! `expert_hot`. It names the model it was made for by a hash over all
//! tensors: beside any other model it is left alone, with a warning. Deleting
//! it undoes everything.
//!
//! ```json
//! {"format": "riparian expert popularity", "version": 1, "model": "0123456789abcdef",
//!  "positions": 5120, "expert_hot": [[3, 0, 2, 1], [1, 2, 0, 3]]}
//! ```
//!
//! `expert_hot` is as in a file's header (`cmf.md` §6): a list for each MoE
//! block, most used first.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::container::Container;
use super::hash::Hasher;
use crate::ids::ExpertIx;

const FORMAT: &str = "riparian expert popularity";
const VERSION: u64 = 1;

/// The side file of a model.
#[must_use]
pub fn side_file(model: &Path) -> PathBuf {
    let mut name = OsString::from(model);
    name.push(".hot.json");
    name.into()
}

/// What tells models apart: a hash over the names and hashes of all tensors.
#[must_use]
pub fn identity(container: &Container) -> String {
    let mut hasher = Hasher::default();
    for tensor in container.tensors() {
        hasher.update(tensor.name().as_bytes());
        hasher.update(&tensor.hash().to_le_bytes());
    }
    format!("{:016x}", hasher.finish())
}

/// Writes the side file of a model; it appears when it is whole.
///
/// # Errors
///
/// What the system says.
pub fn write(path: &Path, container: &Container, positions: usize, hot: &[Vec<ExpertIx>]) -> io::Result<()> {
    let lists: Vec<Vec<u16>> = hot.iter().map(|list| list.iter().map(|expert| expert.0).collect()).collect();
    let value = json!({
        "format": FORMAT, "version": VERSION, "model": identity(container), "positions": positions,
        "expert_hot": lists,
    });
    let mut partial = OsString::from(path);
    partial.push(".partial");
    let partial = PathBuf::from(partial);
    let write = || {
        let mut file = File::create(&partial)?;
        writeln!(file, "{value}")?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    // What could not be finished is of use to nobody.
    write().inspect_err(|_| drop(fs::remove_file(&partial)))
}

/// The lists in a model's side file, as JSON; `None` without one, or where it is another model's.
///
/// # Errors
///
/// What is wrong with it, in words.
pub(super) fn read(model: &Path, container: &Container) -> Result<Option<Value>, String> {
    let path = side_file(model);
    let text = match std::fs::read_to_string(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text.map_err(|error| format!("{}: {error}", path.display()))?,
    };
    let value: Value = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
    if value["format"] != FORMAT || value["version"] != VERSION {
        let (format, version) = (&value["format"], &value["version"]);
        return Err(format!("{} is {format} {version}, wanted {FORMAT:?} {VERSION}", path.display()));
    }
    if value["model"] != identity(container).as_str() {
        tracing::warn!(path = %path.display(), "made for another model, so it is left alone: calibrate again");
        return Ok(None);
    }
    tracing::info!(path = %path.display(), "popularity of experts");
    Ok(Some(value["expert_hot"].clone()))
}

#[cfg(test)]
mod tests {
    use super::super::synth::{SynthOptions, preset, synth};
    use super::super::tensors::Codec;
    use super::super::{OpenOptions, open};
    use super::*;

    #[test]
    fn a_side_file_is_preferred_and_only_by_its_own_model() {
        let dir = tempfile::tempdir().unwrap();
        let write_model = |name: &str, seed| {
            let geometry = preset("tiny").unwrap();
            let (experts, name_of) = (Codec::Q4tp, "tiny".into());
            let options = SynthOptions { name: name_of, geometry, experts, seed, zipf: 0.8, accept: 0.75, hot: true };
            let path = dir.path().join(name);
            synth(&path, &options, &|_, _| {}).unwrap();
            path
        };
        let (first, second) = (write_model("a.cmf", 1), write_model("b.cmf", 2));
        let opened = |path: &Path| open(path, &OpenOptions::default());
        let (own, before) = (opened(&first).unwrap(), std::fs::read(&first).unwrap());
        let reversed: Vec<Vec<ExpertIx>> =
            own.expert_hot.iter().map(|list| list.iter().rev().copied().collect()).collect();
        write(&side_file(&first), &own.container, 7, &reversed).unwrap();
        assert_eq!(opened(&first).unwrap().expert_hot, reversed);
        assert!(std::fs::read(&first).unwrap() == before, "the model is untouched");
        // Beside another model it is left alone.
        std::fs::copy(side_file(&first), side_file(&second)).unwrap();
        assert_ne!(opened(&second).unwrap().expert_hot, reversed);
        // What is broken is named, not passed over.
        for (text, says) in [("{", "EOF"), (r#"{"format": "x"}"#, "wanted")] {
            std::fs::write(side_file(&first), text).unwrap();
            let error = opened(&first).unwrap_err().to_string();
            assert!(error.contains("a.cmf.hot.json") && error.contains(says), "{error}");
        }
        write(&side_file(&first), &own.container, 7, &reversed[..1]).unwrap();
        assert!(opened(&first).unwrap_err().to_string().contains("1 lists, wanted one for each"));
        std::fs::remove_file(side_file(&first)).unwrap();
        assert_eq!(opened(&first).unwrap().expert_hot, own.expert_hot);
    }
}
