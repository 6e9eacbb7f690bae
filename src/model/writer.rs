//! Writes CMF files as a stream: places are fixed first, payloads then come in any order, hashes last.
//!
//! The file grows under another name beside its own and takes its name only
//! when it is whole, so that no reader ever sees half of one. What a run that
//! was killed left behind is written over by the next.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use super::container::{
    ALIGN, DATA_ALIGN, ENVELOPE, FEATURE_DIRECTORY, FEATURE_Q8_2F, MAGIC, RANK_MAX, RECORD, VERSION, payload_len,
};
use super::hash::{hash64, part, seal};
use super::tensors::Codec;

/// Payloads of at least this many bytes start on a page. (The peer does so from 16 KiB on, which costs small experts a
/// tenth of their size.)
const PAGE_FROM: u64 = 64 << 10;

/// A tensor to come.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Its name.
    pub name: String,
    /// How it is stored.
    pub codec: Codec,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
}

/// Why a file was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// What the system says.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// Another process is writing the same file.
    #[error("{} is being written by another process", path.display())]
    Busy {
        /// The unfinished file.
        path: PathBuf,
    },
    /// A tensor the format has no room for.
    #[error("tensor {name}: {what} is {seen}, the format holds at most {want}")]
    Limit {
        /// The tensor.
        name: String,
        /// What is too large.
        what: &'static str,
        /// How large it is.
        seen: usize,
        /// What fits.
        want: usize,
    },
    /// A shape that is empty, or that the codec cannot hold.
    #[error("tensor {name}: {codec} cannot hold shape {shape:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its codec.
        codec: Codec,
        /// Its dimensions.
        shape: Vec<usize>,
    },
    /// Two tensors of one name.
    #[error("tensor {name} is given twice")]
    Duplicate {
        /// The name.
        name: String,
    },
}

/// A tensor's place.
struct Place {
    spec: Spec,
    /// From the data section's start.
    offset: u64,
    len: usize,
    /// XOR of the hashes of the pieces written.
    sum: AtomicU64,
    /// Bytes written.
    written: AtomicU64,
}

/// A file being written. Dropped before [`Writer::finish`], it leaves nothing behind.
pub struct Writer {
    /// `None` once finished.
    file: Option<File>,
    path: PathBuf,
    partial: PathBuf,
    header: Vec<u8>,
    vocab: Vec<u8>,
    places: Vec<Place>,
    data_at: u64,
    data_len: u64,
}

