//! What can be tuned (`runtime.md` §7): one table of name, accepted values, default and meaning.
//!
//! This file alone reads the environment. The table makes [`Knobs`], its
//! errors, `riparian doctor` and `docs/knobs.md`; every other part takes the
//! field it needs.

use std::ffi::OsString;
use std::fmt;

/// Activations of the products with q8_2f and q4tp matrices (`runtime.md` §3a).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activations {
    /// 32-bit floats.
    F32,
    /// int8 codes, a scale per 32 columns.
    #[default]
    Int8,
}

/// Where prompts are prefilled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Prefill {
    /// Where decode runs.
    #[default]
    Device,
    /// On the host, whose state then seeds the device.
    Host,
}

/// Which device decodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceChoice {
    /// A real GPU if one fits, else the host; software rasterisers never.
    #[default]
    Auto,
    /// The host.
    Cpu,
    /// An adapter by `backend:index` (as `doctor` lists them) or by a part of its name.
    Adapter(String),
}

/// A class of device dispatches (`CMF_NEMO_TS`, `CMF_NEMO_SKIP`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the names are the published ones")]
pub enum DispatchClass {
    InProj,
    Scan,
    OutProj,
    Qkv,
    Attn,
    OProj,
    Router,
    ExpUp,
    ExpDown,
    ShDown,
    Final,
    Head,
}

impl DispatchClass {
    /// All, in the order of a step.
    pub const ALL: [DispatchClass; 12] = [
        Self::InProj,
        Self::Scan,
        Self::OutProj,
        Self::Qkv,
        Self::Attn,
        Self::OProj,
        Self::Router,
        Self::ExpUp,
        Self::ExpDown,
        Self::ShDown,
        Self::Final,
        Self::Head,
    ];

    /// The name knobs and reports use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InProj => "in_proj",
            Self::Scan => "scan",
            Self::OutProj => "out_proj",
            Self::Qkv => "qkv",
            Self::Attn => "attn",
            Self::OProj => "o_proj",
            Self::Router => "router",
            Self::ExpUp => "exp_up",
            Self::ExpDown => "exp_down",
            Self::ShDown => "sh_down",
            Self::Final => "final",
            Self::Head => "head",
        }
    }
}

/// Where a knob's value came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Origin {
    /// Nobody set it.
    #[default]
    Default,
    /// The profile that `riparian tune` wrote.
    Profile,
    /// An environment variable.
    Environment,
    /// A command line flag.
    Flag,
    /// The embedder's code.
    Code,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Default => "default",
            Origin::Profile => "profile",
            Origin::Environment => "environment",
            Origin::Flag => "flag",
            Origin::Code => "code",
        })
    }
}

/// Who set which knob to what, by the table's order; those that code changed are found by comparing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Origins([Option<(Origin, String)>; TABLE.len()]);

/// Why a knob was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KnobError {
    /// The value does not parse or is out of range.
    #[error("{name}={value:?} is not accepted: {name} takes {accepts}")]
    Value {
        /// The variable.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be set to.
        accepts: &'static str,
    },
    /// No such knob.
    #[error("{name} is no knob; the nearest is {nearest} (`riparian doctor` lists them all)")]
    Unknown {
        /// The name given.
        name: String,
        /// The known name that looks most like it.
        nearest: &'static str,
    },
    /// A line of a profile that sets nothing.
    #[error("the profile's line {line:?} is not understood, wanted NAME=VALUE")]
    Line {
        /// The line.
        line: String,
    },
}

/// One line of the table.
pub struct Knob {
    /// The environment variable.
    pub name: &'static str,
    /// What values it takes.
    pub accepts: &'static str,
    /// What holds when it is not set.
    pub default: &'static str,
    /// What it does.
    pub meaning: &'static str,
    set: fn(&mut Knobs, &str) -> Option<()>,
    show: fn(&Knobs) -> String,
}

impl fmt::Debug for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

