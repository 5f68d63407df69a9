//! The operations on the processor, f32 and bf16.
//!
//! Work is cut into pieces of fixed size, so results do not depend on the number of threads. Loops are written for
//! vectorisation with explicit lanes and compiled for several instruction sets.

mod adamw;
mod attention;
mod cross_entropy;
mod elementwise;
mod embedding;
mod flash;
mod gemm;
mod norm;
mod quantise;
mod queues;
mod rms_norm;
mod rotary;
mod simd;
mod swiglu;

pub use gemm::WIDENING_WORKSPACE_BYTES;

use crate::meta::lease_workspace;
use crate::queue::{bytes_of, count_download, count_upload};
use crate::{
    AdamW, AttentionShape, Event, FlashOptions, Init, KernelError, Kernels, Queue, Queues, Reading,
    Target, Traffic, check,
};
use half::bf16;
use memory::{Buffer, DType, In, Memory, Out, OutOfMemory};
use queues::CopyQueues;
use std::cell::{Cell, RefCell};

/// Calls a function generic over the element type with the type that a view holds.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            DType::F32 => $function::<f32>($($argument),*),
            DType::BF16 => $function::<bf16>($($argument),*),
            other => unreachable!("the check before admits only f32 and bf16, not {other:?}"),
        }
    };
}

/// Calls a function generic over two element types.
macro_rules! by_dtypes {
    ($first:expr, $second:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match ($first, $second) {
            (DType::F32, DType::F32) => $function::<f32, f32>($($argument),*),
            (DType::F32, _) => $function::<f32, bf16>($($argument),*),
            (_, DType::F32) => $function::<bf16, f32>($($argument),*),
            (_, _) => $function::<bf16, bf16>($($argument),*),
        }
    };
}

/// Kernels on the processor, in the current rayon pool.
pub struct Cpu {
    workspace: Option<RefCell<Buffer>>,
    queues: CopyQueues,
    traffic: Cell<Traffic>,
}

impl Cpu {
    /// Leases the workspace for matrix products whose narrowest type is `dtype`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if a limit refuses the workspace.
    pub fn new(memory: &Memory, dtype: DType) -> Result<Cpu, OutOfMemory> {
        Ok(Cpu {
            workspace: lease_workspace(memory, Target::Cpu, dtype)?.map(RefCell::new),
            queues: CopyQueues::default(),
            traffic: Cell::default(),
        })
    }
}

/// The most bytes of packing buffers that the GEMM library allocates behind the ledger's back, for `threads`
/// threads: the one exception to the rule that no operation allocates. Held by a test.
pub fn untracked_bytes_max(threads: usize) -> u64 {
    gemm::packing_bytes_max(threads)
}

impl Queues for Cpu {
    fn runs_ahead(&self) -> bool {
        false
    }

    unsafe fn start_upload(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_upload", &out, &x)?;
        count_upload(&self.traffic, bytes_of(&x));
        // SAFETY: the caller's promise, and the sides fit.
        unsafe { self.queues.copy(Queue::Upload, out, x) };
        Ok(())
    }

    unsafe fn start_download(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_download", &out, &x)?;
        count_download(&self.traffic, bytes_of(&x));
        // SAFETY: the caller's promise, and the sides fit.
        unsafe { self.queues.copy(Queue::Download, out, x) };
        Ok(())
    }

    fn start_read(&self, x: In) -> Result<Reading, KernelError> {
        check::start_read(&x)?;
        let mut bytes = vec![0; bytes_of(&x)];
        self.download(&mut bytes, x)?;
        Ok(Reading::done(bytes))
    }

    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        Ok(self.queues.record(queue))
    }

    fn wait(&self, queue: Queue, event: Event, _reason: &'static str) -> Result<(), KernelError> {
        self.queues.wait(queue, event);
        Ok(())
    }

    fn finish(&self, event: Event) -> Result<(), KernelError> {
        self.queues.finish(event);
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        self.traffic.get()
    }
}

impl Kernels for Cpu {
    fn target(&self) -> Target {
        Target::Cpu
    }

    fn fill(&self, out: Out, value: f32) -> Result<(), KernelError> {
        check::fill(&out)?;
        use elementwise::fill;
        by_dtype!(out.dtype(), fill(out.slice_mut(), value));
        Ok(())
    }

    fn copy(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::copy(&out, &x)?;
        use elementwise::copy;
        by_dtypes!(out.dtype(), x.dtype(), copy(out.slice_mut(), x.slice()));
        Ok(())
    }

