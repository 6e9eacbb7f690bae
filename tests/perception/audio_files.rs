//! Recordings good and bad, written by the tests themselves.

use std::f32::consts::PI;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use riparian::audio::perception::{Perception, Step};
use riparian::audio::read::{Audio, ReadError, read_bytes, read_file};
use riparian::audio::weights::PerceptionError;

use crate::checkpoint::perception;
use crate::common::oracle;

/// A wave file: format tag (1 is whole numbers, 3 floats), rate, channels, bits and the data.
fn wav(tag: u16, rate: u32, channels: u16, bits: u16, data: &[u8]) -> Vec<u8> {
    let block = channels * bits / 8;
    let mut file = Vec::new();
    file.extend(b"RIFF");
    file.extend((36 + data.len() as u32).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16u32.to_le_bytes());
    file.extend(tag.to_le_bytes());
    file.extend(channels.to_le_bytes());
    file.extend(rate.to_le_bytes());
    file.extend((rate * u32::from(block)).to_le_bytes());
    file.extend(block.to_le_bytes());
    file.extend(bits.to_le_bytes());
    file.extend(b"data");
    file.extend((data.len() as u32).to_le_bytes());
    file.extend(data);
    file
}

/// A tone of 440 Hz, half of full scale.
fn tone(rate: u32, frames: usize) -> Vec<f32> {
    (0..frames).map(|i| 0.5 * (2.0 * PI * 440.0 * i as f32 / rate as f32).sin()).collect()
}

fn pcm16(samples: &[f32]) -> Vec<u8> {
    samples.iter().flat_map(|v| ((v * 32_768.0) as i16).to_le_bytes()).collect()
}

fn read(bytes: Vec<u8>) -> Audio {
    read_bytes(bytes, "test.wav").unwrap()
}

/// Largest difference from the tone, away from the ends, where a filter must ring.
fn error_against_tone(audio: &Audio) -> f32 {
    let want = tone(16_000, audio.samples.len());
    let inner = 800..audio.samples.len() - 800;
    inner.map(|i| (audio.samples[i] - want[i]).abs()).fold(0.0, f32::max)
}

#[test]
fn sixteen_bits_are_exact() {
    let values: Vec<i16> = (0..=u16::MAX).map(|v| v as i16).collect();
    let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let audio = read(wav(1, 16_000, 1, 16, &data));
    let want: Vec<f32> = values.iter().map(|v| f32::from(*v) / 32_768.0).collect();
    assert_eq!(audio.samples, want);
    assert!((audio.duration_s() - 4.096).abs() < 1e-9 && !audio.damaged);
    assert_eq!((audio.source_rate, audio.channels), (16_000, 1));
}

#[test]
fn rates_channels_and_depths() {
    for rate in [8_000, 11_025, 22_050, 44_100, 48_000, 96_000] {
        let frames = rate as usize * 2;
        let stereo: Vec<f32> = tone(rate, frames).into_iter().flat_map(|v| [v * 1.5, v * 0.5]).collect();
        let audio = read(wav(1, rate, 2, 16, &pcm16(&stereo)));
        assert_eq!((audio.source_rate, audio.channels), (rate, 2));
        assert!(audio.samples.len().abs_diff(32_000) <= 1, "{rate}: {}", audio.samples.len());
        let error = error_against_tone(&audio);
        assert!(error < 2e-3, "{rate}: {error}");
    }
    let samples = tone(16_000, 16_000);
    let bits24: Vec<u8> = samples.iter().flat_map(|v| ((v * 8_388_608.0) as i32).to_le_bytes()[..3].to_vec()).collect();
    let bits32: Vec<u8> = samples.iter().flat_map(|v| ((v * 2_147_483_648.0) as i32).to_le_bytes()).collect();
    let bits8: Vec<u8> = samples.iter().map(|v| (v * 128.0 + 128.0) as u8).collect();
    let floats: Vec<u8> = samples.iter().flat_map(|v| v.to_le_bytes()).collect();
    for (tag, bits, data, tolerance) in
        [(1, 24, bits24, 1e-6), (1, 32, bits32, 1e-6), (1, 8, bits8, 9e-3), (3, 32, floats, 0.0)]
    {
        let audio = read(wav(tag, 16_000, 1, bits, &data));
        let error = audio.samples.iter().zip(&samples).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(audio.samples.len() == 16_000 && error <= tolerance, "{bits} bits: {error}");
    }
}

