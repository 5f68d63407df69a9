//! The operations that a training step is made of, once as a trait and once for each device.
//!
//! [`Kernels`] has one method an operation. It makes an [`Operation`] of its arguments, checks it, and hands it to a
//! [`Backend`]: to [`cpu::Cpu`] or [`cuda::Cuda`], which compute, or to [`meta::Meta`], which counts operations, no more;
//! that is how a step is planned for a device that is not there. A backend has no way around the check, and no check of
//! its own.
//!
//! An operation writes into what it is handed and never allocates device memory; scratch comes from one constant
//! workspace, leased when the kernels are made, or is leased by the caller in the size that
//! [`attention::scratch_elements`] or [`flash::scratch_elements`] tells. Operations are deterministic: the order of every
//! sum is fixed, for any number of threads. Nothing returns a number to the host but [`Kernels::download`] and
//! [`Queues::finish_read`]. Copies to and from pinned host memory run beside the operations, in queues of their own
//! ([`Queues`]).
//!
//! This crate knows no model and no policy.

mod adamw;
pub mod attention;
mod backend;
mod check;
mod cost;
pub mod cpu;
pub mod cuda;
mod error;
pub mod flash;
pub mod meta;
pub mod operation;
pub mod quantise;
mod queue;
pub mod random;
pub mod scheduled;
pub mod split;
pub mod timed;
pub mod timeline;

pub use adamw::{AdamW, Master, Moment};
pub use attention::AttentionShape;
pub use backend::Backend;
pub use cost::Cost;
pub use error::{Fault, KernelError};
pub use flash::{Dropout, FlashOptions};
pub use operation::Operation;
pub use queue::{Event, Queue, Queues, READING_BYTES_MAX, READINGS_MAX, Reading, Traffic};

use memory::{DType, In, Out};
use queue::{count_download, count_upload};

/// The device whose leases and scratch sizes apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// The process's own memory.
    Cpu,
    /// A CUDA GPU.
    Cuda,
}

impl Target {
    /// The name used in settings and files.
    pub fn name(self) -> &'static str {
        match self {
            Target::Cpu => "cpu",
            Target::Cuda => "cuda",
        }
    }
}

/// What an operation's result is added to.
#[derive(Clone, Copy)]
pub enum Init<'a> {
    /// Nothing: the output's contents are replaced.
    Overwrite,
    /// The output's contents.
    Accumulate,
    /// Another tensor of the output's shape and type: a residual connection.
    Add(In<'a>),
}

/// Number of partial sums that [`Kernels::norm_and_clip`] keeps, whatever the size and the number of threads.
pub const NORM_PARTS: usize = 256;

/// The number of bytes that kernels of a target keep as constant workspace, where `dtype` is the narrowest type of a
/// matrix product's operands.
///
/// On the CPU, bf16 products are widened to f32 in tiles of this workspace; on CUDA it is what cuBLAS is given.
pub fn workspace_bytes(target: Target, dtype: DType) -> u64 {
    match (target, dtype) {
        (Target::Cpu, DType::F32) => 0,
        (Target::Cpu, _) => cpu::WIDENING_WORKSPACE_BYTES,
        (Target::Cuda, _) => 32 << 20,
    }
}

/// The operations of a training step. Shapes are in brackets; `t` tokens, `b` batch, `s` sequence, `h` hidden, `v`
/// vocabulary. Outputs come first. Unless said otherwise, tensors hold the compute type (f32 or bf16), are
/// contiguous, and statistics and sums are f32. Token ids lie within the vocabulary: whoever reads the data checks that.
///
/// # Errors
/// Every operation returns [`KernelError`] if a shape or type does not fit ([`Fault::Caller`]), before anything is
/// written, or if the device fails ([`Fault::Device`]).
pub trait Kernels: Queues {
    /// The device whose scratch sizes apply.
    fn target(&self) -> Target {
        self.backend().target()
    }

    /// Sets every element.
    fn fill(&self, out: Out, value: f32) -> Result<(), KernelError> {
        self.backend().run(operation::Fill { out, value })
    }

    /// Copies between tensors of one shape, converting between f32 and bf16.
    fn copy(&self, out: Out, x: In) -> Result<(), KernelError> {
        self.backend().run(operation::Copy { out, x })
    }

