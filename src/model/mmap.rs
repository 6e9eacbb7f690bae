//! A file's bytes, mapped or read into memory.
//!
//! The one place of the model part that needs `unsafe`: a mapping is only
//! sound while nobody shortens the file under it, which no process can
//! promise for another. [`FileBytes::still_intact`] lets a reader find out;
//! it is asked when a session is opened, before an expert is fetched, and
//! ([`FileBytes::still_readable`]) before each batch of the host and each of
//! its completions. What changes in between ends the process with a signal
//! where bytes are gone, and is not noticed before the next look where they
//! are other ones: whoever cannot rule that out reads the file into memory.

#![allow(unsafe_code, reason = "mapping a file is unsafe by nature")]

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use memmap2::{Mmap, MmapMut};

use super::tensors::Bytes;

/// How a file's bytes come into the address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Mapped: pages are read when they are touched and can be dropped again.
    #[default]
    Mapped,
    /// Read into memory as a whole (`CMF_NEMO_MMAP=0`): needs the file's size
    /// in memory, and nothing that happens to the file afterwards matters.
    Memory,
}

/// What happened to a mapped file since it was opened.
#[derive(Debug, thiserror::Error)]
pub enum Changed {
    /// The file became shorter: touching the lost pages would end the process.
    #[error("the file has {seen} bytes, it had {want} when it was opened")]
    Length {
        /// Bytes now.
        seen: u64,
        /// Bytes when it was opened.
        want: u64,
    },
    /// The file was written to: its bytes may be others than those that were checked.
    #[error("the file was written to after it was opened")]
    Written,
    /// The path names another file now. The mapping still holds the old one.
    #[error("the path names another file than the one that was opened")]
    Replaced,
    /// The file cannot be asked any more.
    #[error("the file cannot be examined: {0}")]
    Io(#[from] io::Error),
}

/// All bytes of one file, for as long as the value lives.
#[derive(Debug)]
pub struct FileBytes {
    path: PathBuf,
    file: File,
    held: Option<Mmap>,
    access: Access,
    len: u64,
    /// When it was last written to, where the system tells.
    written: Option<SystemTime>,
    #[cfg(unix)]
    inode: (u64, u64),
}

impl FileBytes {
    /// Opens `path` for reading.
    ///
    /// # Errors
    ///
    /// What the system says: no such file, no permission, not enough memory.
    pub fn open(path: &Path, access: Access) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        let len = metadata.len();
        let held = match (len, access) {
            // Neither kind of mapping may be empty.
            (0, _) => None,
            // SAFETY: the mapping is private to this value, read-only and as long as the file is now (its length is
            // taken from the handle by the call itself). Other processes may still write to or shorten the file;
            // `still_intact` reports a changed length to those who are about to read much of it.
            (_, Access::Mapped) => Some(unsafe { Mmap::map(&file) }?),
            (_, Access::Memory) => {
                let size = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
                let mut memory = MmapMut::map_anon(size)?;
                fill(&mut file, &mut memory)?;
                Some(memory.make_read_only()?)
            }
        };
        Ok(Self {
            path: path.to_owned(),
            held,
            access,
            len,
            written: metadata.modified().ok(),
            #[cfg(unix)]
            inode: inode(&metadata),
            file,
        })
    }

    /// Where the file was found.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Mapped, or read into memory.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether a mapped file still holds the bytes that were opened: has its length, and was not written to. Bytes in
    /// memory always are there.
    ///
    /// # Errors
    ///
    /// [`Changed`] says what happened.
    pub fn still_readable(&self) -> Result<(), Changed> {
        if self.access == Access::Memory {
            return Ok(());
        }
        let metadata = self.file.metadata()?;
        let seen = metadata.len();
        if seen != self.len {
            return Err(Changed::Length { seen, want: self.len });
        }
        if metadata.modified().ok() != self.written { Err(Changed::Written) } else { Ok(()) }
    }

