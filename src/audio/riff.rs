//! Wave files whose header promises more than there is.
//!
//! Programs that write to a pipe leave the length of the data open (all ones), and copies get cut. The
//! decoder would drop the last, partial packet of such a file; with the length that is really there it
//! reads all of it.

use std::io::{self, Read, Seek, SeekFrom};

use symphonia::core::io::MediaSource;

/// Bytes searched for the data chunk: what comes before it is small.
const SEARCHED: u64 = 1 << 16;
/// The length of data that is still being written.
const OPEN: u32 = u32::MAX;

/// A source with its data length put right.
pub(crate) struct Repaired {
    inner: Box<dyn MediaSource>,
    /// Where the length stands.
    at: u64,
    length: [u8; 4],
    position: u64,
}

/// The source as it is, or with the length of its data put right; and whether it was cut.
///
/// # Errors
///
/// A source that cannot be read or sought.
pub(crate) fn repaired(mut source: Box<dyn MediaSource>) -> io::Result<(Box<dyn MediaSource>, bool)> {
    let Some(total) = source.byte_len().filter(|_| source.is_seekable()) else { return Ok((source, false)) };
    let mut head = Vec::new();
    (&mut source).take(SEARCHED).read_to_end(&mut head)?;
    source.seek(SeekFrom::Start(0))?;
    let Some((at, length)) = data_length(&head) else { return Ok((source, false)) };
    let held = total - (at + 4);
    if u64::from(length) <= held {
        return Ok((source, false));
    }
    let held = u32::try_from(held).unwrap_or(OPEN).to_le_bytes();
    Ok((Box::new(Repaired { inner: source, at, length: held, position: 0 }), length != OPEN))
}

/// Where the length of the data chunk stands in a wave file's head, and what it is.
fn data_length(head: &[u8]) -> Option<(u64, u32)> {
    if head.get(..4)? != b"RIFF" || head.get(8..12)? != b"WAVE" {
        return None;
    }
    let mut at = 12usize;
    loop {
        let length = u32::from_le_bytes(head.get(at + 4..at + 8)?.try_into().ok()?);
        if head.get(at..at + 4)? == b"data" {
            return Some((at as u64 + 4, length));
        }
        // Chunks start at even places.
        at = at.checked_add(8)?.checked_add(length as usize)?.checked_next_multiple_of(2)?;
    }
}

impl Read for Repaired {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(out)?;
        for (i, byte) in self.length.iter().enumerate() {
            if let Some(place) = (self.at + i as u64).checked_sub(self.position)
                && place < read as u64
            {
                out[place as usize] = *byte;
            }
        }
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for Repaired {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.position = self.inner.seek(to)?;
        Ok(self.position)
    }
}

impl MediaSource for Repaired {
    fn is_seekable(&self) -> bool {
        self.inner.is_seekable()
    }

    fn byte_len(&self) -> Option<u64> {
        self.inner.byte_len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(data_length: u32, held: usize) -> Vec<u8> {
        let mut file = b"RIFF\0\0\0\0WAVEodd \x03\0\0\0abc\0data".to_vec();
        file.extend(data_length.to_le_bytes());
        file.resize(file.len() + held, 7);
        file
    }

    #[test]
    fn the_length_is_put_right() {
        for (said, held, want, cut) in [(8, 8, 8, false), (8, 20, 8, false), (9, 8, 8, true), (OPEN, 8, 8, false)] {
            let bytes = file(said, held);
            let (mut source, was_cut) = repaired(Box::new(io::Cursor::new(bytes.clone()))).unwrap();
            assert_eq!(was_cut, cut, "{said} {held}");
            let mut seen = Vec::new();
            // In small pieces, and once more after a seek into the middle of the field.
            while source.by_ref().take(3).read_to_end(&mut seen).unwrap() > 0 {}
            let mut expected = bytes.clone();
            expected[28..32].copy_from_slice(&(want as u32).to_le_bytes());
            assert_eq!(seen, expected);
            source.seek(SeekFrom::Start(30)).unwrap();
            seen.clear();
            source.read_to_end(&mut seen).unwrap();
            assert_eq!(seen, expected[30..]);
        }
    }

    #[test]
    fn what_is_no_wave_file_stays() {
        for bytes in
            [b"".to_vec(), b"RIFF".to_vec(), b"OggS and so on, long enough".to_vec(), file(4, 4)[..20].to_vec()]
        {
            assert_eq!(data_length(&bytes), None);
            let (mut source, cut) = repaired(Box::new(io::Cursor::new(bytes.clone()))).unwrap();
            let mut seen = Vec::new();
            source.read_to_end(&mut seen).unwrap();
            assert!(seen == bytes && !cut);
        }
    }
}