    /// Copies host bytes into a contiguous tensor of as many bytes.
    fn upload(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError> {
        check::transfer("upload", &out.as_in(), bytes.len())?;
        count_upload(self.backend(), bytes.len());
        // SAFETY: the tensor is contiguous and has as many bytes.
        unsafe { self.backend().write(out, bytes) }
    }

    /// Copies a contiguous tensor into as many host bytes, when all work before it is done.
    fn download(&self, bytes: &mut [u8], x: In) -> Result<(), KernelError> {
        check::transfer("download", &x, bytes.len())?;
        count_download(self.backend(), bytes.len());
        // SAFETY: as in `upload`.
        unsafe { self.backend().read(bytes, x) }
    }

    /// `out [m, n] = init + a [m, k] b [k, n]`. `a` and `b` may be strided (`.t()`); types may differ: the sum is
    /// f32 and is rounded once, on its way into `out`.
    fn matmul(&self, out: Out, a: In, b: In, init: Init) -> Result<(), KernelError> {
        self.backend().run(operation::Matmul { out, a, b, init })
    }

    /// `out [t, n] += bias [n]` on every row.
    fn add_bias(&self, out: Out, bias: In) -> Result<(), KernelError> {
        self.backend().run(operation::AddBias { out, bias })
    }

    /// `out [n] = init + sum of the rows of dy [t, n]`. A gradient: f32 or bf16, summed in f32 and rounded once.
    fn bias_backward(&self, out: Out, dy: In, init: Init) -> Result<(), KernelError> {
        self.backend()
            .run(operation::BiasBackward { out, dy, init })
    }

    /// `out [t, h]` = rows of `table [v, h]` named by `ids [t]` (i32).
    fn embedding(&self, out: Out, table: In, ids: In) -> Result<(), KernelError> {
        self.backend().run(operation::Embedding { out, table, ids })
    }

    /// `dtable [v, h] = init + ` the rows of `dout [t, h]`, each added to the row named by `ids [t]`. A gradient: f32
    /// or bf16, summed in f32 and rounded once.
    fn embedding_backward(
        &self,
        dtable: Out,
        dout: In,
        ids: In,
        init: Init,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::EmbeddingBackward {
            dtable,
            dout,
            ids,
            init,
        })
    }

