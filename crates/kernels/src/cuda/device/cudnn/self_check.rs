//! Whether cuDNN computes here what our own kernels do, and the same every time.

use super::library::CudnnVersion;
use crate::cuda::device::random_data::uniform;
use crate::cuda::device::rehearsal::blamed_on_memory;
use crate::cuda::{AttentionPass, Cuda, CudaDevice, CudaDriver, LibraryShape};
use crate::{
    AttentionShape, Fault, Flash, FlashAttention, FlashAttentionBackward, FlashOptions,
    KernelError, Kernels, RaggedDocuments, SplitQkv, Target,
};
use half::bf16;
use memory::{Buffer, Category, DType, In, Memory, Out, OutOfMemory};
use std::rc::Rc;

/// The compute capability for which the backward pass that adds up in order exists.
const CAPABILITY: (i32, i32) = (9, 0);

/// Tokens: one and a half of the tiles in which the forward pass goes, with which a version was wrong once (pytorch, issue
/// 196678).
const SEQ: usize = 192;

/// Tokens of the first of packed documents: it ends within a tile. A second one ends with its sequence, and a third is as long as
/// the next sequence.
const FIRST_TOKENS: usize = 70;

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
        shape: LibraryShape,
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
        shape: LibraryShape,
    ) -> Result<([Results; 2], Option<String>), KernelError> {
        let has_documents = shape.documents.is_some();
        let small = AttentionShape {
            batch: if has_documents { 2 } else { 1 },
            seq: SEQ,
            heads: 4,
            kv_heads: if shape.sizes.group() == 1 { 4 } else { 2 },
            window: None,
            ..shape.sizes
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
            let trial = Trial {
                shape: small,
                memory: &memory,
                kernels: &kernels,
                by,
                has_documents,
            };
            let is_packed = by == Flash::Cudnn && shape.is_packed();
            trial.results(is_packed).map_err(blamed)
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

/// One attention, forward and backward.
struct Trial<'a> {
    shape: AttentionShape,
    memory: &'a Memory,
    kernels: &'a Kernels,
    by: Flash,
    has_documents: bool,
}

impl Trial<'_> {
    /// Results for random inputs. Where they are packed, q, k and v are read as columns of one tensor, and their gradients are
    /// written so.
    fn results(&self, is_packed: bool) -> Result<Results, KernelError> {
        let (shape, kernels) = (self.shape, self.kernels);
        let widths = [shape.q(), shape.k(), shape.v()].map(|[_, width]| width);
        let packed = [shape.q()[0], widths.iter().sum()];
        let (qkv, dout) = (self.random(packed, 0)?, self.random(shape.out(), 1)?);
        let apart = || -> Result<[Buffer; 3], KernelError> {
            Ok([
                self.lease(shape.q())?,
                self.lease(shape.k())?,
                self.lease(shape.v())?,
            ])
        };
        let split = |[q, k, v]: &mut [Buffer; 3], qkv: &Buffer| {
            kernels.run(SplitQkv {
                q: Some(q.view_mut()),
                k: Some(k.view_mut()),
                v: Some(v.view_mut()),
                qkv: qkv.view(),
                kv_widths: [widths[1], widths[2]],
                turn: None,
            })
        };
        let mut gradients = apart()?;
        let [out, lse] = if is_packed {
            let mut joined = self.lease(packed)?;
            let columns = joined.view_mut().split_columns(widths);
            let outputs = self.attend(qkv.view().split_columns(widths), columns, &dout)?;
            split(&mut gradients, &joined)?;
            outputs
        } else {
            let mut inputs = apart()?;
            split(&mut inputs, &qkv)?;
            let written = gradients.each_mut().map(Buffer::view_mut);
            self.attend(inputs.each_ref().map(Buffer::view), written, &dout)?
        };
        let read = |x: &Buffer| {
            let mut bytes = vec![0; x.view().bytes()];
            kernels.download(&mut bytes, x.view())?;
            Ok(bytes)
        };
        let results = [&out, &lse].into_iter().chain(&gradients);
        let mut results: Results = results.map(read).collect::<Result<_, KernelError>>()?;
        if self.has_documents && self.by == Flash::Cudnn {
            results[1] = heads_first(shape, &results[1]);
        }
        Ok(results)
    }

    /// Documents as the implementation takes them.
    fn documents(&self) -> Result<Buffer, KernelError> {
        let (shape, kernels) = (self.shape, self.kernels);
        let tokens = 0..shape.batch * shape.seq;
        let starts = tokens.map(|token| match token {
            FIRST_TOKENS..SEQ => FIRST_TOKENS as i32,
            _ => 0,
        });
        let starts: Vec<i32> = starts.collect();
        let (dims, numbers) = match self.by {
            Flash::Own => ([shape.batch, shape.seq], starts),
            Flash::Cudnn => {
                let numbers = RaggedDocuments::numbers(shape, &starts, None);
                let numbers = numbers.expect("a plan has room for two documents a sequence");
                (RaggedDocuments::dims(shape), numbers)
            }
        };
        let mut buffer = lease(self.memory, dims, DType::I32)?;
        let bytes: Vec<u8> = numbers.into_iter().flat_map(i32::to_ne_bytes).collect();
        kernels.upload(buffer.view_mut(), &bytes)?;
        Ok(buffer)
    }

    /// Writes dq, dk and dv, and gives out and lse.
    fn attend(
        &self,
        [q, k, v]: [In; 3],
        [dq, dk, dv]: [Out; 3],
        dout: &Buffer,
    ) -> Result<[Buffer; 2], KernelError> {
        let (shape, memory) = (self.shape, self.memory);
        let mut out = self.lease(shape.out())?;
        let mut lse = lease(memory, [shape.batch, shape.heads, shape.seq], DType::F32)?;
        let documents = match self.has_documents {
            true => Some(self.documents()?),
            false => None,
        };
        let options = FlashOptions {
            documents: documents.as_ref().map(Buffer::view),
            by: self.by,
            ..FlashOptions::default()
        };
        let [forward, backward] = self.scratch_elements();
        self.kernels.run(FlashAttention {
            out: Some(out.view_mut()),
            lse: Some(lse.view_mut()),
            scratch: lease(memory, [forward], DType::F32)?.view_mut(),
            q,
            k,
            v,
            shape,
            options,
        })?;
        self.kernels.run(FlashAttentionBackward {
            dq,
            dk,
            dv,
            scratch: lease(memory, [backward], DType::F32)?.view_mut(),
            dout: dout.view(),
            out: out.view(),
            lse: lse.view(),
            q,
            k,
            v,
            shape,
            options,
        })?;
        Ok([out, lse])
    }

    /// Scratch elements of the forward and of the backward pass.
    fn scratch_elements(&self) -> [usize; 2] {
        let (shape, documents) = (self.shape, self.has_documents);
        match self.by {
            Flash::Own => [
                FlashAttention::scratch_elements(Target::Cuda, shape, DType::BF16),
                FlashAttentionBackward::scratch_elements(Target::Cuda, shape, DType::BF16),
            ],
            Flash::Cudnn => [
                FlashAttention::cudnn_scratch_elements(shape, documents, [true; 2]),
                FlashAttentionBackward::cudnn_scratch_elements(shape, documents),
            ],
        }
    }

    fn lease(&self, dims: [usize; 2]) -> Result<Buffer, KernelError> {
        lease(self.memory, dims, DType::BF16)
    }

    fn random(&self, dims: [usize; 2], key: u64) -> Result<Buffer, KernelError> {
        let mut buffer = self.lease(dims)?;
        let elements = 0..buffer.view().elements() as u64;
        let bytes: Vec<u8> = elements.flat_map(|at| uniform(key, at)).collect();
        self.kernels.upload(buffer.view_mut(), &bytes)?;
        Ok(buffer)
    }
}

/// f32 statistics `[b, s, heads]` as `[b, heads, s]`.
fn heads_first(shape: AttentionShape, bytes: &[u8]) -> Vec<u8> {
    let AttentionShape {
        batch, heads, seq, ..
    } = shape;
    let of_row = |row: usize| {
        let of_head = move |head| (0..seq).map(move |token| (row * seq + token) * heads + head);
        (0..heads).flat_map(of_head)
    };
    let places = (0..batch).flat_map(of_row);
    places
        .flat_map(|at| &bytes[4 * at..][..4])
        .copied()
        .collect()
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
