//! Plans are made and run before memory is reserved, like products: building one takes half a second, and what it loads may
//! find no room later. Each is run several times at the size of a step: with fewer blocks, sums in another order might not show.

use super::library::CudnnVersion;
use crate::cuda::cudnn::cudnn_scratch;
use crate::cuda::device::block::Block;
use crate::cuda::device::error;
use crate::cuda::device::random_data::RandomData;
use crate::cuda::device::rehearsal::blamed_on_memory;
use crate::cuda::{
    AttentionPass, AttentionTensors, BackwardTensors, Cuda, CudaDriver, Driver, LibraryAttention,
    LibraryShape, Workspace,
};
use crate::{AttentionShape, KernelError, Kernels, RaggedDocuments};
use memory::{Space, round_up};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher};

/// How often each attention is computed.
const REPEATS: usize = 4;

/// Bytes of a result that are looked at at a time.
const PIECE_BYTES: usize = 4 << 20;

impl Kernels<Cuda<CudaDriver>> {
    /// Runs each of `attentions` several times, on random data in a block of its own, which goes back to the driver. Says how
    /// many differ.
    ///
    /// # Errors
    /// [`crate::Fault::DeviceFull`] if memory is short; [`KernelError`] if the same data gives other bits the second time;
    /// otherwise as for attention.
    pub fn rehearse_attention(
        &self,
        attentions: &[LibraryAttention],
    ) -> Result<usize, KernelError> {
        let passes = attentions
            .iter()
            .map(|attention| (attention.shape, attention.pass()));
        let distinct: HashSet<_> = passes.collect();
        match self.varying_attention(distinct.iter().copied())? {
            None => Ok(distinct.len()),
            Some(varies) => {
                let message = format!("{varies}: take --attention flash");
                Err(KernelError::device("rehearsal", message))
            }
        }
    }

    /// A sentence about the first of these that gives other bits for the same data; none if all repeat theirs.
    pub(super) fn varying_attention(
        &self,
        passes: impl IntoIterator<Item = (LibraryShape, AttentionPass)>,
    ) -> Result<Option<String>, KernelError> {
        let data = RandomData::new();
        let mut passes = passes.into_iter();
        let varying = passes.find_map(|(shape, pass)| match self.repeats(shape, pass, &data) {
            Ok(true) => None,
            Ok(false) => Some(Ok(varies(shape.sizes))),
            Err(error) => Some(Err(error)),
        });
        let trimmed = self.backend.driver.device.trim();
        trimmed.map_err(|error| error::of_driver("rehearsal", error))?;
        varying.transpose()
    }