    fn upload(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError> {
        check::transfer(
            "upload",
            out.elements(),
            out.dtype(),
            out.is_contiguous(),
            bytes.len(),
        )?;
        assert!(!out.pointer().is_null(), "a shape has no data");
        // SAFETY: the view covers as many bytes as `bytes`, which the borrow checker keeps apart from it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.pointer(), bytes.len()) };
        count_upload(&self.traffic, bytes.len());
        Ok(())
    }

    fn download(&self, bytes: &mut [u8], x: In) -> Result<(), KernelError> {
        check::transfer(
            "download",
            x.elements(),
            x.dtype(),
            x.is_contiguous(),
            bytes.len(),
        )?;
        assert!(!x.pointer().is_null(), "a shape has no data");
        // SAFETY: as in `upload`.
        unsafe { std::ptr::copy_nonoverlapping(x.pointer(), bytes.as_mut_ptr(), bytes.len()) };
        count_download(&self.traffic, bytes.len());
        Ok(())
    }

    fn matmul(&self, out: Out, a: In, b: In, init: Init) -> Result<(), KernelError> {
        check::matmul(self.workspace.is_some(), &out, &a, &b, &init)?;
        match &self.workspace {
            Some(workspace) if [out.dtype(), a.dtype(), b.dtype()] != [DType::F32; 3] => {
                let mut workspace = workspace.borrow_mut();
                gemm::matmul_widened(out, a, b, init, workspace.view_mut().slice_mut());
            }
            _ => gemm::matmul_f32(out, a, b, init),
        }
        Ok(())
    }

    fn add_bias(&self, out: Out, bias: In) -> Result<(), KernelError> {
        check::add_bias(&out, &bias)?;
        use elementwise::add_bias;
        by_dtype!(out.dtype(), add_bias(out.slice_mut(), bias.slice()));
        Ok(())
    }

    fn bias_backward(&self, out: Out, dy: In, init: Init) -> Result<(), KernelError> {
        check::bias_backward(&out, &dy, &init)?;
        use elementwise::bias_backward;
        by_dtypes!(
            out.dtype(),
            dy.dtype(),
            bias_backward(out.slice_mut(), dy.slice(), overwrites(&init))
        );
        Ok(())
    }

    fn embedding(&self, out: Out, table: In, ids: In) -> Result<(), KernelError> {
        check::embedding(&out, &table, &ids)?;
        use embedding::embedding;
        by_dtype!(
            table.dtype(),
            embedding(out.slice_mut(), table, ids.slice())
        );
        Ok(())
    }

    fn embedding_backward(
        &self,
        dtable: Out,
        dout: In,
        ids: In,
        init: Init,
    ) -> Result<(), KernelError> {
        check::embedding_backward(&dtable, &dout, &ids, &init)?;
        use embedding::embedding_backward;
        by_dtypes!(
            dtable.dtype(),
            dout.dtype(),
            embedding_backward(dtable, dout.slice(), ids.slice(), overwrites(&init))
        );
        Ok(())
    }

    fn rms_norm(
        &self,
        y: Option<Out>,
        rstd: Option<Out>,
        x: In,
        weight: In,
        eps: f32,
    ) -> Result<(), KernelError> {
        check::rms_norm(&y, &rstd, &x, &weight)?;
        use rms_norm::rms_norm;
        let rstd = rstd.map(|rstd| rstd.slice_mut());
        by_dtype!(
            x.dtype(),
            rms_norm(
                y.map(|y| y.slice_mut()),
                rstd,
                x.slice(),
                weight.slice(),
                eps
            )
        );
        Ok(())
    }

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
        check::rms_norm_backward(
            (&dx, &dx_init),
            (&dweight, &dweight_init),
            &dy,
            &x,
            &weight,
            &rstd,
        )?;
        use rms_norm::{dweight as weight_gradient, dx as input_gradient};
        let replace = overwrites(&dweight_init);
        let rstd = rstd.slice();
        by_dtypes!(
            dweight.dtype(),
            x.dtype(),
            weight_gradient(dweight.slice_mut(), replace, dy.slice(), x.slice(), rstd)
        );
        let replace = overwrites(&dx_init);
        let weight = weight.reshape([weight.elements()]);
        by_dtype!(
            x.dtype(),
            input_gradient(
                dx.slice_mut(),
                replace,
                dy.slice(),
                x.slice(),
                weight.slice(),
                rstd
            )
        );
        Ok(())
    }