/// Where the files in other formats lie.
fn other_formats() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/audio")
}

#[test]
fn common_formats_are_read() {
    // Name, rate, channels, and how much lossy codecs may be off. Encoders add their own delay and padding,
    // so the tone is compared at the delay that fits best.
    for (name, rate, channels, tolerance) in [
        ("tone-16000.flac", 16_000, 1, 2e-4),
        ("tone-44100-stereo.flac", 44_100, 2, 2e-3),
        ("tone-44100-stereo.mp3", 44_100, 2, 0.05),
        ("tone-22050.mp3", 22_050, 1, 0.05),
        ("tone-48000-stereo.ogg", 48_000, 2, 0.1),
        ("tone-48000-vorbis.webm", 48_000, 2, 0.1),
        ("tone-44100-aac.m4a", 44_100, 1, 0.05),
        ("tone-48000-alac.m4a", 48_000, 1, 2e-3),
        ("tone-32000.aiff", 32_000, 1, 2e-3),
        ("tone-8000-ulaw.wav", 8_000, 1, 0.03),
        ("tone-16000-adpcm.wav", 16_000, 1, 0.03),
        ("tone-16000.caf", 16_000, 1, 2e-4),
    ] {
        let audio = read_file(&other_formats().join(name)).unwrap();
        assert_eq!((audio.source_rate, audio.channels, audio.damaged), (rate, channels, false), "{name}");
        assert!((0.55..0.75).contains(&audio.duration_s()), "{name}: {} s", audio.duration_s());
        // The middle of the file against the tone at any phase: two sums give amplitude and phase.
        let middle = &audio.samples[3_200..7_200];
        let angle = |i: usize| 2.0 * PI * 440.0 * i as f32 / 16_000.0;
        let share = |f: fn(f32) -> f32| {
            middle.iter().enumerate().map(|(i, v)| v * f(angle(i))).sum::<f32>() * 2.0 / middle.len() as f32
        };
        let (a, b) = (share(f32::sin), share(f32::cos));
        let rest = middle.iter().enumerate().map(|(i, v)| (v - a * angle(i).sin() - b * angle(i).cos()).abs());
        let worst = rest.fold((a.hypot(b) - 0.5).abs(), f32::max);
        assert!(worst < tolerance, "{name}: {worst}");
    }
    let opus = read_file(&other_formats().join("tone-48000-opus.webm")).unwrap_err();
    assert!(matches!(opus, ReadError::Unsupported { .. }), "{opus}");
}

#[test]
fn damaged_files_are_read_or_refused() {
    // Always the same damage: flipped bits all over, and cuts. Nothing may panic or give what is no number.
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let (mut good, mut refused) = (0, 0);
    for entry in std::fs::read_dir(other_formats()).unwrap() {
        let path = entry.unwrap().path();
        let whole = std::fs::read(&path).unwrap();
        for round in 0..40 {
            let mut bytes = whole.clone();
            if round % 4 == 0 {
                bytes.truncate(next(whole.len()));
            } else {
                // Headers are hit as often as all the rest.
                let reach = if round % 2 == 0 { whole.len().min(256) } else { whole.len() };
                (0..=round / 4).for_each(|_| bytes[next(reach)] ^= 1 << next(8));
            }
            match read_bytes(bytes, "damaged") {
                Ok(audio) => {
                    assert!(!audio.samples.is_empty() && audio.samples.iter().all(|v| v.is_finite()));
                    good += 1;
                }
                Err(_) => refused += 1,
            }
        }
    }
    println!("{good} read, {refused} refused");
    assert!(good > 0 && refused > 0);
}

