//! Tensors of candle on the GPU that a trainer trains on.
//!
//! candle and the trainer work in the same context, the GPU's primary one, each in streams of its own. What one has made is read by
//! the other after an event: the computation waits for candle's stream before it touches a tensor, and candle's stream waits
//! for the computation before it touches the tensor again, or gives its memory back.

use crate::failure::Failure;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice as CandleDevice, CudaStorage, Layout, Storage, Tensor};
use kernels::cuda::CudaDevice;
use memory::{In, Out};
use session::LentTokens;
use std::ffi::c_void;
use std::sync::Arc;

/// Whether a device of candle's is this GPU.
pub(super) fn is_same(gpu: &CudaDevice, device: &CandleDevice) -> bool {
    device.cuda_stream().context().ordinal() == gpu.facts().index
}

/// A stream of candle's, which waits for the computation when this is dropped.
struct Stream<'a> {
    gpu: &'a CudaDevice,
    stream: &'a CudaStream,
    /// candle's own record of the use, which comes after.
    _used: SyncOnDrop<'a>,
}

impl<'a> Stream<'a> {
    /// Has the computation wait for the stream.
    fn enter(
        gpu: &'a CudaDevice,
        stream: &'a CudaStream,
        used: SyncOnDrop<'a>,
    ) -> Result<Stream<'a>, Failure> {
        let entered = Stream {
            gpu,
            stream,
            _used: used,
        };
        gpu.enter()?;
        // SAFETY: candle's contexts are the primary ones, and this is that of the same GPU.
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

/// Calls `work` with the tokens of a step where they are on the GPU: as they have to be (contiguous, I32 or U32) and on this one.
/// None if they are not.
pub(super) fn with_tokens<R>(
    gpu: &CudaDevice,
    (ids, targets): (&Tensor, &Tensor),
    work: impl FnOnce(Option<LentTokens>) -> R,
) -> Result<R, Failure> {
    let ((ids, of_ids), (targets, of_targets)) =
        (ids.storage_and_layout(), targets.storage_and_layout());
    let (Some(of_ids), Some(of_targets)) = (
        Tokens::of(gpu, &ids, of_ids),
        Tokens::of(gpu, &targets, of_targets),
    ) else {
        return Ok(work(None));
    };
    // Until these are dropped, candle's streams wait for nothing, and nothing writes the tensors: they are borrowed.
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
    /// The first element, and how many there are.
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

    /// The tokens, and their stream, which is held back when that is dropped. Tokens are below 2^31, so both types have the same
    /// bits.
    fn view<'b>(&'b self, gpu: &'b CudaDevice) -> Result<(In<'static>, Stream<'b>), Failure> {
        let (pointer, used) = match self.slice {
            CudaStorageSlice::I32(slice) => slice.device_ptr(&self.stream),
            CudaStorageSlice::U32(slice) => slice.device_ptr(&self.stream),
            _ => unreachable!("`Tokens::of` takes these two types"),
        };
        let stream = Stream::enter(gpu, &self.stream, used)?;
        let pointer = (pointer as *const u8).wrapping_add(self.first * size_of::<i32>());
        // SAFETY: as many elements of four bytes; the caller keeps the tensor until the stream is held back.
        let view = unsafe { In::of_device(pointer, memory::DType::I32, [self.count]) };
        Ok((view, stream))
    }
}

/// A tensor of f32 on a device of candle's, which `fill` writes in the order of the computation.
pub(super) fn filled(
    gpu: &CudaDevice,
    device: &CandleDevice,
    shape: &[usize],
    fill: impl FnOnce(Out) -> Result<(), Failure>,
) -> Result<Tensor, Failure> {
    let elements = shape.iter().product();
    // SAFETY: filled below before anybody sees it.
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
        // SAFETY: as many elements, which nobody else has.
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