impl Writer {
    /// Starts a file. `header` gets the vocab's hash under `section_hashes`.
    ///
    /// # Errors
    ///
    /// Tensors the format cannot hold, or what the system says.
    ///
    /// # Panics
    ///
    /// If the header is no JSON object.
    pub fn create(path: &Path, mut header: Value, vocab: &[u8], specs: Vec<Spec>) -> Result<Self, WriteError> {
        if !vocab.is_empty() {
            header["section_hashes"] = json!({"vocab": format!("{:016x}", hash64(vocab))});
        }
        let header = header.to_string().into_bytes();
        let mut names: Vec<&str> = specs.iter().map(|spec| spec.name.as_str()).collect();
        let directory_len = 16 + specs.len() * RECORD + names.iter().map(|name| name.len()).sum::<usize>();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(WriteError::Duplicate { name: pair[0].to_owned() });
        }
        let data_at = ((ENVELOPE + header.len() + directory_len) as u64).next_multiple_of(DATA_ALIGN);
        let mut places = Vec::with_capacity(specs.len());
        let mut data_len = 0u64;
        for spec in specs {
            let len = check(&spec)?;
            let align = if len as u64 >= PAGE_FROM { DATA_ALIGN } else { ALIGN };
            let offset = data_len.next_multiple_of(align);
            data_len = offset + len as u64;
            places.push(Place { spec, offset, len, sum: AtomicU64::new(0), written: AtomicU64::new(0) });
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let io = |source| WriteError::Io { path: partial.clone(), source };
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&partial).map_err(io)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(WriteError::Busy { path: partial }),
            // Some file systems have no locks; then nothing can be known and nothing is.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(io(error)),
        }
        file.set_len(0).map_err(io)?;
        let (path, vocab) = (path.to_owned(), vocab.to_vec());
        Ok(Self { file: Some(file), path, partial, header, vocab, places, data_at, data_len })
    }

    /// Bytes of all payloads together, gaps included.
    #[must_use]
    pub fn data_len(&self) -> u64 {
        self.data_len
    }

    /// Writes the payload of the `index`-th tensor.
    ///
    /// # Errors
    ///
    /// What the system says.
    ///
    /// # Panics
    ///
    /// If the payload has another length than codec and shape give.
    pub fn write(&mut self, index: usize, payload: &[u8]) -> Result<(), WriteError> {
        let place = &mut self.places[index];
        assert_eq!(payload.len(), place.len, "payload of {}", place.spec.name);
        (*place.sum.get_mut(), *place.written.get_mut()) = (0, 0);
        self.write_piece(index, 0, payload)
    }

    /// Writes the bytes from `offset` on of the `index`-th payload. Pieces come from any threads in any order, each byte
    /// once; each begins at a multiple of 8, and only a payload's last has a length that is no multiple of 8.
    ///
    /// # Errors
    ///
    /// What the system says.
    ///
    /// # Panics
    ///
    /// If the piece is not within the payload, or begins elsewhere.
    pub fn write_piece(&self, index: usize, offset: u64, piece: &[u8]) -> Result<(), WriteError> {
        let place = &self.places[index];
        let (name, len) = (&place.spec.name, place.len as u64);
        let end = offset + piece.len() as u64;
        assert!(end <= len && offset.is_multiple_of(8), "piece {offset}..{end} of the {len} bytes of {name}");
        assert!(end == len || end.is_multiple_of(8), "a piece of {name} within the payload ends at {end}");
        place.sum.fetch_xor(part(piece, offset), Ordering::Relaxed);
        place.written.fetch_add(piece.len() as u64, Ordering::Relaxed);
        self.put(self.data_at + place.offset + offset, piece)
    }

    fn put(&self, at: u64, bytes: &[u8]) -> Result<(), WriteError> {
        let file = self.file.as_ref().expect("not finished");
        write_all_at(file, bytes, at).map_err(|source| WriteError::Io { path: self.partial.clone(), source })
    }

    /// Writes what is left and gives the file its name. Returns its length.
    ///
    /// # Errors
    ///
    /// What the system says.
    ///
    /// # Panics
    ///
    /// If a tensor was not written.
    pub fn finish(mut self) -> Result<u64, WriteError> {
        let directory = self.directory();
        let header = std::mem::take(&mut self.header);
        let vocab = std::mem::take(&mut self.vocab);
        let header_at = ENVELOPE as u64;
        let directory_at = header_at + header.len() as u64;
        let vocab_at = self.data_at + self.data_len;
        let q8_2f = self.places.iter().any(|place| place.spec.codec == Codec::Q8_2f);

        let mut envelope = Vec::with_capacity(ENVELOPE);
        envelope.extend(MAGIC);
        envelope.extend(VERSION.to_le_bytes());
        envelope.extend(0u32.to_le_bytes());
        envelope.extend((FEATURE_DIRECTORY | if q8_2f { FEATURE_Q8_2F } else { 0 }).to_le_bytes());
        for (at, len) in [
            (header_at, header.len() as u64),
            (directory_at, directory.len() as u64),
            (self.data_at, self.data_len),
            (0, 0),
            (if vocab.is_empty() { 0 } else { vocab_at }, vocab.len() as u64),
            (0, 0),
        ] {
            envelope.extend(at.to_le_bytes());
            envelope.extend(len.to_le_bytes());
        }
        envelope.extend(hash64(&header).to_le_bytes());
        envelope.extend(hash64(&directory).to_le_bytes());
        debug_assert_eq!(envelope.len(), ENVELOPE);

        self.put(header_at, &header)?;
        self.put(directory_at, &directory)?;
        self.put(vocab_at, &vocab)?;
        self.put(0, &envelope)?;
        let file = self.file.take().expect("not finished");
        let len = vocab_at + vocab.len() as u64;
        let io = |source| WriteError::Io { path: self.path.clone(), source };
        // The last payload may be followed by nothing, or the file may hold no payload at all.
        let done = file.set_len(len).and_then(|()| file.sync_all());
        drop(file);
        let done = done.and_then(|()| fs::rename(&self.partial, &self.path));
        if done.is_err() {
            let _ = fs::remove_file(&self.partial);
        }
        done.map_err(io)?;
        Ok(len)
    }

    fn directory(&self) -> Vec<u8> {
        let pool_at = 16 + self.places.len() * RECORD;
        let mut directory = Vec::with_capacity(pool_at);
        directory.extend((self.places.len() as u64).to_le_bytes());
        directory.extend((pool_at as u64).to_le_bytes());
        let mut pool: Vec<u8> = Vec::new();
        for Place { spec, offset, len, sum, written } in &self.places {
            let written = written.load(Ordering::Relaxed);
            assert_eq!(written, *len as u64, "bytes written of {}", spec.name);
            let hash = seal(sum.load(Ordering::Relaxed), written);
            directory.extend((pool.len() as u32).to_le_bytes());
            directory.extend((spec.name.len() as u16).to_le_bytes());
            directory.push(spec.codec.code());
            directory.push(spec.shape.len() as u8);
            let dims = spec.shape.iter().copied().chain(std::iter::repeat(0)).take(RANK_MAX);
            dims.for_each(|dim| directory.extend((dim as u32).to_le_bytes()));
            directory.extend(offset.to_le_bytes());
            directory.extend((*len as u64).to_le_bytes());
            directory.extend(hash.to_le_bytes());
            pool.extend_from_slice(spec.name.as_bytes());
        }
        directory.extend(pool);
        directory
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Given up: nothing of it is of use to anyone, and a failure to remove it harms nobody.
        if self.file.take().is_some() {
            let _ = fs::remove_file(&self.partial);
        }
    }
}

