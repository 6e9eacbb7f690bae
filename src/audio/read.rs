//! Recordings: any common format, rate and channel count to 16 kHz mono.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};

use rubato::audioadapter_buffers::owned::InterleavedOwned;
use rubato::{Fft, FixedSync, Resampler, WindowFunction};
use symphonia::core::codecs::audio::{AudioDecoder, AudioDecoderOptions};
use symphonia::core::errors::Error as Symphonia;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, FormatReader, TrackType};
use symphonia::core::io::{MediaSource, MediaSourceStream};
use symphonia::core::meta::MetadataOptions;

use super::logmel::RATE;
use super::riff;

/// Rates that are resampled.
const RATES: std::ops::RangeInclusive<u32> = 1_000..=768_000;
/// Frames of the resampler's transform: long enough for a steep filter.
const RESAMPLE_FRAMES: usize = 1_024;

/// A recording, ready for perception.
#[derive(Clone, Debug, PartialEq)]
pub struct Audio {
    /// 16 kHz mono, within [-1, 1] but for float sources that go beyond.
    pub samples: Vec<f32>,
    /// Rate of the source, Hz.
    pub source_rate: u32,
    /// Channels of the source; they were averaged.
    pub channels: usize,
    /// Whether the source ended before its header said, or parts of it could not be decoded.
    pub damaged: bool,
}

impl Audio {
    /// Duration in seconds.
    #[must_use]
    pub fn duration_s(&self) -> f64 {
        self.samples.len() as f64 / RATE as f64
    }
}

/// Why a file is no recording we can read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file has no bytes.
    #[error("{} is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Nothing in the file looks like audio.
    #[error("{} is no audio file: {reason}", path.display())]
    NotAudio {
        /// The file.
        path: PathBuf,
        /// What was wrong.
        reason: String,
    },
    /// Audio in a format, codec or rate that is not supported.
    #[error("{} is not supported: {reason}; supported are wav, flac, mp3, ogg vorbis, m4a (aac, alac), aiff, caf and webm with these codecs", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// The file is audio but holds not one sample that could be decoded.
    #[error("{} holds no samples", path.display())]
    NoSamples {
        /// The file.
        path: PathBuf,
    },
    /// The content is malformed in a way that the decoder did not expect.
    #[error("{} is malformed: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What the decoder said.
        reason: String,
    },
    /// A float file holds something that is no number.
    #[error("{} holds a sample that is no finite number, {at_s:.3} s from its start", path.display())]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// Where.
        at_s: f64,
    },
}

/// Reads a file. The name does not matter: the format is found in the content.
///
/// A file that ends early gives what it holds, with [`Audio::damaged`] set.
///
/// # Errors
///
/// Any of [`ReadError`].
pub fn read_file(path: &Path) -> Result<Audio, ReadError> {
    let io_error = |source| ReadError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io_error)?;
    let meta = file.metadata().map_err(io_error)?;
    if meta.is_dir() {
        return Err(io_error(io::ErrorKind::IsADirectory.into()));
    }
    if meta.is_file() && meta.len() == 0 {
        return Err(ReadError::Empty { path: path.to_owned() });
    }
    guarded(Box::new(file), path)
}

/// Reads a recording from memory; `name` is for messages.
///
/// # Errors
///
/// As [`read_file`].
pub fn read_bytes(bytes: Vec<u8>, name: &str) -> Result<Audio, ReadError> {
    if bytes.is_empty() {
        return Err(ReadError::Empty { path: name.into() });
    }
    guarded(Box::new(io::Cursor::new(bytes)), Path::new(name))
}

