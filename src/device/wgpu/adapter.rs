//! Which adapter, with which limits and which kernel variant.

use super::super::kernels::Team;
use super::super::trusted;
pub use super::super::trusted::Heap;
use super::faults::Faults;
use crate::device::DeviceError;
use crate::knobs::DeviceChoice;

/// An adapter that was asked for, before a device is made of it.
#[derive(Debug)]
pub struct Found {
    adapter: wgpu::Adapter,
}

/// A device with what the kernels need to know of it. Clones name the same device.
#[derive(Clone, Debug)]
pub struct Context {
    /// The device.
    pub device: wgpu::Device,
    /// Its queue.
    pub queue: wgpu::Queue,
    /// Name, driver, kind.
    pub info: wgpu::AdapterInfo,
    /// What it grants.
    pub limits: wgpu::Limits,
    /// How invocations sum together.
    pub team: Team,
    /// Whether 16x16x16 cooperative matrices, f16 in and f32 out, are offered.
    pub cooperative: bool,
    /// Whether timestamps inside passes are offered.
    pub timestamps: bool,
    /// Whether every dispatch gets timestamps, where they are offered (`CMF_NEMO_TS`).
    pub stamps: bool,
    /// Longest estimated work of one submission (`CMF_NEMO_SUBMIT_MS`).
    pub submission_most: std::time::Duration,
    /// Row blocks that a workgroup of the experts has, 1 to 8 (`CMF_NEMO_BANK_REP`).
    pub bank_rep: usize,
    /// How wide passes over a partial bank bring what it lacks; `None` halts them instead.
    pub streaming: Option<super::stream::Streaming>,
    /// Its largest heap, where the backend tells.
    pub heap: Option<Heap>,
    /// Where compiled pipelines are kept between runs; `None` keeps none.
    pub cache_folder: Option<std::path::PathBuf>,
    /// Why and when the device was lost.
    pub lost: std::sync::Arc<std::sync::OnceLock<String>>,
    /// What tests ask to go wrong.
    #[doc(hidden)]
    pub faults: Faults,
}

/// All adapters of this machine, as `doctor` lists them: `backend:index` and the adapter's facts.
#[must_use]
pub fn list() -> Vec<(String, wgpu::AdapterInfo)> {
    adapters().into_iter().map(|(name, adapter)| (name, adapter.get_info())).collect()
}

pub(super) fn adapters() -> Vec<(String, wgpu::Adapter)> {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    descriptor.flags = wgpu::InstanceFlags::empty();
    let instance = wgpu::Instance::new(descriptor);
    let mut counts = std::collections::HashMap::<wgpu::Backend, usize>::new();
    (pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all())).into_iter())
        .map(|adapter| {
            let backend = adapter.get_info().backend;
            let index = counts.entry(backend).or_default();
            let name = format!("{backend}:{index}");
            *index += 1;
            (name, adapter)
        })
        .collect()
}

/// Real GPUs before virtual ones; software rasterisers only when they are named.
fn rank(info: &wgpu::AdapterInfo) -> Option<u8> {
    match info.device_type {
        wgpu::DeviceType::DiscreteGpu => Some(0),
        wgpu::DeviceType::IntegratedGpu => Some(1),
        wgpu::DeviceType::VirtualGpu => Some(2),
        wgpu::DeviceType::Other => Some(3),
        wgpu::DeviceType::Cpu => None,
    }
}

/// The adapter that `choice` means.
///
/// # Errors
///
/// [`DeviceError::Unfit`] with the adapters that there are.
pub fn find(choice: &DeviceChoice) -> Result<Found, DeviceError> {
    candidates(choice, false).map(|mut all| all.swap_remove(0))
}

/// All adapters that `choice` may mean, the best first: one that refuses a device is followed by the next. With `software`
/// rasterisers stand last even where none is named, for tests.
///
/// # Errors
///
/// As [`find`]: there is at least one otherwise.
pub fn candidates(choice: &DeviceChoice, software: bool) -> Result<Vec<Found>, DeviceError> {
    let all = adapters();
    let seen: Vec<String> = all.iter().map(|(name, a)| format!("{name} {}", a.get_info().name)).collect();
    let mut found: Vec<(u8, wgpu::Adapter)> = match choice {
        DeviceChoice::Auto => {
            let rank = |info| rank(&info).or(software.then_some(u8::MAX));
            all.into_iter().filter_map(|(_, adapter)| Some((rank(adapter.get_info())?, adapter))).collect()
        }
        DeviceChoice::Cpu => Vec::new(),
        DeviceChoice::Adapter(wanted) => {
            let wanted = wanted.to_lowercase();
            let means =
                |name: &str, a: &wgpu::Adapter| *name == wanted || a.get_info().name.to_lowercase().contains(&wanted);
            all.into_iter().filter(|(name, a)| means(name, a)).map(|(_, adapter)| (0, adapter)).collect()
        }
    };
    found.sort_by_key(|(rank, _)| *rank);
    if found.is_empty() {
        let seen = if seen.is_empty() { "none".into() } else { seen.join(", ") };
        return Err(DeviceError::Unfit { why: format!("no adapter for {choice:?}; there are: {seen}") });
    }
    Ok(found.into_iter().map(|(_, adapter)| Found { adapter }).collect())
}