#[cfg(unix)]
fn write_all_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

#[cfg(windows)]
fn write_all_at(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, at) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => (bytes, at) = (&bytes[n..], at + n as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The payload length, once the format has room for everything.
fn check(spec: &Spec) -> Result<usize, WriteError> {
    let limit = |what, seen, want| {
        if seen <= want { Ok(()) } else { Err(WriteError::Limit { name: spec.name.clone(), what, seen, want }) }
    };
    limit("the name's length", spec.name.len(), usize::from(u16::MAX))?;
    limit("the number of dimensions", spec.shape.len(), RANK_MAX)?;
    for &dim in &spec.shape {
        limit("a dimension", dim, u32::MAX as usize)?;
    }
    let len = payload_len(spec.codec, &spec.shape).filter(|&len| len > 0);
    len.ok_or_else(|| WriteError::Shape { name: spec.name.clone(), codec: spec.codec, shape: spec.shape.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::container::Container;
    use crate::model::mmap::Access;

    fn spec(name: &str, codec: Codec, shape: &[usize]) -> Spec {
        Spec { name: name.into(), codec, shape: shape.to_vec() }
    }

    #[test]
    fn what_is_written_is_read_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.cmf");
        let specs =
            vec![spec("b", Codec::F32, &[3]), spec("a", Codec::Bf16, &[100, 100]), spec("scalar", Codec::F32, &[])];
        let payloads = [vec![1; 12], vec![2; 20_000], vec![0; 4]];
        let mut writer = Writer::create(&path, json!({"x": 1}), b"vocab", specs.clone()).unwrap();
        for i in [2, 0, 1] {
            writer.write(i, &payloads[i]).unwrap();
            assert!(!path.exists());
        }
        let len = writer.finish().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), len);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing but the file");
        let read = Container::open(&path, Access::Mapped).unwrap();
        assert_eq!((read.vocab(), read.header()["x"].as_u64()), (Some(&b"vocab"[..]), Some(1)));
        for (spec, payload) in specs.iter().zip(&payloads) {
            let tensor = read.tensor(&spec.name).unwrap();
            assert_eq!((tensor.codec(), tensor.shape()), (spec.codec, &spec.shape[..]));
            assert_eq!((tensor.payload(), tensor.hash()), (&payload[..], hash64(payload)));
        }
        assert_eq!(read.features(), 1);
    }

    #[test]
    fn pieces_come_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.cmf");
        let payload: Vec<u8> = (0..2_000_005u32).map(|i| (i * 7 + i / 251) as u8).collect();
        let writer = Writer::create(&path, json!({}), b"", vec![spec("a", Codec::F32, &[500_001])]).unwrap();
        let payload = &payload[..writer.places[0].len];
        std::thread::scope(|scope| {
            for at in [1_200_000, 0, 8, 800_000] {
                let end = [8, 800_000, 1_200_000, payload.len()].into_iter().find(|&end| end > at).unwrap();
                let writer = &writer;
                scope.spawn(move || writer.write_piece(0, at as u64, &payload[at..end]).unwrap());
            }
        });
        writer.finish().unwrap();
        let read = Container::open(&path, Access::Mapped).unwrap();
        let tensor = read.tensor("a").unwrap();
        assert_eq!((tensor.payload(), tensor.hash()), (payload, hash64(payload)));
    }

    #[test]
    fn a_given_up_file_leaves_the_old_one_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.cmf");
        fs::write(&path, "old").unwrap();
        let writer = Writer::create(&path, json!({}), b"", vec![spec("a", Codec::F32, &[3])]).unwrap();
        let busy = Writer::create(&path, json!({}), b"", vec![]).err().unwrap();
        assert!(matches!(busy, WriteError::Busy { .. }), "{busy}");
        drop(writer);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        // What a killed run left behind is written over.
        fs::write(dir.path().join("a.cmf.partial"), [9; 5000]).unwrap();
        Writer::create(&path, json!({}), b"", vec![]).unwrap().finish().unwrap();
        assert!(Container::open(&path, Access::Mapped).unwrap().tensors().is_empty());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let create = |specs| Writer::create(&dir.path().join("a.cmf"), json!({}), b"", specs).err().unwrap();
        assert!(matches!(create(vec![spec("a", Codec::Q4tp, &[2, 48])]), WriteError::Shape { .. }));
        assert!(matches!(create(vec![spec("a", Codec::F32, &[2, 0])]), WriteError::Shape { .. }));
        assert!(matches!(create(vec![spec("a", Codec::F32, &[1; 7])]), WriteError::Limit { seen: 7, .. }));
        assert!(matches!(create(vec![spec(&"a".repeat(70_000), Codec::F32, &[1])]), WriteError::Limit { .. }));
        let twice = vec![spec("a", Codec::F32, &[1]), spec("a", Codec::F32, &[1])];
        assert!(matches!(create(twice), WriteError::Duplicate { .. }));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