#[test]
fn nothing_that_is_no_audio_gets_through() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let empty = read_file(&path("empty.wav", b"")).unwrap_err();
    assert!(matches!(empty, ReadError::Empty { .. }), "{empty}");
    let text = "A text file that somebody named .wav, long enough to be probed. ".repeat(400);
    let text = read_file(&path("text.wav", text.as_bytes())).unwrap_err();
    assert!(matches!(text, ReadError::NotAudio { .. }), "{text}");
    assert!(text.to_string().contains("text.wav"), "{text}");
    let short = read_file(&path("short.wav", b"R")).unwrap_err();
    assert!(matches!(short, ReadError::NotAudio { .. }), "{short}");
    let header = read_file(&path("header.wav", &wav(1, 16_000, 1, 16, &[]))).unwrap_err();
    assert!(matches!(header, ReadError::NoSamples { .. }), "{header}");
    assert!(matches!(read_file(folder.path()).unwrap_err(), ReadError::Io { .. }));
    assert!(matches!(read_file(Path::new("/no/such/file.wav")).unwrap_err(), ReadError::Io { .. }));
    let slow = read_bytes(wav(1, 100, 1, 16, &[0; 64]), "slow.wav").unwrap_err();
    assert!(matches!(slow, ReadError::Unsupported { .. }), "{slow}");
    let codec = read_bytes(wav(0x0161, 16_000, 1, 16, &[0; 4_096]), "wma.wav").unwrap_err();
    assert!(matches!(codec, ReadError::NotAudio { .. } | ReadError::Unsupported { .. }), "{codec}");
    let mut floats: Vec<u8> = tone(16_000, 4_000).iter().flat_map(|v| v.to_le_bytes()).collect();
    floats[4 * 1_600..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    match read_bytes(wav(3, 16_000, 1, 32, &floats), "nan.wav").unwrap_err() {
        ReadError::NotFinite { at_s, .. } => assert!((at_s - 0.1).abs() < 1e-9),
        other => panic!("{other}"),
    }
}

#[test]
fn a_cut_file_gives_what_it_holds() {
    let whole = wav(1, 16_000, 1, 16, &pcm16(&tone(16_000, 32_000)));
    let audio = read(whole[..44 + 2 * 16_001 + 1].to_vec());
    assert!(audio.damaged);
    assert_eq!(audio.samples.len(), 16_001);
    assert!(error_against_tone(&audio) < 1e-4);
    // A length left open by a program that wrote to a pipe is no damage.
    let mut piped = whole.clone();
    piped[40..44].copy_from_slice(&u32::MAX.to_le_bytes());
    let audio = read(piped);
    assert!(!audio.damaged);
    assert_eq!(audio.samples.len(), 32_000);
    assert!(error_against_tone(&audio) < 1e-4);
}

#[test]
fn every_cut_and_flip_is_read_or_refused() {
    let whole = wav(1, 16_000, 1, 16, &pcm16(&tone(16_000, 400)));
    for end in 0..whole.len().min(120) {
        let _ = read_bytes(whole[..end].to_vec(), "cut.wav");
    }
    for at in 0..48 {
        for bit in 0..8 {
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << bit;
            if let Ok(audio) = read_bytes(flipped, "flipped.wav") {
                assert!(audio.samples.iter().all(|v| v.is_finite()));
            }
        }
    }
}

fn rows(perception: &Arc<Perception>, samples: &[f32]) -> Vec<f32> {
    let mut encoding = perception.encode(samples, false).unwrap();
    let mut rows = Vec::new();
    while let Step::Rows(chunk) = encoding.step(&|| false) {
        assert_eq!(chunk.rows.len(), chunk.range.len() * perception.hidden());
        rows.extend(chunk.rows);
    }
    assert_eq!(rows.len(), Perception::rows_of(samples.len()) * perception.hidden());
    assert!(rows.iter().all(|v| v.is_finite()));
    rows
}

#[test]
fn short_and_silent_recordings_have_rows() {
    let Some(case) = oracle("fixtures/transcribe-tiny") else { return };
    let (perception, _) = perception(&case.join("checkpoint"));
    // 0.05 s is five frames and one row; less than a frame is an error.
    assert_eq!(rows(&perception, &tone(16_000, 800)).len(), perception.hidden());
    for samples in [0, 1, 159] {
        let error = perception.encode(&vec![0.0; samples], false).err().unwrap();
        assert!(matches!(error, PerceptionError::TooShort { .. }), "{error}");
    }
    rows(&perception, &[0.0; 16_000]);
    rows(&perception, &[1.0; 16_000]);
    // Around whole encoder frames and whole chunks of the case (20 frames), where an invalid frame is added.
    for frames in [1, 7, 8, 9, 159, 160, 161, 320] {
        rows(&perception, &tone(16_000, frames * 160));
        rows(&perception, &tone(16_000, frames * 160 + 159));
    }
}

#[test]
fn chunks_do_not_depend_on_threads() {
    let Some(case) = oracle("fixtures/transcribe-tiny") else { return };
    let (perception, _) = perception(&case.join("checkpoint"));
    let samples = tone(16_000, 60_000);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let one = pool.install(|| rows(&perception, &samples));
    let many = rows(&perception, &samples);
    let worst = one.iter().zip(&many).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5, "{worst}");
}
