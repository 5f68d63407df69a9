//! Whether cuDNN computes here what our own kernels do, and the same every time.

use super::library::CudnnVersion;
use crate::cuda::device::random_data::uniform;
use crate::cuda::device::rehearsal::blamed_on_memory;
use crate::cuda::{AttentionPass, Cuda, CudaDevice, CudaDriver};
use crate::{
    AttentionShape, Fault, Flash, FlashAttention, FlashAttentionBackward, FlashOptions,
    KernelError, Kernels, Target,
};
use half::bf16;
use memory::{Buffer, Category, DType, Memory, OutOfMemory};
use std::rc::Rc;

/// The compute capability for which the backward pass that adds up in order exists.
const CAPABILITY: (i32, i32) = (9, 0);

/// Tokens: one and a half of the tiles in which the forward pass goes, with which a version was wrong once (pytorch, issue
/// 196678).
const SEQ: usize = 192;

/// Most that a result differs from our own, as a share of the largest: both round probabilities to bf16 (2^-9), at
/// different places.
const DIFFERENCE_MAX: f32 = 1.0 / 32.0;

/// What attention makes: out, lse, dq, dk, dv, as bytes.
type Results = Vec<Vec<u8>>;

impl CudaDevice {
    /// Which cuDNN computes attention of this shape on this device: it was found, on a small shape with heads as wide it gives
    /// finite results close to our own, and on this one the same bits each of several times.
    ///
    /// # Errors
    /// [`KernelError`] with the reason for which it does not; [`Fault::DeviceFull`] where memory was short, which says nothing of
    /// cuDNN.
    pub fn check_cudnn(
        self: &Rc<CudaDevice>,
        shape: AttentionShape,
    ) -> Result<CudnnVersion, KernelError> {
        let refused = |reason: String| Err(KernelError::device("cudnn", reason));
        let (major, minor) = self.facts().capability;
        if (major, minor) != CAPABILITY {
            return refused(format!(
                "a deterministic backward pass with little memory is for compute capability 9.0 (Hopper), and {} has \
                 {major}.{minor}",
                self.facts().name
            ));
        }
        let version = CudnnVersion::look_up()?;
        let ([own, other], varies) = self.try_cudnn(shape).map_err(untried)?;
        if let Some(varies) = varies {
            return refused(varies);
        }
        match difference(&own, &other) {
            difference if difference <= DIFFERENCE_MAX => Ok(version),
            difference => refused(format!(
                "cuDNN {version} is not right here: its results differ from ours by {difference} of the largest"
            )),
        }
    }

    /// Results of our own kernels and of cuDNN on a small shape; and a sentence about cuDNN if it does not repeat its bits on the
    /// shape itself.
    fn try_cudnn(
        self: &Rc<CudaDevice>,
        shape: AttentionShape,
    ) -> Result<([Results; 2], Option<String>), KernelError> {
        let small = AttentionShape {
            batch: 1,
            seq: SEQ,
            heads: 4,
            kv_heads: if shape.group() == 1 { 4 } else { 2 },
            window: None,
            ..shape
        };
        let memory = Memory::device(self.clone());
        let kernels = Cuda::new(CudaDriver::new(self)?, &memory, DType::BF16);
        let kernels = kernels.map_err(full)?;
        // Judged while the trial has its memory.
        let blamed = |error| blamed_on_memory(self, error);
        kernels
            .backend
            .driver
            .cudnn()?
            .prepare(shape)
            .map_err(blamed)?;
        let results = |by: Flash| {
            let trial = Trial::new(&memory, small)?;
            trial.results(&kernels, by).map_err(blamed)
        };
        let compared = [results(Flash::Own)?, results(Flash::Cudnn)?];
        let passes = [AttentionPass::Forward, AttentionPass::Backward];
        let varies = kernels.varying_attention(passes.map(|pass| (shape, pass)))?;
        Ok((compared, varies))
    }
}

/// A failure of the trial; where memory was short, with what to do about that.
fn untried(error: KernelError) -> KernelError {
    if error.fault != Fault::DeviceFull {
        return error;
    }
    let message = format!(
        "the GPU's memory is full, so that cuDNN could not be tried: end what else runs there, which nvidia-smi lists ({})",
        error.message
    );
    KernelError { message, ..error }
}

/// Tensors of one attention, forward and backward.
struct Trial {
    shape: AttentionShape,
    memory: Memory,
    /// q, k, v, dout.
    inputs: [Buffer; 4],
}

impl Trial {
    fn new(memory: &Memory, shape: AttentionShape) -> Result<Trial, KernelError> {
        let lease = |dims| lease(memory, dims, DType::BF16);
        Ok(Trial {
            shape,
            memory: memory.clone(),
            inputs: [
                lease(shape.q())?,
                lease(shape.k())?,
                lease(shape.v())?,
                lease(shape.out())?,
            ],
        })
    }