macro_rules! knobs {
    ($(
        $(#[doc = $doc:literal])*
        $field:ident: $ty:ty = $init:expr,
        $name:literal, $accepts:literal, default $default:literal, $parse:expr, $show:expr;
    )*) => {
        /// Every tunable of a runtime, typed.
        ///
        /// [`Knobs::from_env`] reads the environment; [`Knobs::default`] does not. Fields are set as any struct's are:
        ///
        /// ```
        /// use riparian::knobs::{DeviceChoice, Knobs, Origin};
        ///
        /// let knobs = Knobs { device: DeviceChoice::Cpu, threads: Some(2), ..Knobs::default() };
        /// let changed = knobs.list().filter(|(.., origin)| *origin == Origin::Code);
        /// assert_eq!(changed.map(|(knob, ..)| knob.name).collect::<Vec<_>>(), ["CMF_NEMO_DEVICE", "CMF_NEMO_THREADS"]);
        /// ```
        #[derive(Clone, Debug, PartialEq)]
        pub struct Knobs {
            $($(#[doc = $doc])* pub $field: $ty,)*
            /// Who set what, for [`Knobs::list`]; `..Knobs::default()` fills it in.
            pub origins: Origins,
        }

        impl Default for Knobs {
            fn default() -> Self {
                Self { $($field: $init,)* origins: Origins::default() }
            }
        }

        /// All knobs, in the order they are listed to people.
        pub static TABLE: [Knob; [$($name),*].len()] = [$(Knob {
            name: $name,
            accepts: $accepts,
            default: $default,
            meaning: concat!($($doc),*),
            set: |knobs, value| { knobs.$field = $parse(value)?; Some(()) },
            show: |knobs| $show(&knobs.$field),
        }),*];
    };
}

knobs! {
    /// `0`: no device frame, decode on the host whatever `CMF_NEMO_DEVICE` says.
    frame: bool = true,
        "CMF_NEMO_FRAME", "0 or 1", default "1", switch, show_switch;
    /// Which device decodes: `auto` takes a real GPU first and never a software rasteriser.
    device: DeviceChoice = DeviceChoice::Auto,
        "CMF_NEMO_DEVICE", "auto, cpu, backend:index (vulkan:0) or a part of an adapter's name",
        default "auto", device_choice, show_device;
    /// KV positions a session can hold.
    ctx: Option<u32> = None,
        "CMF_NEMO_CTX", "a number of positions from 16 to 1048576",
        default "the model's, at most 65536; 20480 on unified memory",
        |v: &str| within(v, 16, 1 << 20).map(Some), show_option;
    /// Budget for routed experts on the device, GB (1e9 bytes).
    expert_gb: Option<f64> = None,
        "CMF_NEMO_EXPERT_GB", "gigabytes, 0 or more", default "from the device's free memory",
        gigabytes, show_option;
    /// Positions per admission of an expert.
    admit: u32 = 4,
        "CMF_NEMO_ADMIT", "a number of positions from 1 to 1000000", default "4",
        |v: &str| within(v, 1, 1_000_000), show_plain;
    /// `0`: prefill position by position.
    batch: bool = true,
        "CMF_NEMO_BATCH", "0 or 1", default "1", switch, show_switch;
    /// `host`: prefill on the host and seed the device from its state.
    prefill: Prefill = Prefill::Device,
        "CMF_NEMO_PREFILL", "device or host", default "device", prefill, show_prefill;
    /// `0`: no drafts.
    mtp: bool = true,
        "CMF_NEMO_MTP", "0 or 1", default "1 (where the file has the draft layer)", switch, show_switch;
    /// Drafts a round, as deep as the device verifies; `auto` measures meanwhile what pays.
    mtp_depth: Option<u32> = None,
        "CMF_NEMO_MTP_DEPTH", "auto, or a number of drafts from 1 to 4", default "auto", depth, show_option;
    /// `1`: drafts read the residual before the final norm.
    mtp_pre: bool = false,
        "CMF_NEMO_MTP_PRE", "0 or 1", default "0", switch, show_switch;
    /// `1`: LayerNorm instead of RMSNorm as the draft layer's last norm.
    mtp_ln: bool = false,
        "CMF_NEMO_MTP_LN", "0 or 1", default "0", switch, show_switch;
    /// `1`: hidden half first in the fusion's columns.
    mtp_hfirst: bool = false,
        "CMF_NEMO_MTP_HFIRST", "0 or 1", default "0", switch, show_switch;
    /// Activations of products with quantised matrices, on host and device alike.
    act: Activations = Activations::Int8,
        "CMF_NEMO_ACT", "f32 or int8", default "int8", activations, show_activations;
    /// `0`: no cooperative matrices.
    coop: bool = true,
        "CMF_NEMO_COOP", "0 or 1", default "1 (where the adapter has them)", switch, show_switch;
    /// `0`: read the model into memory instead of mapping it.
    mmap: bool = true,
        "CMF_NEMO_MMAP", "0 or 1", default "1", switch, show_switch;
    /// Staging window of an upload, MB (1e6 bytes).
    staging_mb: u32 = 256,
        "CMF_NEMO_STAGING_MB", "megabytes from 1 to 4096", default "256",
        |v: &str| within(v, 1, 4096), show_plain;
    /// Longest estimated device work of one submission, ms.
    submit_ms: u32 = 100,
        "CMF_NEMO_SUBMIT_MS", "milliseconds from 1 to 10000", default "100",
        |v: &str| within(v, 1, 10_000), show_plain;
    /// Host threads.
    threads: Option<u32> = None,
        "CMF_NEMO_THREADS", "a number of threads from 1 to 1024", default "physical cores, of eight or more one less",
        |v: &str| within(v, 1, 1024).map(Some), show_option;
    /// Greedy steps per flight.
    steps: u32 = 16,
        "CMF_NEMO_STEPS", "a number of steps from 1 to 256", default "16 (adapts with a partial bank)",
        |v: &str| within(v, 1, 256), show_plain;
    /// Row blocks per expert workgroup.
    bank_rep: Option<u32> = None,
        "CMF_NEMO_BANK_REP", "1 to 8", default "chosen per device",
        |v: &str| within(v, 1, 8).map(Some), show_option;
    /// `1`: a summary of encode, wait and completion times per flight, on stderr at the end.
    prof: bool = false,
        "CMF_NEMO_PROF", "0 or 1", default "0", switch, show_switch;
    /// `1`: device timestamps per dispatch class.
    ts: bool = false,
        "CMF_NEMO_TS", "0 or 1", default "0", switch, show_switch;
    /// Dispatch classes left out, to see their cost in the difference; the tokens are then wrong. Without `final` there are
    /// none, and the device is given up for the host.
    skip: Vec<DispatchClass> = Vec::new(),
        "CMF_NEMO_SKIP",
        "a comma-separated list of in_proj scan out_proj qkv attn o_proj router exp_up exp_down sh_down final head",
        default "none", skip, show_skip;
}

/// The user's folder for files that may be deleted at any time, if the system has one: `riparian` in it is ours.
#[must_use]
pub fn cache_folder() -> Option<std::path::PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(std::path::PathBuf::from).filter(|path| path.is_absolute());
    let user = if cfg!(windows) {
        folder("LOCALAPPDATA")
    } else if cfg!(target_os = "macos") {
        folder("HOME").map(|home| home.join("Library/Caches"))
    } else {
        folder("XDG_CACHE_HOME").or_else(|| folder("HOME").map(|home| home.join(".cache")))
    };
    user.map(|user| user.join("riparian"))
}

impl Knobs {
    /// The defaults, then what the environment says.
    ///
    /// # Errors
    ///
    /// A value that is not accepted, or a `CMF_NEMO_` variable that is no knob.
    pub fn from_env() -> Result<Self, KnobError> {
        Self::from_profile_and_env("")
    }

    /// The defaults, then what a profile says ([`Knobs::read_profile`]), then what the environment says.
    ///
    /// # Errors
    ///
    /// As [`Knobs::read_profile`] and [`Knobs::from_env`].
    pub fn from_profile_and_env(profile: &str) -> Result<Self, KnobError> {
        let mut knobs = Self::default();
        knobs.read_profile(profile)?;
        knobs.read(std::env::vars_os(), Origin::Environment)?;
        Ok(knobs)
    }

    /// Sets what `variables` name; those without the `CMF_NEMO_` prefix are somebody else's.
    ///
    /// # Errors
    ///
    /// As [`Knobs::from_env`].
    pub fn read(
        &mut self,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
        origin: Origin,
    ) -> Result<(), KnobError> {
        for (name, value) in variables {
            if let Some(name) = name.to_str().filter(|name| name.starts_with("CMF_NEMO_")) {
                self.set(name, &value.to_string_lossy(), origin)?;
            }
        }
        Ok(())
    }

    /// Sets what the lines `NAME=VALUE` of a profile say; empty lines and those that begin with `#` say nothing.
    ///
    /// # Errors
    ///
    /// A line of another kind, a value that is not accepted, or a name that is no knob.
    pub fn read_profile(&mut self, text: &str) -> Result<(), KnobError> {
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let (name, value) = line.split_once('=').ok_or_else(|| KnobError::Line { line: line.into() })?;
            self.set(name.trim(), value, Origin::Profile)?;
        }
        Ok(())
    }

    /// Sets one knob by its variable's name.
    ///
    /// # Errors
    ///
    /// A value that is not accepted, or a name that is no knob.
    pub fn set(&mut self, name: &str, value: &str, origin: Origin) -> Result<(), KnobError> {
        let Some(at) = TABLE.iter().position(|knob| knob.name == name) else {
            let nearest = TABLE.iter().min_by_key(|knob| distance(knob.name, name)).expect("a table with knobs");
            return Err(KnobError::Unknown { name: name.into(), nearest: nearest.name });
        };
        let knob = &TABLE[at];
        (knob.set)(self, value.trim()).ok_or_else(|| KnobError::Value {
            name: knob.name,
            value: value.into(),
            accepts: knob.accepts,
        })?;
        self.origins.0[at] = Some((origin, (knob.show)(self)));
        Ok(())
    }

    /// Every knob with its value as one would set it, and where that came from.
    pub fn list(&self) -> impl Iterator<Item = (&'static Knob, String, Origin)> + '_ {
        let unset = Self::default();
        TABLE.iter().zip(&self.origins.0).map(move |(knob, set)| {
            let shown = (knob.show)(self);
            let origin = match set {
                Some((origin, value)) if *value == shown => *origin,
                None if (knob.show)(&unset) == shown => Origin::Default,
                _ => Origin::Code,
            };
            (knob, shown, origin)
        })
    }

    /// `docs/knobs.md`: the table for people.
    #[must_use]
    pub fn markdown() -> String {
        let mut page = String::from(
            "# Knobs\n\nEnvironment variables set the defaults, flags and the builder's `Knobs` override them; \
             `riparian doctor` prints each\nvalue and where it came from. A value that is not accepted is an error, \
             as is a `CMF_NEMO_` variable that is no knob.\n\n\
             A flag of the program that is no knob's has a variable too, `RIPARIAN_` and its name, which `--help` names: \
             `--max-new-tokens`\nand `RIPARIAN_MAX_NEW_TOKENS`. Where both speak the flag is heard. What one command is about \
             (models, recordings, prompts, ids)\nis named on its line alone.\n\nThis page is generated from the table in \
             `src/knobs.rs`; a test compares them.\n\n| variable | accepts | default | meaning |\n|---|---|---|---|\n",
        );
        for knob in &TABLE {
            page += &format!(
                "| `{}` | {} | {} | {} |\n",
                knob.name,
                knob.accepts.replace('|', "\\|"),
                knob.default,
                knob.meaning.trim()
            );
        }
        page
    }
}

fn switch(value: &str) -> Option<bool> {
    match value {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

fn within(value: &str, least: u32, most: u32) -> Option<u32> {
    value.parse().ok().filter(|n| (least..=most).contains(n))
}

fn gigabytes(value: &str) -> Option<Option<f64>> {
    value.parse::<f64>().ok().filter(|gb| gb.is_finite() && *gb >= 0.0).map(Some)
}

fn depth(value: &str) -> Option<Option<u32>> {
    if value == "auto" { Some(None) } else { within(value, 1, 4).map(Some) }
}

fn prefill(value: &str) -> Option<Prefill> {
    match value {
        "device" => Some(Prefill::Device),
        "host" => Some(Prefill::Host),
        _ => None,
    }
}

fn activations(value: &str) -> Option<Activations> {
    match value {
        "f32" => Some(Activations::F32),
        "int8" => Some(Activations::Int8),
        _ => None,
    }
}

fn device_choice(value: &str) -> Option<DeviceChoice> {
    match value {
        "" => None,
        "auto" => Some(DeviceChoice::Auto),
        "cpu" => Some(DeviceChoice::Cpu),
        name => Some(DeviceChoice::Adapter(name.into())),
    }
}

fn skip(value: &str) -> Option<Vec<DispatchClass>> {
    let names = value.split([',', ' ']).filter(|name| !name.is_empty() && *name != "none");
    names.map(|name| DispatchClass::ALL.into_iter().find(|class| class.name() == name)).collect()
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the table's functions take a field by reference")]
fn show_switch(on: &bool) -> String {
    u8::from(*on).to_string()
}

fn show_plain<T: ToString>(value: &T) -> String {
    value.to_string()
}

fn show_option<T: ToString>(value: &Option<T>) -> String {
    value.as_ref().map_or_else(|| "auto".into(), T::to_string)
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the table's functions take a field by reference")]
fn show_prefill(prefill: &Prefill) -> String {
    match prefill {
        Prefill::Device => "device",
        Prefill::Host => "host",
    }
    .into()
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the table's functions take a field by reference")]
fn show_activations(act: &Activations) -> String {
    match act {
        Activations::F32 => "f32",
        Activations::Int8 => "int8",
    }
    .into()
}

fn show_device(device: &DeviceChoice) -> String {
    match device {
        DeviceChoice::Auto => "auto".into(),
        DeviceChoice::Cpu => "cpu".into(),
        DeviceChoice::Adapter(name) => name.clone(),
    }
}

#[allow(clippy::ptr_arg, reason = "the table's functions take a field by reference")]
fn show_skip(classes: &Vec<DispatchClass>) -> String {
    if classes.is_empty() {
        return "none".into();
    }
    classes.iter().map(|class| class.name()).collect::<Vec<_>>().join(",")
}

/// Edits (insert, delete, replace) between two names.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value that is accepted and differs from the default, for every knob.
    const OTHER: [(&str, &str); TABLE.len()] = [
        ("CMF_NEMO_FRAME", "0"),
        ("CMF_NEMO_DEVICE", "vulkan:0"),
        ("CMF_NEMO_CTX", "4096"),
        ("CMF_NEMO_EXPERT_GB", "2.5"),
        ("CMF_NEMO_ADMIT", "1"),
        ("CMF_NEMO_BATCH", "0"),
        ("CMF_NEMO_PREFILL", "host"),
        ("CMF_NEMO_MTP", "0"),
        ("CMF_NEMO_MTP_DEPTH", "2"),
        ("CMF_NEMO_MTP_PRE", "1"),
        ("CMF_NEMO_MTP_LN", "1"),
        ("CMF_NEMO_MTP_HFIRST", "1"),
        ("CMF_NEMO_ACT", "f32"),
        ("CMF_NEMO_COOP", "0"),
        ("CMF_NEMO_MMAP", "0"),
        ("CMF_NEMO_STAGING_MB", "16"),
        ("CMF_NEMO_SUBMIT_MS", "50"),
        ("CMF_NEMO_THREADS", "3"),
        ("CMF_NEMO_STEPS", "8"),
        ("CMF_NEMO_BANK_REP", "4"),
        ("CMF_NEMO_PROF", "1"),
        ("CMF_NEMO_TS", "1"),
        ("CMF_NEMO_SKIP", "attn,head"),
    ];

    #[test]
    fn every_knob_takes_what_it_shows_and_remembers_its_origin() {
        for (name, value) in OTHER {
            let mut knobs = Knobs::default();
            knobs.set(name, value, Origin::Flag).unwrap();
            assert_ne!(knobs, Knobs::default(), "{name}");
            let (_, shown, origin) = knobs.list().find(|(knob, ..)| knob.name == name).unwrap();
            assert_eq!((shown.as_str(), origin), (value, Origin::Flag));
            let changed = knobs.list().zip(Knobs::default().list()).filter(|(a, b)| a.1 != b.1).count();
            assert_eq!(changed, 1, "{name} changes itself alone");
        }
    }

    #[test]
    fn what_code_changes_is_known_as_such() {
        let mut knobs = Knobs { admit: 7, ..Knobs::default() };
        knobs.set("CMF_NEMO_STEPS", "4", Origin::Environment).unwrap();
        let origin = |knobs: &Knobs, name| knobs.list().find(|(knob, ..)| knob.name == name).unwrap().2;
        assert_eq!(origin(&knobs, "CMF_NEMO_ADMIT"), Origin::Code);
        assert_eq!(origin(&knobs, "CMF_NEMO_STEPS"), Origin::Environment);
        knobs.steps = 5;
        assert_eq!(origin(&knobs, "CMF_NEMO_STEPS"), Origin::Code);
        assert_eq!(origin(&knobs, "CMF_NEMO_CTX"), Origin::Default);
    }

    #[test]
    fn a_bad_value_names_the_knob_the_value_and_what_is_accepted() {
        for knob in &TABLE {
            for value in ["", "banana,", "-1", "1e99"] {
                // An adapter may have any name.
                if knob.name == "CMF_NEMO_DEVICE" && !value.is_empty()
                    || knob.name == "CMF_NEMO_SKIP" && value.is_empty()
                {
                    continue;
                }
                if knob.name == "CMF_NEMO_EXPERT_GB" && value == "1e99" {
                    continue;
                }
                let error = Knobs::default().set(knob.name, value, Origin::Flag).unwrap_err().to_string();
                assert!(error.contains(knob.name) && error.contains(value) && error.contains(knob.accepts), "{error}");
            }
        }
    }

    #[test]
    fn the_environment_is_read_whole() {
        let variables = |pairs: &[(&str, &str)]| pairs.iter().map(|(n, v)| (n.into(), v.into())).collect::<Vec<_>>();
        let mut knobs = Knobs::default();
        knobs.read(variables(&[("HOME", "x"), ("CMF_NEMO_STEPS", " 4 ")]), Origin::Environment).unwrap();
        assert_eq!(knobs.steps, 4);
        let error = knobs.read(variables(&[("CMF_NEMO_STPES", "4")]), Origin::Environment).unwrap_err();
        assert_eq!(error, KnobError::Unknown { name: "CMF_NEMO_STPES".into(), nearest: "CMF_NEMO_STEPS" });
    }

    #[test]
    fn a_profile_is_read_line_by_line() {
        let mut knobs = Knobs::default();
        knobs.read_profile("# of this machine\n\nCMF_NEMO_THREADS=3\n CMF_NEMO_ACT = f32 \r\n").unwrap();
        assert_eq!((knobs.threads, knobs.act), (Some(3), Activations::F32));
        assert_eq!(knobs.list().filter(|(.., origin)| *origin == Origin::Profile).count(), 2);
        knobs.set("CMF_NEMO_THREADS", "5", Origin::Flag).unwrap();
        assert_eq!(knobs.threads, Some(5));
        assert_eq!(knobs.read_profile("threads"), Err(KnobError::Line { line: "threads".into() }));
        assert!(matches!(knobs.read_profile("CMF_NEMO_THREADS=0"), Err(KnobError::Value { .. })));
        assert!(matches!(knobs.read_profile("HOME=/"), Err(KnobError::Unknown { .. })));
    }

    #[test]
    fn the_page_is_the_table() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/knobs.md");
        if std::env::var_os("RIPARIAN_BLESS").is_some() {
            std::fs::write(page, Knobs::markdown()).unwrap();
        }
        let written = std::fs::read_to_string(page).unwrap();
        assert!(written == Knobs::markdown(), "docs/knobs.md is stale: run the tests once with RIPARIAN_BLESS=1");
    }
}
