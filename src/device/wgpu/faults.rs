//! Faults that tests ask for: what a driver may do and no test can make a real one do.
//!
//! All are off unless a test turns them on; the places that ask are the one that makes buffers, the one that opens
//! devices and the one that waits for landings.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Nothing happens at this buffer.
const NEVER: u64 = u64::MAX;

/// What goes wrong, and when. Clones share it.
#[doc(hidden)]
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Plan>);

#[derive(Debug)]
struct Plan {
    /// Buffers that were asked for.
    buffers: AtomicU64,
    /// The first buffer that is refused, and how many are.
    refuse_at: AtomicU64,
    refuse: AtomicU64,
    /// The buffer at which the device is destroyed.
    destroy_at: AtomicU64,
    /// Devices that are still to be refused.
    devices: AtomicU64,
    /// Whether the driver says nothing any more.
    hold_callbacks: AtomicBool,
    /// Whether software rasterisers count as real adapters.
    software: AtomicBool,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            buffers: AtomicU64::new(0),
            refuse_at: AtomicU64::new(NEVER),
            refuse: AtomicU64::new(0),
            destroy_at: AtomicU64::new(NEVER),
            devices: AtomicU64::new(0),
            hold_callbacks: AtomicBool::new(false),
            software: AtomicBool::new(false),
        }
    }
}

impl Faults {
    /// Refuses `n` buffers from the one numbered `at` on, as a full device does.
    pub fn refuse_buffers(&self, at: u64, n: u64) {
        self.0.refuse.store(n, Ordering::Relaxed);
        self.0.refuse_at.store(at, Ordering::Relaxed);
    }

    /// Destroys the device just before the buffer numbered `at` is made.
    pub fn destroy_at_buffer(&self, at: u64) {
        self.0.destroy_at.store(at, Ordering::Relaxed);
    }

    /// Refuses the next `n` devices.
    pub fn refuse_devices(&self, n: u64) {
        self.0.devices.store(n, Ordering::Relaxed);
    }

    /// From now on no landing and no upload ever says that it is done.
    pub fn hold_callbacks(&self) {
        self.0.hold_callbacks.store(true, Ordering::Relaxed);
    }

    /// Lets a choice that names no adapter take a software rasteriser.
    pub fn count_software_as_real(&self) {
        self.0.software.store(true, Ordering::Relaxed);
    }

    /// Whether it may.
    #[must_use]
    pub fn takes_software(&self) -> bool {
        self.0.software.load(Ordering::Relaxed)
    }

    /// Buffers that were asked for.
    #[must_use]
    pub fn buffers(&self) -> u64 {
        self.0.buffers.load(Ordering::Relaxed)
    }

    /// Whether the buffer that is asked for now is refused.
    pub(super) fn refuses_buffer(&self, device: &wgpu::Device) -> bool {
        let at = self.0.buffers.fetch_add(1, Ordering::Relaxed);
        if at == self.0.destroy_at.load(Ordering::Relaxed) {
            device.destroy();
        }
        let first = self.0.refuse_at.load(Ordering::Relaxed);
        at >= first && at - first < self.0.refuse.load(Ordering::Relaxed)
    }

    /// Whether the device that is asked for now is refused.
    pub(super) fn refuses_device(&self) -> bool {
        self.0.devices.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }

    /// Whether what the driver says is kept back.
    pub(super) fn holds_callbacks(&self) -> bool {
        self.0.hold_callbacks.load(Ordering::Relaxed)
    }
}