    fn results(mut self, kernels: &Kernels, by: Flash) -> Result<Results, KernelError> {
        for (key, input) in self.inputs.iter_mut().enumerate() {
            let elements = 0..input.view().elements() as u64;
            let bytes: Vec<u8> = elements.flat_map(|at| uniform(key as u64, at)).collect();
            kernels.upload(input.view_mut(), &bytes)?;
        }
        let [q, k, v, dout] = &self.inputs;
        let (shape, memory) = (self.shape, &self.memory);
        let like = |x: &Buffer| {
            lease(
                memory,
                [x.view().dims()[0], x.view().dims()[1]],
                DType::BF16,
            )
        };
        let [mut out, mut dq, mut dk, mut dv] = [like(dout)?, like(q)?, like(k)?, like(v)?];
        let mut lse = lease(memory, [shape.batch, shape.heads, shape.seq], DType::F32)?;
        let options = FlashOptions {
            by,
            ..FlashOptions::default()
        };
        let [forward, backward] = scratch_elements(shape, by);
        kernels.run(FlashAttention {
            out: Some(out.view_mut()),
            lse: Some(lse.view_mut()),
            scratch: lease(memory, [forward], DType::F32)?.view_mut(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            shape,
            options,
        })?;
        kernels.run(FlashAttentionBackward {
            dq: dq.view_mut(),
            dk: dk.view_mut(),
            dv: dv.view_mut(),
            scratch: lease(memory, [backward], DType::F32)?.view_mut(),
            dout: dout.view(),
            out: out.view(),
            lse: lse.view(),
            q: q.view(),
            k: k.view(),
            v: v.view(),
            shape,
            options,
        })?;
        let read = |x: &Buffer| {
            let mut bytes = vec![0; x.view().bytes()];
            kernels.download(&mut bytes, x.view())?;
            Ok(bytes)
        };
        [&out, &lse, &dq, &dk, &dv].into_iter().map(read).collect()
    }
}

fn scratch_elements(shape: AttentionShape, by: Flash) -> [usize; 2] {
    match by {
        Flash::Own => [
            FlashAttention::scratch_elements(Target::Cuda, shape, DType::BF16),
            FlashAttentionBackward::scratch_elements(Target::Cuda, shape, DType::BF16),
        ],
        Flash::Cudnn => [
            FlashAttention::cudnn_scratch_elements(shape, true, true),
            FlashAttentionBackward::cudnn_scratch_elements(shape),
        ],
    }
}

fn lease<const N: usize>(
    memory: &Memory,
    dims: [usize; N],
    dtype: DType,
) -> Result<Buffer, KernelError> {
    let lease = memory.lease(Category::Temporary, "cudnn_check", dims, dtype);
    lease.map_err(full)
}

fn full(error: OutOfMemory) -> KernelError {
    KernelError {
        fault: Fault::DeviceFull,
        ..KernelError::device("cudnn", format!("trying cuDNN: {error}"))
    }
}

/// The largest difference of two results, as a share of the largest number in the first; infinite where one of them is not
/// finite. The second of each is f32, the others bf16.
fn difference(own: &Results, other: &Results) -> f32 {
    let numbers = |at: usize, bytes: &[u8]| -> Vec<f32> {
        match at {
            1 => bytes.chunks_exact(4).map(of_f32).collect(),
            _ => bytes.chunks_exact(2).map(of_bf16).collect(),
        }
    };
    let pairs = own.iter().zip(other).enumerate();
    let shares = pairs.map(|(at, (own, other))| {
        let (own, other) = (numbers(at, own), numbers(at, other));
        if !own.iter().chain(&other).all(|number| number.is_finite()) {
            return f32::INFINITY;
        }
        let largest = own
            .iter()
            .fold(f32::MIN_POSITIVE, |most, x| most.max(x.abs()));
        let apart = own.iter().zip(&other).map(|(a, b)| (a - b).abs());
        apart.fold(0.0, f32::max) / largest
    });
    shares.fold(0.0, f32::max)
}

fn of_f32(bytes: &[u8]) -> f32 {
    f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

fn of_bf16(bytes: &[u8]) -> f32 {
    bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results(out: f32, lse: f32) -> Results {
        let out = bf16::from_f32(out).to_le_bytes().to_vec();
        vec![out, lse.to_le_bytes().to_vec()]
    }

    #[test]
    fn results_that_are_wrong_or_not_finite_are_noticed() {
        let own = results(2.0, 3.0);
        assert_eq!(difference(&own, &own), 0.0);
        assert_eq!(difference(&own, &results(1.5, 3.0)), 0.25);
        assert_eq!(difference(&own, &results(2.0, 6.0)), 1.0);
        for wrong in [results(f32::NAN, 3.0), results(2.0, f32::INFINITY)] {
            assert_eq!(difference(&own, &wrong), f32::INFINITY);
        }
    }
}
