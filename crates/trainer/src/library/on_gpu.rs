//! Uses candle's tensors on the GPU that a trainer trains on.
//!
//! candle and the trainer work in the same context, the GPU's primary one, on different streams. Events order them: the
//! computation waits for candle's stream before it uses a tensor, and candle's stream waits for the computation before
//! it uses the tensor again, or frees its memory.

use crate::failure::{Failure, Result};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice as CandleDevice, CudaStorage, Layout, Storage, Tensor};
use kernels::cuda::CudaDevice;
use memory::{In, Out};
use session::LentTokens;
use std::ffi::c_void;
use std::sync::Arc;

/// Whether candle's device is this GPU.
pub(super) fn is_same(gpu: &CudaDevice, device: &CandleDevice) -> bool {
    device.cuda_stream().context().ordinal() == gpu.facts().index
}

/// One of candle's streams, which waits for the computation when this is dropped.
struct Stream<'a> {
    gpu: &'a CudaDevice,
    stream: &'a CudaStream,
    /// candle's own record of the use. It is dropped after the wait.
    _used: SyncOnDrop<'a>,
}

impl<'a> Stream<'a> {
    /// Makes the computation wait for the stream.
    fn enter(
        gpu: &'a CudaDevice,
        stream: &'a CudaStream,
        used: SyncOnDrop<'a>,
    ) -> Result<Stream<'a>> {
        let entered = Stream {
            gpu,
            stream,
            _used: used,
        };
        gpu.enter()?;
        // SAFETY: candle's contexts are the primary ones, and this one belongs to the same GPU.
        unsafe { gpu.wait_for_stream(entered.handle()) }?;
        Ok(entered)
    }

    fn handle(&self) -> *mut c_void {
        self.stream.cu_stream().cast()
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `enter`.
        unsafe { self.gpu.hold_back_stream(self.handle()) };
    }
}

/// Calls `work` with a step's tokens in place, if they are on this GPU, contiguous, and of type I32 or U32; else with
/// `None`.
pub(super) fn with_tokens<R>(
    gpu: &CudaDevice,
    (ids, targets): (&Tensor, &Tensor),
    work: impl FnOnce(Option<LentTokens>) -> R,
) -> Result<R> {
    let ((ids, of_ids), (targets, of_targets)) =
        (ids.storage_and_layout(), targets.storage_and_layout());
    let (Some(of_ids), Some(of_targets)) = (
        Tokens::of(gpu, &ids, of_ids),
        Tokens::of(gpu, &targets, of_targets),
    ) else {
        return Ok(work(None));
    };
    // The tensors are borrowed, so nothing writes them while these live. When these are dropped, candle's streams wait.
    let (ids, _ids_in_use) = of_ids.view(gpu)?;
    let (targets, _targets_in_use) = of_targets.view(gpu)?;
    Ok(work(Some(LentTokens {
        input_ids: ids,
        targets,
    })))
}

/// Tokens as a step reads them.
struct Tokens<'a> {
    slice: &'a CudaStorageSlice,
    stream: Arc<CudaStream>,
    /// The first element, and the number of elements.
    first: usize,
    count: usize,
}

impl<'a> Tokens<'a> {
    fn of(gpu: &CudaDevice, storage: &'a Storage, layout: &Layout) -> Option<Tokens<'a>> {
        let Storage::Cuda(storage) = storage else {
            return None;
        };
        let (first, end) = layout.contiguous_offsets()?;
        let fits = matches!(
            storage.slice,
            CudaStorageSlice::I32(_) | CudaStorageSlice::U32(_)
        );
        (fits && is_same(gpu, &storage.device)).then(|| Tokens {
            slice: &storage.slice,
            stream: storage.device.cuda_stream(),
            first,
            count: end - first,
        })
    }

    /// The tokens, and their stream, which waits for the computation when it is dropped. Tokens are below 2^31, so both
    /// types have the same bits.
    fn view<'b>(&'b self, gpu: &'b CudaDevice) -> Result<(In<'static>, Stream<'b>)> {
        let (pointer, used) = match self.slice {
            CudaStorageSlice::I32(slice) => slice.device_ptr(&self.stream),
            CudaStorageSlice::U32(slice) => slice.device_ptr(&self.stream),
            _ => unreachable!("`Tokens::of` takes these two types"),
        };
        let stream = Stream::enter(gpu, &self.stream, used)?;
        let pointer = (pointer as *const u8).wrapping_add(self.first * size_of::<i32>());
        // SAFETY: this many elements of four bytes; the caller keeps the tensor until the stream waits.
        let view = unsafe { In::of_device(pointer, memory::DType::I32, [self.count]) };
        Ok((view, stream))
    }
}

/// A tensor of f32 on candle's device, which `fill` writes in the order of the computation.
pub(super) fn filled(
    gpu: &CudaDevice,
    device: &CandleDevice,
    shape: &[usize],
    fill: impl FnOnce(Out) -> Result,
) -> Result<Tensor> {
    let elements = shape.iter().product();
    // SAFETY: it is filled below before anyone reads it.
    let allocated = unsafe { device.alloc::<f32>(elements) };
    let mut slice = allocated.map_err(|error| {
        let bytes = memory::format_bytes((elements * size_of::<f32>()) as u64);
        Failure::Usage(format!(
            "candle cannot allocate {bytes} for a copy on the GPU ({error}): the trainer's own memory is planned, what candle takes \
             comes on top; give_on(&Device::Cpu) has copies made on the host"
        ))
    })?;
    {
        let stream = device.cuda_stream();
        let (pointer, used) = slice.device_ptr_mut(&stream);
        let _in_use = Stream::enter(gpu, &stream, used)?;
        // SAFETY: this many elements, which nobody else uses.
        fill(unsafe { Out::of_device(pointer as *mut u8, memory::DType::F32, [elements]) })?;
    }
    let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(slice, device.clone()));
    Ok(Tensor::from_storage(
        storage,
        shape,
        BackpropOp::none(),
        false,
    ))
}