    fn rotary(&self, x: Out, table: In, inverse: bool) -> Result<(), KernelError> {
        check::rotary(&x, &table)?;
        use rotary::rotary;
        let (width, half) = (x.dims()[1], table.dims()[2]);
        by_dtype!(
            x.dtype(),
            rotary(x.slice_mut(), table.slice(), width, half, inverse)
        );
        Ok(())
    }

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
        check::attention(Target::Cpu, &out, &probs, &scratch, (&q, &k, &v), shape)?;
        use attention::attention;
        by_dtype!(
            q.dtype(),
            attention(out, probs, scratch.slice_mut(), (q, k, v), shape)
        );
        Ok(())
    }

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
        check::attention_backward(
            Target::Cpu,
            (&dq, &dk, &dv),
            &scratch,
            &dout,
            &probs,
            (&q, &k, &v),
            shape,
        )?;
        use attention::attention_backward;
        by_dtype!(
            q.dtype(),
            attention_backward(
                (dq, dk, dv),
                scratch.slice_mut(),
                dout,
                probs,
                (q, k, v),
                shape
            )
        );
        Ok(())
    }

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
        let qkv = (&q, &k, &v);
        check::flash_attention(Target::Cpu, &out, &lse, &scratch, qkv, shape, &options)?;
        use flash::flash_attention;
        by_dtype!(
            q.dtype(),
            flash_attention(out, lse, scratch.slice_mut(), (q, k, v), shape, options)
        );
        Ok(())
    }

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
        check::flash_attention_backward(
            Target::Cpu,
            (&dq, &dk, &dv),
            &scratch,
            (&dout, &out, &lse),
            (&q, &k, &v),
            shape,
            &options,
        )?;
        use flash::flash_attention_backward;
        by_dtype!(
            q.dtype(),
            flash_attention_backward(
                (dq, dk, dv),
                scratch.slice_mut(),
                (dout, out, lse),
                (q, k, v),
                shape,
                options
            )
        );
        Ok(())
    }

    fn swiglu(&self, act: Out, gate: In, up: In) -> Result<(), KernelError> {
        check::swiglu(&act, &gate, &up)?;
        use swiglu::swiglu;
        by_dtype!(
            act.dtype(),
            swiglu(act.slice_mut(), gate.slice(), up.slice())
        );
        Ok(())
    }

    fn swiglu_backward(&self, gate: Out, up: Out, dact: In) -> Result<(), KernelError> {
        check::swiglu_backward(&gate, &up, &dact)?;
        use swiglu::swiglu_backward;
        by_dtype!(
            gate.dtype(),
            swiglu_backward(gate.slice_mut(), up.slice_mut(), dact.slice())
        );
        Ok(())
    }

    fn cross_entropy(
        &self,
        losses: Out,
        logits: Out,
        targets: In,
        scale: f32,
    ) -> Result<(), KernelError> {
        check::cross_entropy(&losses, &logits, &targets)?;
        use cross_entropy::cross_entropy;
        by_dtype!(
            logits.dtype(),
            cross_entropy(
                losses.slice_mut(),
                logits.slice_mut(),
                targets.slice(),
                scale
            )
        );
        Ok(())
    }

    fn sum(&self, out: Out, x: In, init: Init) -> Result<(), KernelError> {
        check::sum(&out, &x, &init)?;
        norm::sum(out.slice_mut(), x.slice(), overwrites(&init));
        Ok(())
    }

    fn norm_and_clip(
        &self,
        out: Out,
        parts: Out,
        x: In,
        loss: In,
        max_norm: Option<f32>,
    ) -> Result<(), KernelError> {
        check::norm_and_clip(&out, &parts, &x, &loss)?;
        use norm::norm_and_clip;
        let loss = loss.slice()[0];
        by_dtype!(
            x.dtype(),
            norm_and_clip(
                out.slice_mut(),
                parts.slice_mut(),
                x.slice(),
                loss,
                max_norm
            )
        );
        Ok(())
    }

    fn adamw(&self, update: AdamW) -> Result<(), KernelError> {
        check::adamw(&update)?;
        adamw::adamw(update);
        Ok(())
    }

    unsafe fn start_adamw(&self, update: AdamW) -> Result<(), KernelError> {
        self.adamw(update)
    }
}

fn overwrites(init: &Init) -> bool {
    matches!(init, Init::Overwrite)
}

/// A pointer into an output that several tasks write in disjoint places.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: whoever makes one sees to it that no two tasks touch the same element.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer `offset` elements on. A method, so that a closure captures the wrapper.
    fn at(self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}
