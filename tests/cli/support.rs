//! Runs the program and makes the files it is given.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

/// One run of the program.
pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ran {
    /// The same, once it is sure that all went well.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self
    }

    /// stdout as a JSON line each.
    #[track_caller]
    pub(crate) fn json(&self) -> Vec<Value> {
        self.stdout.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
    }

    /// stdout as one JSON value.
    #[track_caller]
    pub(crate) fn json_value(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stdout))
    }

    /// The one sentence that says what was wrong.
    #[track_caller]
    pub(crate) fn refused(&self, code: i32, says: &[&str]) {
        assert_eq!(self.code, code, "stdout {:?}, stderr {:?}", self.stdout, self.stderr);
        for part in says {
            assert!(self.stderr.contains(part), "{part:?} is not in {:?}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
    }
}

/// The program with no knob of the caller's environment.
pub(crate) fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_riparian"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("CMF_NEMO_") || name.to_string_lossy().starts_with("RIPARIAN_") {
            command.env_remove(name);
        }
    }
    // Tests are about the program, not about the adapters of the machine they run on.
    command.env("CMF_NEMO_DEVICE", "cpu").env_remove("RUST_LOG");
    command
}

/// Runs the program to its end.
pub(crate) fn run<S: AsRef<std::ffi::OsStr>>(arguments: impl IntoIterator<Item = S>) -> Ran {
    finish(program().args(arguments))
}

pub(crate) fn finish(command: &mut Command) -> Ran {
    let Output { status, stdout, stderr } = command.output().expect("the program starts");
    Ran {
        code: status.code().expect("an exit code"),
        stdout: String::from_utf8(stdout).expect("stdout is text"),
        stderr: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// The bundled model.
pub(crate) fn model() -> PathBuf {
    root().join("assets/tiny-transcribe.cmf")
}

/// A bundled recording.
pub(crate) fn recording() -> PathBuf {
    demo().into_iter().next().expect("a bundled recording").0
}

/// The bundled recordings with what is said in them.
pub(crate) fn demo() -> Vec<(PathBuf, String)> {
    let folder = root().join("assets/demo");
    let table = std::fs::read_to_string(folder.join("references.tsv")).expect("assets/demo/references.tsv");
    let lines = table.lines().filter_map(|line| line.split_once('\t'));
    lines.map(|(file, text)| (folder.join(file), text.to_owned())).collect()
}

pub(crate) fn root() -> PathBuf {
    env!("CARGO_MANIFEST_DIR").into()
}

/// The tiny model's own folder, where it stands beside the clone.
pub(crate) fn tiny_transcribe() -> Option<PathBuf> {
    let folder = root().join("../shared/tiny-transcribe");
    folder.join("golden.json").exists().then_some(folder)
}

/// A small checkpoint as it is published, made once.
pub(crate) fn checkpoint() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| {
        let case = crate::common::oracle("fixtures/tiny").expect("a bundled case");
        let folder = scratch().join("checkpoint");
        crate::weights::Case::read(&case).write_checkpoint(&folder, crate::weights::Layout::Text);
        folder
    })
}

/// A folder for one test run's files, gone with the process.
pub(crate) fn scratch() -> &'static Path {
    static SCRATCH: OnceLock<tempfile::TempDir> = OnceLock::new();
    SCRATCH.get_or_init(|| tempfile::tempdir().expect("a temporary folder")).path()
}

/// What a WAV file is to hold.
pub(crate) struct Wav {
    pub(crate) rate: u32,
    pub(crate) channels: u16,
    pub(crate) bits: u16,
    /// One channel's samples in [-1, 1]; every channel gets them.
    pub(crate) samples: Vec<f32>,
}

impl Wav {
    /// Writes it as integer PCM under `name` in the scratch folder.
    pub(crate) fn write(&self, name: &str) -> PathBuf {
        let bytes_each = usize::from(self.bits / 8);
        let scale = f64::from(1_u32 << (self.bits - 1)) - 1.0;
        let mut data = Vec::new();
        for sample in &self.samples {
            let code = (f64::from(*sample) * scale).round() as i32;
            for _ in 0..self.channels {
                data.extend_from_slice(&code.to_le_bytes()[..bytes_each]);
            }
        }
        let block = u16::try_from(bytes_each).unwrap() * self.channels;
        let mut bytes = Vec::new();
        let length = u32::try_from(data.len()).unwrap();
        bytes.extend_from_slice(b"RIFF");
        bytes.extend_from_slice(&(36 + length).to_le_bytes());
        bytes.extend_from_slice(b"WAVEfmt ");
        bytes.extend_from_slice(&16_u32.to_le_bytes());
        bytes.extend_from_slice(&1_u16.to_le_bytes());
        bytes.extend_from_slice(&self.channels.to_le_bytes());
        bytes.extend_from_slice(&self.rate.to_le_bytes());
        bytes.extend_from_slice(&(self.rate * u32::from(block)).to_le_bytes());
        bytes.extend_from_slice(&block.to_le_bytes());
        bytes.extend_from_slice(&self.bits.to_le_bytes());
        bytes.extend_from_slice(b"data");
        bytes.extend_from_slice(&length.to_le_bytes());
        bytes.extend_from_slice(&data);
        file(name, &bytes)
    }
}

/// Samples of a 16-bit mono WAV file such as the bundled ones.
pub(crate) fn samples_of(path: &Path) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let data = bytes.windows(4).position(|w| w == b"data").expect("a data chunk") + 8;
    bytes[data..].as_chunks().0.iter().map(|b| f32::from(i16::from_le_bytes(*b)) / 32768.0).collect()
}

/// A file with these bytes in the scratch folder.
pub(crate) fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = scratch().join(name);
    std::fs::File::create(&path).unwrap().write_all(bytes).unwrap();
    path
}