    /// As [`still_readable`](Self::still_readable), and whether (on Unix) its path still names it.
    ///
    /// # Errors
    ///
    /// [`Changed`] says what happened.
    pub fn still_intact(&self) -> Result<(), Changed> {
        self.still_readable()?;
        if self.access == Access::Memory {
            return Ok(());
        }
        #[cfg(unix)]
        match std::fs::metadata(&self.path) {
            Ok(metadata) if inode(&metadata) == self.inode => {}
            Ok(_) => return Err(Changed::Replaced),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Changed::Replaced),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

/// Reads all of `memory`.
fn fill(source: &mut impl Read, memory: &mut [u8]) -> io::Result<()> {
    let wanted = memory.len();
    source.read_exact(memory).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            let why = format!("the file ended before its length of {wanted} bytes");
            io::Error::new(error.kind(), why)
        }
        _ => error,
    })
}

#[cfg(unix)]
fn inode(metadata: &std::fs::Metadata) -> (u64, u64) {
    use std::os::unix::fs::MetadataExt;
    (metadata.dev(), metadata.ino())
}

impl Bytes for FileBytes {
    fn bytes(&self) -> &[u8] {
        self.held.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_give_the_same_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for len in [0usize, 1, 4095, 4096, 10_000] {
            let want: Vec<u8> = (0..len).map(|i| i as u8).collect();
            std::fs::write(&path, &want).unwrap();
            for access in [Access::Mapped, Access::Memory] {
                let file = FileBytes::open(&path, access).unwrap();
                assert_eq!(file.bytes(), want, "{access:?} {len}");
                file.still_intact().unwrap();
            }
        }
    }

    #[test]
    fn a_shortened_file_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 100]).unwrap();
        let mapped = FileBytes::open(&path, Access::Mapped).unwrap();
        let memory = FileBytes::open(&path, Access::Memory).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(50).unwrap();
        assert!(matches!(mapped.still_intact(), Err(Changed::Length { seen: 50, want: 100 })));
        memory.still_intact().unwrap();
        assert_eq!(memory.bytes(), [7; 100]);
    }

    #[cfg(unix)]
    #[test]
    fn a_replaced_file_is_noticed_and_the_old_bytes_stay() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("file"), dir.path().join("other"));
        std::fs::write(&path, [7; 100]).unwrap();
        std::fs::write(&other, [8; 100]).unwrap();
        let mapped = FileBytes::open(&path, Access::Mapped).unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert!(matches!(mapped.still_intact(), Err(Changed::Replaced)));
        assert_eq!(mapped.bytes(), [7; 100]);
    }

    #[test]
    fn a_file_that_is_written_to_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 100]).unwrap();
        let mapped = FileBytes::open(&path, Access::Mapped).unwrap();
        let memory = FileBytes::open(&path, Access::Memory).unwrap();
        // As long as before, but later.
        let later = SystemTime::now() + std::time::Duration::from_secs(2);
        std::fs::write(&path, [8; 100]).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
        assert!(matches!(mapped.still_readable(), Err(Changed::Written)));
        assert!(matches!(mapped.still_intact(), Err(Changed::Written)));
        memory.still_intact().unwrap();
        assert_eq!(memory.bytes(), [7; 100]);
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error() {
        struct Broken(usize, io::ErrorKind);
        impl Read for Broken {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                let n = self.0.min(into.len());
                self.0 -= n;
                if n == 0 && self.1 != io::ErrorKind::UnexpectedEof { Err(self.1.into()) } else { Ok(n) }
            }
        }
        let mut memory = [0; 64];
        for good in [0, 1, 63] {
            let end = fill(&mut Broken(good, io::ErrorKind::UnexpectedEof), &mut memory).unwrap_err();
            assert_eq!(end.to_string(), "the file ended before its length of 64 bytes");
            let denied = fill(&mut Broken(good, io::ErrorKind::PermissionDenied), &mut memory).unwrap_err();
            assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
        }
        fill(&mut Broken(64, io::ErrorKind::PermissionDenied), &mut memory).unwrap();
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_length_that_is_not_true_is_an_error() {
        let lie = Path::new("/sys/kernel/mm/transparent_hugepage/enabled");
        if lie.exists() {
            assert!(FileBytes::open(lie, Access::Mapped).is_err());
            assert_eq!(FileBytes::open(lie, Access::Memory).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn a_folder_is_no_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(FileBytes::open(dir.path(), Access::Mapped).is_err());
    }
}