    /// Whether an attention gives the same bits each time.
    fn repeats(
        &self,
        shape: LibraryShape,
        pass: AttentionPass,
        data: &RandomData,
    ) -> Result<bool, KernelError> {
        let device = &self.backend.driver.device;
        let bytes = Places::of(shape, pass, std::ptr::null_mut()).used;
        let block = Block::new(device, "rehearsal", Space::Device, bytes)?;
        let placed = Places::of(shape, pass, block.pointer());
        // SAFETY: the block has as many bytes; nothing but this stream uses it.
        unsafe { data.fill(&self.backend.driver, block.pointer(), bytes) }?;
        if let Some(to) = placed.attention.documents {
            let numbers = halves(shape.sizes).into_iter().flat_map(i32::to_ne_bytes);
            let numbers: Vec<u8> = numbers.collect();
            let driver = &self.backend.driver;
            // SAFETY: placed within the block, with room for them.
            unsafe { driver.copy_to_device(to.cast_mut(), &numbers) }?;
        }
        let mut first = None;
        for _ in 0..REPEATS {
            // SAFETY: the block covers all tensors and the workspace; nothing but this stream uses it.
            let attended = unsafe { self.backend.driver.attention(&placed.attention) };
            // Judged while the block is there.
            attended.map_err(|error| blamed_on_memory(device, error))?;
            let bits = self.bits_of(&placed.written)?;
            if *first.get_or_insert(bits) != bits {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A hash of the results' bits.
    fn bits_of(&self, results: &[(*const u8, usize)]) -> Result<u64, KernelError> {
        let mut bits = DefaultHasher::new();
        let mut piece = Vec::new();
        for (start, bytes) in results {
            for from in (0..*bytes).step_by(PIECE_BYTES) {
                piece.resize(PIECE_BYTES.min(bytes - from), 0);
                // SAFETY: a part of a result, within its block.
                unsafe {
                    self.backend
                        .driver
                        .copy_to_host(&mut piece, start.add(from))
                }?;
                bits.write(&piece);
            }
        }
        Ok(bits.finish())
    }
}

/// Documents of many lengths, no more than there is room for: in each sequence, every one is half of what is left, and the last is all
/// of that.
fn halves(shape: AttentionShape) -> Vec<i32> {
    let room = shape.documents_max() / shape.batch;
    let mut starts = Vec::new();
    for _ in 0..shape.batch {
        let mut begin = 0;
        for number in 1..=room {
            let left = shape.seq - begin;
            let length = if number == room {
                left
            } else {
                left.div_ceil(2)
            };
            starts.extend(std::iter::repeat_n(begin as i32, length));
            begin += length;
        }
    }
    let numbers = RaggedDocuments::numbers(shape, &starts, None);
    numbers.expect("there are no more than there is room for")
}

/// The sentence about an attention that does not repeat its bits.
fn varies(shape: AttentionShape) -> String {
    let version = CudnnVersion::look_up().map_or(String::new(), |version| format!(" {version}"));
    let AttentionShape {
        batch,
        seq,
        heads,
        qk_head_dim,
        ..
    } = shape;
    format!(
        "cuDNN{version} gives other bits from time to time for {batch} x {seq} tokens with {heads} heads of {qk_head_dim}"
    )
}

/// Places q, k and v, or their gradients: in one tensor where they are packed, else one after the other. Gives their first
/// elements, and the tensors with their bytes.
fn place_qkv(
    shape: LibraryShape,
    mut place: impl FnMut(usize) -> *const u8,
) -> ([*const u8; 3], Vec<(*const u8, usize)>) {
    let tokens = shape.sizes.batch * shape.sizes.seq;
    if !shape.is_packed() {
        let bytes = shape.row_strides.map(|stride| 2 * tokens * stride);
        let starts = bytes.map(place);
        return (starts, starts.into_iter().zip(bytes).collect());
    }
    let bytes = 2 * tokens * shape.row_strides[0];
    let start = place(bytes);
    let [q_width, k_width, _] = LibraryShape::apart(shape.sizes).row_strides;
    let columns = [0, q_width, q_width + k_width];
    let starts = columns.map(|column| start.wrapping_add(2 * column));
    (starts, vec![(start, bytes)])
}

/// An attention whose tensors lie one after the other.
struct Places {
    attention: LibraryAttention,
    /// Results, with their bytes.
    written: Vec<(*const u8, usize)>,
    used: u64,
}

impl Places {
    fn of(shape: LibraryShape, pass: AttentionPass, start: *mut u8) -> Places {
        let sizes = shape.sizes;
        let out_bytes = 2 * sizes.batch * sizes.seq * sizes.heads * sizes.qk_head_dim;
        let of_rows = 4 * sizes.batch * sizes.seq * sizes.heads;
        let scratch = cudnn_scratch(shape, pass);
        let mut used = 0;
        let mut place = |bytes: usize| {
            let at = start.wrapping_add(used as usize).cast_const();
            used += round_up(bytes as u64);
            at
        };
        let ([q, k, v], _) = place_qkv(shape, &mut place);
        let (out, lse) = (place(out_bytes), place(of_rows));
        let (tensors, written) = match pass {
            AttentionPass::Forward => (
                AttentionTensors::Forward { q, k, v, out, lse },
                vec![(out, out_bytes), (lse, of_rows)],
            ),
            AttentionPass::Backward => {
                let ([dq, dk, dv], written) = place_qkv(shape, &mut place);
                let dout = place(out_bytes);
                let [dq_sums, row_sums, of_dk, of_dv] = scratch.pieces.map(&mut place);
                let tensors = AttentionTensors::Backward(BackwardTensors {
                    q,
                    k,
                    v,
                    out,
                    lse,
                    dout,
                    dq,
                    dk,
                    dv,
                    dq_sums,
                    row_sums,
                    of_heads: [of_dk, of_dv],
                });
                (tensors, written)
            }
        };
        let bytes = scratch.workspace;
        let workspace = Workspace {
            pointer: place(bytes),
            bytes,
        };
        let documents = shape.documents.map(|_| {
            let numbers: usize = RaggedDocuments::dims(sizes).iter().product();
            place(numbers * size_of::<i32>())
        });
        Places {
            attention: LibraryAttention {
                shape,
                tensors,
                documents,
                workspace,
            },
            written,
            used,
        }
    }
}