    /// `y [t, h] = x rstd weight`, `rstd [t] (f32) = 1 / sqrt(mean(x^2) + eps)`. Either output may be left out.
    fn rms_norm(
        &self,
        y: Option<Out>,
        rstd: Option<Out>,
        x: In,
        weight: In,
        eps: f32,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::RmsNorm {
            y,
            rstd,
            x,
            weight,
            eps,
        })
    }

    /// `dx [t, h] = dx_init + ...`, `dweight [h] = dweight_init + ...` from `dy [t, h]` and what the forward pass read
    /// and made. `dweight` is a gradient: f32 or bf16, summed in f32 and rounded once.
    fn rms_norm_backward(
        &self,
        dx: Out,
        dx_init: Init,
        dweight: Out,
        dweight_init: Init,
        dy: In,
        x: In,
        weight: In,
        rstd: In,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::RmsNormBackward {
            dx,
            dx_init,
            dweight,
            dweight_init,
            dy,
            x,
            weight,
            rstd,
        })
    }

    /// Rotates pairs (i, i + head_dim / 2) of every head of `x [b * s, heads * head_dim]`, in place. `table` is
    /// `[2, s, head_dim / 2]` f32: cosines, sines. `inverse` turns the other way: the backward pass.
    fn rotary(&self, x: Out, table: In, inverse: bool) -> Result<(), KernelError> {
        self.backend().run(operation::Rotary { x, table, inverse })
    }

    /// Causal attention with stored probabilities. `q [b * s, heads * d]`, `k`, `v [b * s, kv_heads * d]`; `out` like
    /// `q`; `probs [b, heads, s, s]`, zero above the diagonal. Either output may be left out. `scratch` is f32 of
    /// [`attention::scratch_elements`].
    fn attention(
        &self,
        out: Option<Out>,
        probs: Option<Out>,
        scratch: Out,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::Attention {
            out,
            probs,
            scratch,
            q,
            k,
            v,
            shape,
        })
    }

    /// Gradients of [`Kernels::attention`]: `dq`, `dk`, `dv` from `dout` and `probs`; all are replaced.
    fn attention_backward(
        &self,
        dq: Out,
        dk: Out,
        dv: Out,
        scratch: Out,
        dout: In,
        probs: In,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::AttentionBackward {
            dq,
            dk,
            dv,
            scratch,
            dout,
            probs,
            q,
            k,
            v,
            shape,
        })
    }

    /// Causal attention that never stores the scores: blocks of them, with an online softmax (Dao et al. 2022, 2023).
    /// `q [b * s, heads * d]`, `k`, `v [b * s, kv_heads * d]`; `out` like `q`; `lse [b, heads, s]` (f32), for each
    /// query the natural logarithm of the sum of e^score over the keys that it sees. Either output may be left out,
    /// which changes no bit of the other. `scratch` is f32 of [`flash::scratch_elements`].
    fn flash_attention(
        &self,
        out: Option<Out>,
        lse: Option<Out>,
        scratch: Out,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
        options: FlashOptions,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::FlashAttention {
            out,
            lse,
            scratch,
            q,
            k,
            v,
            shape,
            options,
        })
    }

    /// Gradients of [`Kernels::flash_attention`]: `dq`, `dk`, `dv` from `dout`, and from `out` and `lse` as they were
    /// with these inputs and options; all are replaced. The probabilities are made again, so one more product is
    /// computed, and counted, than by [`Kernels::attention_backward`].
    fn flash_attention_backward(
        &self,
        dq: Out,
        dk: Out,
        dv: Out,
        scratch: Out,
        dout: In,
        out: In,
        lse: In,
        q: In,
        k: In,
        v: In,
        shape: AttentionShape,
        options: FlashOptions,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::FlashAttentionBackward {
            dq,
            dk,
            dv,
            scratch,
            dout,
            out,
            lse,
            q,
            k,
            v,
            shape,
            options,
        })
    }

    /// `act = silu(gate) up`, all `[t, f]`.
    fn swiglu(&self, act: Out, gate: In, up: In) -> Result<(), KernelError> {
        self.backend().run(operation::Swiglu { act, gate, up })
    }

    /// Gradients of [`Kernels::swiglu`] in place: `gate` becomes its own gradient, and so does `up`.
    fn swiglu_backward(&self, gate: Out, up: Out, dact: In) -> Result<(), KernelError> {
        self.backend()
            .run(operation::SwigluBackward { gate, up, dact })
    }

    /// Cross-entropy of `logits [t, v]` against `targets [t]` (i32; negative: masked). `losses [t]` (f32) receives
    /// each token's loss, 0 where masked; `logits` become their gradient times `scale`.
    fn cross_entropy(
        &self,
        losses: Out,
        logits: Out,
        targets: In,
        scale: f32,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::CrossEntropy {
            losses,
            logits,
            targets,
            scale,
        })
    }

    /// `out [1] (f32) = init + sum of x [n] (f32)`.
    fn sum(&self, out: Out, x: In, init: Init) -> Result<(), KernelError> {
        self.backend().run(operation::Sum { out, x, init })
    }

    /// `out [2] (f32)` = the Euclidean norm of `x [n]` (f32 or bf16) and the clipping factor min(1, max_norm / (norm +
    /// 1e-6)); 1 where `max_norm` is none; NaN where the norm or `loss [1]` (f32) is not finite, so that
    /// [`Kernels::adamw`] skips the step. Squares are f32: a norm above 1.8e19 counts as not finite. `parts
    /// [NORM_PARTS]` (f64) is scratch.
    fn norm_and_clip(
        &self,
        out: Out,
        parts: Out,
        x: In,
        loss: In,
        max_norm: Option<f32>,
    ) -> Result<(), KernelError> {
        self.backend().run(operation::NormAndClip {
            out,
            parts,
            x,
            loss,
            max_norm,
        })
    }

    /// One AdamW update of a range of parameters (Loshchilov and Hutter 2019).
    fn adamw(&self, update: AdamW) -> Result<(), KernelError> {
        self.backend().run(update)
    }

    /// Asks for an update in [`Queue::Update`]; else as [`Kernels::adamw`].
    ///
    /// # Safety
    /// Until an event recorded after this in the queue is over, everything in `update` stays alive, nothing else writes
    /// it, and nothing else reads what it writes.
    unsafe fn start_adamw(&self, update: AdamW) -> Result<(), KernelError> {
        // SAFETY: the caller's promise.
        unsafe { self.backend().run_in(Queue::Update, update) }
    }
}

impl<B: Backend> Kernels for B {}
