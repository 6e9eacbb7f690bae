//! Compiled pipelines kept between runs, where the driver has a pipeline cache.
//!
//! One file an adapter and driver in the user's cache folder. What is damaged,
//! or was written by another driver or version, counts as not there.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use crate::model::hash::hash64;

const MAGIC: &[u8; 16] = b"riparian shaders";

/// The file for one adapter.
#[derive(Clone, Debug)]
pub struct CacheFile {
    path: PathBuf,
    /// What its data are good for: adapter, driver and this crate's version.
    key: String,
}

impl CacheFile {
    /// The file for an adapter in `folder`; `None` where wgpu knows no key for it.
    #[must_use]
    pub fn new(folder: &Path, info: &wgpu::AdapterInfo) -> Option<Self> {
        let adapter = wgpu::util::pipeline_cache_key(info)?;
        let key = format!("{adapter} {} {} {}", info.driver, info.driver_info, env!("CARGO_PKG_VERSION"));
        let name = format!("{adapter}-{:016x}.pipelines", hash64(key.as_bytes()));
        Some(Self { path: folder.join(name), key })
    }

    /// Where it lies.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What an earlier run kept, if it is whole and for this adapter.
    #[must_use]
    pub fn read(&self) -> Option<Vec<u8>> {
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(why) if why.kind() == std::io::ErrorKind::NotFound => return None,
            Err(why) => {
                tracing::debug!(path = %self.path.display(), %why, "the pipeline cache cannot be read");
                return None;
            }
        };
        let data = unsealed(&self.key, &bytes);
        if data.is_none() {
            tracing::debug!(path = %self.path.display(), bytes = bytes.len(), "the pipeline cache is damaged or another driver's");
        }
        data.map(<[u8]>::to_vec)
    }

    /// Keeps `data` for the next run. The file takes its name when it is whole; a folder that cannot be written costs the
    /// next run its cache, no more.
    pub fn write(&self, data: &[u8]) {
        let folder = self.path.parent().unwrap_or_else(|| Path::new("."));
        let written = std::fs::create_dir_all(folder).and_then(|()| {
            let mut file = tempfile::NamedTempFile::new_in(folder)?;
            file.write_all(&sealed(&self.key, data))?;
            file.persist(&self.path).map_err(|e| e.error)?;
            Ok(())
        });
        if let Err(why) = written {
            tracing::debug!(path = %self.path.display(), %why, "the pipeline cache is not kept");
        }
    }
}

/// Magic, key, length and hash of the data, then the data.
fn sealed(key: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend((key.len() as u64).to_le_bytes());
    bytes.extend(key.as_bytes());
    bytes.extend((data.len() as u64).to_le_bytes());
    bytes.extend(hash64(data).to_le_bytes());
    bytes.extend(data);
    bytes
}

fn unsealed<'b>(key: &str, bytes: &'b [u8]) -> Option<&'b [u8]> {
    let number = |at: &'b [u8]| Some((u64::from_le_bytes(*at.first_chunk::<8>()?), at.get(8..)?));
    let rest = bytes.strip_prefix(MAGIC)?;
    let (len, rest) = number(rest)?;
    let rest = rest.get(..usize::try_from(len).ok()?).filter(|k| *k == key.as_bytes()).and(rest.get(key.len()..))?;
    let (len, rest) = number(rest)?;
    let (hash, data) = number(rest)?;
    (data.len() as u64 == len && hash64(data) == hash).then_some(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_comes_back_and_nothing_else_does() {
        let data: Vec<u8> = (0..999u32).map(|i| (i * 7) as u8).collect();
        let whole = sealed("card 1", &data);
        assert_eq!(unsealed("card 1", &whole), Some(&data[..]));
        assert_eq!(unsealed("card 2", &whole), None);
        assert_eq!(unsealed("card 1", &sealed("card 1", &[])), Some(&[][..]));
        for at in 0..whole.len() {
            let mut other = whole.clone();
            other[at] ^= 1;
            assert_eq!(unsealed("card 1", &other), None, "a bit of byte {at}");
            assert_eq!(unsealed("card 1", &whole[..at]), None, "cut at {at}");
        }
        assert_eq!(unsealed("card 1", &[&whole[..], &[0]].concat()), None);
    }

    #[test]
    fn a_file_is_whole_or_not_there() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = CacheFile { path: folder.path().join("deep/er.pipelines"), key: "card".into() };
        assert_eq!(file.read(), None);
        file.write(&[1, 2, 3]);
        assert_eq!(file.read(), Some(vec![1, 2, 3]));
        file.write(&[4]);
        assert_eq!(file.read(), Some(vec![4]));
        std::fs::write(file.path(), b"something else").expect("written");
        assert_eq!(file.read(), None);
        let nowhere = CacheFile { path: folder.path().join("deep/er.pipelines/below"), key: "card".into() };
        nowhere.write(&[1]);
        assert_eq!(nowhere.read(), None);
    }
}