thread_local! {
    static READING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread reads a recording just now. A panic is then caught and becomes an error; what the process says of
/// panics is its program's business, so a program that wants to be quiet about these asks here in its hook.
#[must_use]
pub fn is_reading() -> bool {
    READING.get()
}

/// [`read`], with a panic of the decoders (they check sums less than a hostile header needs) as an error.
fn guarded(source: Box<dyn MediaSource>, path: &Path) -> Result<Audio, ReadError> {
    READING.set(true);
    // Nothing outlives the call but its result, so nothing half-changed can be seen.
    let read = panic::catch_unwind(AssertUnwindSafe(|| read(source, path)));
    READING.set(false);
    read.unwrap_or_else(|panic| {
        let reason = panic.downcast_ref::<&str>().map(ToString::to_string);
        let reason = reason.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(ReadError::Malformed { path: path.to_owned(), reason: reason.unwrap_or_else(|| "decoder failure".into()) })
    })
}

fn read(source: Box<dyn MediaSource>, path: &Path) -> Result<Audio, ReadError> {
    let path = || path.to_owned();
    let unsupported = |reason: String| ReadError::Unsupported { path: path(), reason };
    let (source, cut) = riff::repaired(source).map_err(|source| ReadError::Io { path: path(), source })?;
    if cut {
        tracing::warn!(path = %path().display(), "recording ends early");
    }
    let stream = MediaSourceStream::new(source, Default::default());
    let probe = symphonia::default::get_probe();
    let mut format = probe
        .probe(&Hint::new(), stream, FormatOptions::default(), MetadataOptions::default())
        .map_err(|error| ReadError::NotAudio { path: path(), reason: error.to_string() })?;
    let (mut track, mut decoder) = open_track(&mut *format).map_err(unsupported)?;

    let mut mono = Mono::default();
    let mut interleaved: Vec<f32> = Vec::new();
    let mut damaged = cut;
    loop {
        let packet = match format.next_packet() {
            Ok(Some(packet)) => packet,
            Ok(None) => break,
            Err(Symphonia::ResetRequired) => {
                // A chained stream goes on with new parameters.
                (track, decoder) = open_track(&mut *format).map_err(unsupported)?;
                continue;
            }
            Err(error) => {
                tracing::warn!(path = %path().display(), %error, "recording ends early");
                damaged = true;
                break;
            }
        };
        if packet.track_id != track {
            continue;
        }
        match decoder.decode(&packet) {
            Ok(buffer) => {
                let spec = buffer.spec();
                let (rate, channels) = (spec.rate(), spec.channels().count());
                buffer.copy_to_vec_interleaved(&mut interleaved);
                mono.push(rate, channels, &interleaved).map_err(unsupported)?;
            }
            Err(error @ (Symphonia::DecodeError(_) | Symphonia::IoError(_))) => {
                tracing::debug!(path = %path().display(), %error, "packet left out");
                damaged = true;
            }
            Err(error) => return Err(unsupported(error.to_string())),
        }
    }
    let Mono { rate, channels, samples } = mono;
    if samples.is_empty() {
        return Err(ReadError::NoSamples { path: path() });
    }
    if let Some(at) = samples.iter().position(|v| !v.is_finite()) {
        return Err(ReadError::NotFinite { path: path(), at_s: at as f64 / f64::from(rate) });
    }
    let samples = if rate as usize == RATE { samples } else { resample(samples, rate).map_err(unsupported)? };
    Ok(Audio { samples, source_rate: rate, channels, damaged })
}

fn open_track(format: &mut dyn FormatReader) -> Result<(u32, Box<dyn AudioDecoder>), String> {
    let track = format
        .first_track_known_codec(TrackType::Audio)
        .or_else(|| format.first_track(TrackType::Audio))
        .ok_or("no audio track")?;
    let parameters = track.codec_params.as_ref().and_then(|p| p.audio()).ok_or("an audio track of unknown codec")?;
    let decoder = symphonia::default::get_codecs()
        .make_audio_decoder(parameters, &AudioDecoderOptions::default())
        .map_err(|error| error.to_string())?;
    Ok((track.id, decoder))
}

/// Samples averaged over the channels, at the source's rate.
#[derive(Default)]
struct Mono {
    rate: u32,
    channels: usize,
    samples: Vec<f32>,
}

impl Mono {
    fn push(&mut self, rate: u32, channels: usize, interleaved: &[f32]) -> Result<(), String> {
        if channels == 0 || interleaved.is_empty() {
            return Ok(());
        }
        if self.samples.is_empty() {
            if !RATES.contains(&rate) {
                return Err(format!("a rate of {rate} Hz, wanted {} to {}", RATES.start(), RATES.end()));
            }
            (self.rate, self.channels) = (rate, channels);
        } else if rate != self.rate {
            return Err(format!("a rate that changes from {} to {rate} Hz", self.rate));
        }
        if channels == 1 {
            self.samples.extend_from_slice(interleaved);
        } else {
            let share = 1.0 / channels as f32;
            self.samples.extend(interleaved.chunks_exact(channels).map(|frame| frame.iter().sum::<f32>() * share));
        }
        Ok(())
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Band-limited resampling to 16 kHz; the length is that of the source to a sample, and nothing is delayed.
fn resample(samples: Vec<f32>, rate: u32) -> Result<Vec<f32>, String> {
    let frames = samples.len();
    let window = WindowFunction::BlackmanHarris2;
    let rate = rate as usize;
    // An even number of shortest blocks: half a transform is the delay that is cut off, and must be whole.
    let block = rate / gcd(rate, RATE);
    let chunk = block * RESAMPLE_FRAMES.div_ceil(block).next_multiple_of(2);
    let mut resampler =
        Fft::<f32>::new_custom(rate, RATE, chunk, 1, 1, window, FixedSync::Both).map_err(|error| error.to_string())?;
    let input = InterleavedOwned::new_from(samples, 1, frames).map_err(|error| error.to_string())?;
    let output = resampler.process_all(&input, frames, None).map_err(|error| error.to_string())?;
    Ok(output.take_data())
}
