//! Faults that tests ask for: what a driver may do and no test can make a real one do.
//!
//! All are off unless a test turns them on; the places that ask are the one that makes buffers, the one that opens
//! devices and the one that waits for landings. Guard words are here too: no fault, but what would show one of ours.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

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
    /// Whether storage buffers get guard words, and those that have.
    guard: AtomicBool,
    guarded: Mutex<Vec<Guarded>>,
}

/// A buffer with guard words behind its end, inside what is bound: a kernel that writes too far meets them.
#[derive(Debug)]
struct Guarded {
    what: String,
    buffer: wgpu::Buffer,
    bytes: u64,
}

/// What guard words hold; as a float it is NaN.
const GUARD: [u32; GUARD_BYTES as usize / 4] = [0xffff_1dea; GUARD_BYTES as usize / 4];
const GUARD_BYTES: u64 = 256;

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
            guard: AtomicBool::new(false),
            guarded: Mutex::default(),
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

    /// From now on every storage buffer has guard words behind its end ([`Faults::broken_guards`]).
    pub fn guard_buffers(&self) {
        self.0.guard.store(true, Ordering::Relaxed);
    }

    /// Bytes that a buffer has behind its end.
    pub(super) fn guard_bytes(&self) -> u64 {
        if self.0.guard.load(Ordering::Relaxed) { GUARD_BYTES } else { 0 }
    }

    /// Writes the guard words behind a buffer's `bytes`.
    pub(super) fn guard(&self, queue: &wgpu::Queue, what: &str, buffer: &wgpu::Buffer, bytes: u64) {
        queue.write_buffer(buffer, bytes, bytemuck::cast_slice(&GUARD));
        self.0.guarded.lock().push(Guarded { what: what.to_owned(), buffer: buffer.clone(), bytes });
    }

    /// Buffers that have guard words.
    #[must_use]
    pub fn guarded(&self) -> usize {
        self.0.guarded.lock().len()
    }

    /// The last of them: its name, itself and its bytes.
    ///
    /// # Panics
    ///
    /// If there is none.
    #[must_use]
    pub fn last_guarded(&self) -> (String, wgpu::Buffer, u64) {
        let guarded = self.0.guarded.lock();
        let last = guarded.last().expect("a guarded buffer");
        (last.what.clone(), last.buffer.clone(), last.bytes)
    }

    /// Buffers whose guard words are no longer what they were.
    ///
    /// # Panics
    ///
    /// If the device does not give them back.
    #[must_use]
    pub fn broken_guards(&self, device: &wgpu::Device, queue: &wgpu::Queue) -> Vec<String> {
        let guarded = self.0.guarded.lock();
        let read = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("guard words"),
            size: (GUARD_BYTES * guarded.len() as u64).max(GUARD_BYTES),
            usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            mapped_at_creation: false,
        });
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        for (g, at) in guarded.iter().zip(0..) {
            encoder.copy_buffer_to_buffer(&g.buffer, g.bytes, &read, GUARD_BYTES * at, Some(GUARD_BYTES));
        }
        queue.submit([encoder.finish()]);
        read.map_async(wgpu::MapMode::Read, .., |_| ());
        device.poll(wgpu::PollType::wait_indefinitely()).expect("the device still answers");
        let seen = read.get_mapped_range(..).expect("mapped").to_vec();
        (guarded.iter().zip(seen.chunks(GUARD_BYTES as usize)))
            .filter(|(_, words)| *words != bytemuck::cast_slice::<u32, u8>(&GUARD))
            .map(|(g, _)| g.what.clone())
            .collect()
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
