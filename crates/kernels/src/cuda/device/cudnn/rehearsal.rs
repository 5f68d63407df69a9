//! Plans are made and run once before memory is reserved, like products: building one takes half a second, and what it loads
//! may find no room later.

use crate::cuda::device::block::Block;
use crate::cuda::device::error;
use crate::cuda::device::rehearsal::blamed_on_memory;
use crate::cuda::{
    AttentionTensors, BackwardTensors, Cuda, CudaDriver, Driver, LibraryAttention, Workspace,
};
use crate::{AttentionShape, KernelError};
use memory::{Space, round_up};
use std::collections::HashSet;

impl Cuda<CudaDriver> {
    /// Runs each of `attentions` once, on zeros in a block of its own, which goes back to the driver. Says how many differ.
    ///
    /// # Errors
    /// [`crate::Fault::DeviceFull`] where memory is short; else as attention.
    pub fn rehearse_attention(
        &self,
        attentions: &[LibraryAttention],
    ) -> Result<usize, KernelError> {
        let mut seen = HashSet::new();
        let is_new =
            |attention: &&LibraryAttention| seen.insert((attention.shape, attention.pass()));
        let distinct: Vec<_> = attentions.iter().filter(is_new).collect();
        let device = &self.driver.device;
        let mut rehearsed = distinct.iter().map(|attention| self.attend_once(attention));
        let rehearsed = rehearsed.try_for_each(|attention| attention);
        let trimmed = device.trim();
        trimmed.map_err(|error| error::of_driver("rehearsal", error))?;
        rehearsed.map(|()| distinct.len())
    }

    fn attend_once(&self, attention: &LibraryAttention) -> Result<(), KernelError> {
        let device = &self.driver.device;
        let bytes = Places::of(attention, std::ptr::null_mut()).used;
        let block = Block::new(device, "rehearsal", Space::Device, bytes)?;
        let placed = Places::of(attention, block.pointer()).attention;
        // SAFETY: the block covers all tensors and the workspace; nothing but this stream uses it.
        let attended = unsafe { self.driver.attention(&placed) };
        // Judged while the block is there.
        attended.map_err(|error| blamed_on_memory(device, error))?;
        let done = device.synchronize();
        done.map_err(|error| error::of_driver("rehearsal", error))
    }
}

/// An attention whose tensors lie one after the other.
struct Places {
    attention: LibraryAttention,
    used: u64,
}

impl Places {
    fn of(attention: &LibraryAttention, start: *mut u8) -> Places {
        let AttentionShape {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
        } = attention.shape;
        let rows = batch * seq;
        let (q, k) = (2 * rows * heads * head_dim, 2 * rows * kv_heads * head_dim);
        let (of_rows, sums) = (4 * rows * heads, 2 * q);
        let mut used = 0;
        let mut place = |bytes: usize| {
            let at = start.wrapping_add(used as usize).cast_const();
            used += round_up(bytes as u64);
            at
        };
        let tensors = match attention.tensors {
            AttentionTensors::Forward { .. } => AttentionTensors::Forward {
                q: place(q),
                k: place(k),
                v: place(k),
                out: place(q),
                lse: place(of_rows),
            },
            AttentionTensors::Backward(_) => AttentionTensors::Backward(BackwardTensors {
                q: place(q),
                k: place(k),
                v: place(k),
                out: place(q),
                lse: place(of_rows),
                dout: place(q),
                dq: place(q),
                dk: place(k),
                dv: place(k),
                dq_sums: place(sums),
                row_sums: place(of_rows),
            }),
        };
        let bytes = attention.workspace.bytes;
        let workspace = Workspace {
            pointer: place(bytes),
            bytes,
        };
        Places {
            attention: LibraryAttention {
                tensors,
                workspace,
                ..*attention
            },
            used,
        }
    }
}
