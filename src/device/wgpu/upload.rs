//! Bytes on their way to the device, within one staging window.

use std::sync::Mutex;
use std::time::Duration;

use super::adapter::Context;
use crate::device::DeviceError;

/// Longest that a batch of an upload may take: what takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Writes buffers while keeping what is staged within a window.
///
/// `write` may be called from many threads; the driver's staging memory is
/// given back by [`Uploader::flush`], which the caller owes every
/// [`Uploader::batch_bytes`].
#[derive(Debug)]
pub struct Uploader<'c> {
    context: &'c Context,
    window_bytes: u64,
    before: Mutex<Option<wgpu::SubmissionIndex>>,
}

impl<'c> Uploader<'c> {
    /// An uploader with `window_bytes` of staging.
    #[must_use]
    pub fn new(context: &'c Context, window_bytes: u64) -> Self {
        Self { context, window_bytes, before: Mutex::new(None) }
    }

    /// Bytes that may be written between two flushes: half the window, since the batch before is still on its way.
    #[must_use]
    pub fn batch_bytes(&self) -> u64 {
        self.window_bytes / 2
    }

    /// Copies `bytes` to `buffer[offset..]`. Both are whole words.
    ///
    /// # Panics
    ///
    /// If they are not: the layout pads everything.
    pub fn write(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        assert!(bytes.len().is_multiple_of(4) && offset.is_multiple_of(4), "{} bytes at {offset}", bytes.len());
        self.context.queue.write_buffer(buffer, offset, bytes);
    }

    /// As [`Uploader::write`], cut into batches with flushes between. From one thread.
    ///
    /// # Errors
    ///
    /// As [`Uploader::flush`].
    pub fn write_long(&self, buffer: &wgpu::Buffer, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let step = (self.batch_bytes().max(1 << 20) as usize).next_multiple_of(4);
        for (i, part) in bytes.chunks(step).enumerate() {
            self.write(buffer, offset + (i * step) as u64, part);
            if part.len() == step {
                self.flush()?;
            }
        }
        Ok(())
    }

    /// Sends what was written and waits for the batch before it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Lost`].
    pub fn flush(&self) -> Result<(), DeviceError> {
        let index = self.context.queue.submit([]);
        let before = self.before.lock().expect("no panic under this lock").replace(index);
        before.map_or(Ok(()), |index| self.wait(index))
    }

    /// Sends everything and waits until it is there.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Lost`].
    pub fn finish(&self) -> Result<(), DeviceError> {
        let index = self.context.queue.submit([]);
        self.wait(index)
    }

    fn wait(&self, index: wgpu::SubmissionIndex) -> Result<(), DeviceError> {
        let submission = wgpu::PollType::Wait { submission_index: Some(index), timeout: Some(PATIENCE) };
        self.context.device.poll(submission).map_err(|e| DeviceError::Lost { why: e.to_string() })?;
        self.context.lost.get().map_or(Ok(()), |why| Err(DeviceError::Lost { why: why.clone() }))
    }
}

/// A buffer, or the reason there is none.
///
/// # Errors
///
/// [`DeviceError::OutOfMemory`], [`DeviceError::Unfit`] where the device's own limits forbid the size.
pub fn buffer(
    context: &Context,
    what: &str,
    bytes: u64,
    usage: wgpu::BufferUsages,
) -> Result<wgpu::Buffer, DeviceError> {
    let bytes = bytes.max(256).next_multiple_of(256);
    if bytes > context.limits.max_buffer_size {
        return Err(DeviceError::Unfit {
            why: format!("{what} takes {bytes} bytes, a buffer at most {}", context.limits.max_buffer_size),
        });
    }
    if usage.contains(wgpu::BufferUsages::STORAGE) && bytes > context.limits.max_storage_buffer_binding_size {
        return Err(DeviceError::Unfit {
            why: format!(
                "{what} takes {bytes} bytes, a binding at most {}",
                context.limits.max_storage_buffer_binding_size
            ),
        });
    }
    let refused = || DeviceError::OutOfMemory { what: what.to_owned(), bytes };
    if context.faults.refuses_buffer(&context.device) {
        return Err(refused());
    }
    let guard = if usage.contains(wgpu::BufferUsages::STORAGE) { context.faults.guard_bytes() } else { 0 };
    let readable = if guard > 0 { wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST } else { usage };
    let scope = context.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    let made = context.device.create_buffer(&wgpu::BufferDescriptor {
        label: Some(what),
        size: bytes + guard,
        usage: usage | readable,
        mapped_at_creation: false,
    });
    match pollster::block_on(scope.pop()) {
        Some(_) => Err(refused()),
        None => {
            if guard > 0 {
                context.faults.guard(&context.queue, what, &made, bytes);
            }
            Ok(made)
        }
    }
}

/// Zeros in a whole buffer of [`buffer`]'s.
pub fn clear(context: &Context, encoder: &mut wgpu::CommandEncoder, buffer: &wgpu::Buffer) {
    encoder.clear_buffer(buffer, 0, Some(buffer.size() - context.faults.guard_bytes()));
}
