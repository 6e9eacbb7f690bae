//! Guard words behind every buffer of a wgpu device: a kernel that writes past an end is named when the device is done with.

use riparian::device::wgpu::Context;

/// Guard words of a device; dropped behind the device's last work, it fails where one was written over.
pub(crate) struct Guards(Context);

impl Guards {
    /// Of a device that was opened with `Faults::guard_buffers`.
    pub(crate) fn of(context: &Context) -> Self {
        Self(context.clone())
    }

    pub(crate) fn context(&self) -> &Context {
        &self.0
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert!(self.0.faults.guarded() > 20, "buffers have guard words");
            let broken = self.0.faults.broken_guards(&self.0.device, &self.0.queue);
            assert!(broken.is_empty(), "written past the end: {broken:?}");
        }
    }
}