impl From<wgpu::Adapter> for Found {
    fn from(adapter: wgpu::Adapter) -> Self {
        Self { adapter }
    }
}

impl Found {
    /// Its facts.
    #[must_use]
    pub fn info(&self) -> wgpu::AdapterInfo {
        self.adapter.get_info()
    }

    /// Opens it. `team` overrules the variant that its facts suggest; for tests.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Unfit`] where it refuses.
    pub fn open(self, team: Option<Team>, cooperative: bool) -> Result<Context, DeviceError> {
        self.open_with(team, cooperative, Faults::default())
    }

    /// As [`Found::open`], with what tests ask to go wrong. The adapter can be opened again.
    ///
    /// # Errors
    ///
    /// As [`Found::open`].
    #[doc(hidden)]
    pub fn open_with(&self, team: Option<Team>, cooperative: bool, faults: Faults) -> Result<Context, DeviceError> {
        use wgpu::Features;
        let info = self.adapter.get_info();
        let offered = self.adapter.features();
        let limits = self.adapter.limits();
        let team = team.unwrap_or_else(|| team_of(&info, offered));
        let cooperative = cooperative
            && offered.contains(Features::EXPERIMENTAL_COOPERATIVE_MATRIX | Features::SHADER_F16)
            && team == Team::Subgroup32
            && self.adapter.cooperative_matrix_properties().iter().any(|p| {
                (p.m_size, p.n_size, p.k_size) == (16, 16, 16)
                    && p.ab_type == wgpu::CooperativeScalarType::F16
                    && p.cr_type == wgpu::CooperativeScalarType::F32
            });
        let stamps = Features::TIMESTAMP_QUERY | Features::TIMESTAMP_QUERY_INSIDE_PASSES;
        let mut wanted = offered & (stamps | Features::PIPELINE_CACHE);
        if team != Team::None {
            wanted |= Features::SUBGROUP;
        }
        if cooperative {
            wanted |= Features::EXPERIMENTAL_COOPERATIVE_MATRIX | Features::SHADER_F16;
        }
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("riparian"),
            required_features: wanted,
            required_limits: limits.clone(),
            experimental_features: if cooperative {
                trusted::experimental()
            } else {
                wgpu::ExperimentalFeatures::disabled()
            },
            memory_hints: wgpu::MemoryHints::Performance,
            trace: wgpu::Trace::Off,
        };
        let refused = |why: String| DeviceError::Unfit { why: format!("{} refused a device: {why}", info.name) };
        if faults.refuses_device() {
            return Err(refused("a test wants it so".into()));
        }
        let (device, queue) =
            pollster::block_on(self.adapter.request_device(&descriptor)).map_err(|e| refused(e.to_string()))?;
        let lost = std::sync::Arc::new(std::sync::OnceLock::new());
        let (seen, failed) = (lost.clone(), lost.clone());
        device.set_device_lost_callback(move |reason, why| {
            let _ = seen.set(format!("{reason:?}: {why}"));
        });
        // an error nobody scoped would panic by default; here it ends the device, and the session moves to the host
        device.on_uncaptured_error(std::sync::Arc::new(move |error: wgpu::Error| {
            // once: whatever else is on its way then fails too
            if failed.set(error.to_string()).is_ok() {
                tracing::error!(%error, "the device refused a command");
            }
        }));
        let timestamps = wanted.contains(stamps);
        let (cache_folder, heap) = (None, trusted::largest_heap(&self.adapter));
        Ok(Context {
            device,
            queue,
            info,
            limits,
            team,
            cooperative,
            timestamps,
            stamps: false,
            submission_most: std::time::Duration::from_millis(100),
            bank_rep: 1,
            streaming: None,
            heap,
            cache_folder,
            lost,
            faults,
        })
    }
}

impl Context {
    /// Whether it is a rasteriser that runs on the processor.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.info.device_type == wgpu::DeviceType::Cpu
    }

    /// Whether it shares its memory with the processor.
    #[must_use]
    pub fn shares_memory(&self) -> bool {
        matches!(self.info.device_type, wgpu::DeviceType::Cpu | wgpu::DeviceType::IntegratedGpu)
    }
}

fn team_of(info: &wgpu::AdapterInfo, offered: wgpu::Features) -> Team {
    if !offered.contains(wgpu::Features::SUBGROUP) || info.subgroup_min_size < 4 || info.subgroup_max_size > 128 {
        Team::None
    } else if (info.subgroup_min_size, info.subgroup_max_size) == (32, 32) {
        Team::Subgroup32
    } else {
        Team::Subgroup
    }
}
