//! The operations on shapes: everything is checked, nothing is computed.

use crate::queue::{bytes_of, count_download, count_upload};
use crate::timeline::Timeline;
use crate::{
    AdamW, AttentionShape, Event, FlashOptions, Init, KernelError, Kernels, Queue, Queues, Reading,
    Target, Traffic, check, workspace_bytes,
};
use memory::{Buffer, ByPhase, Category, DType, In, Memory, Out, OutOfMemory};
use std::cell::Cell;
use std::rc::Rc;

/// Kernels for planning: they check what they are handed as the target's do, hold the same workspace, and count
/// the floating-point operations of matrix products.
pub struct Meta {
    target: Target,
    memory: Memory,
    flops: FlopCounter,
    workspace: Option<Buffer>,
    traffic: Cell<Traffic>,
    timeline: Option<Timeline>,
}

/// Floating-point operations of matrix products (two for each multiplication), by the phase in which they were
/// asked for; attention counts without regard to causality. Clones count together.
#[derive(Clone, Default)]
pub struct FlopCounter {
    by_phase: Rc<Cell<ByPhase<u64>>>,
}

impl FlopCounter {
    /// What has been counted.
    pub fn by_phase(&self) -> ByPhase<u64> {
        self.by_phase.get()
    }
}

impl Meta {
    /// Leases the target's workspace for matrix products whose narrowest type is `dtype`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if a limit refuses the workspace.
    pub fn new(
        memory: &Memory,
        target: Target,
        dtype: DType,
        flops: FlopCounter,
    ) -> Result<Meta, OutOfMemory> {
        Ok(Meta {
            target,
            memory: memory.clone(),
            flops,
            workspace: lease_workspace(memory, target, dtype)?,
            traffic: Cell::default(),
            timeline: None,
        })
    }

    /// The same, keeping time.
    pub fn on(self, timeline: &Timeline) -> Meta {
        Meta {
            timeline: Some(timeline.clone()),
            ..self
        }
    }
}

impl Meta {
    fn count(&self, multiplications: usize) {
        let flops = 2 * multiplications as u64;
        let mut by_phase = self.flops.by_phase.get();
        *by_phase.get_mut(self.memory.place().phase) += flops;
        self.flops.by_phase.set(by_phase);
        if let Some(timeline) = &self.timeline {
            timeline.compute(flops);
        }
    }
}

/// Multiplications of one of attention's matrix products.
fn attention_product(shape: &AttentionShape) -> usize {
    shape.batch * shape.heads * shape.seq * shape.seq * shape.head_dim
}

/// The constant workspace of a target's kernels, if they need one.
pub(crate) fn lease_workspace(
    memory: &Memory,
    target: Target,
    dtype: DType,
) -> Result<Option<Buffer>, OutOfMemory> {
    match workspace_bytes(target, dtype) {
        0 => Ok(None),
        bytes => memory
            .lease_persistent(
                Category::Temporary,
                "kernel_workspace",
                [bytes as usize / 4],
                DType::F32,
            )
            .map(Some),
    }
}

impl Queues for Meta {
    fn runs_ahead(&self) -> bool {
        self.target == Target::Cuda
    }

    unsafe fn start_upload(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_upload", &out, &x)?;
        count_upload(&self.traffic, bytes_of(&x));
        if let Some(timeline) = &self.timeline {
            timeline.copy(Queue::Upload, bytes_of(&x));
        }
        Ok(())
    }

    unsafe fn start_download(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::start_copy("start_download", &out, &x)?;
        count_download(&self.traffic, bytes_of(&x));
        if let Some(timeline) = &self.timeline {
            timeline.copy(Queue::Download, bytes_of(&x));
        }
        Ok(())
    }

    fn start_read(&self, x: In) -> Result<Reading, KernelError> {
        check::start_read(&x)?;
        count_download(&self.traffic, bytes_of(&x));
        Ok(Reading::done(vec![0; bytes_of(&x)]))
    }

    fn record(&self, queue: Queue) -> Result<Event, KernelError> {
        let timeline = self.timeline.as_ref();
        Ok(timeline.map_or(Event::PAST, |timeline| timeline.record(queue)))
    }

    fn wait(&self, queue: Queue, event: Event, _reason: &'static str) -> Result<(), KernelError> {
        if let Some(timeline) = &self.timeline {
            timeline.wait(queue, event);
        }
        Ok(())
    }

    fn finish(&self, _event: Event) -> Result<(), KernelError> {
        Ok(())
    }

    fn traffic(&self) -> Traffic {
        self.traffic.get()
    }
}

impl Kernels for Meta {
    fn target(&self) -> Target {
        self.target
    }

    fn fill(&self, out: Out, _value: f32) -> Result<(), KernelError> {
        check::fill(&out)
    }

    fn copy(&self, out: Out, x: In) -> Result<(), KernelError> {
        check::copy(&out, &x)
    }

    fn upload(&self, out: Out, bytes: &[u8]) -> Result<(), KernelError> {
        check::transfer(
            "upload",
            out.elements(),
            out.dtype(),
            out.is_contiguous(),
            bytes.len(),
        )?;
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
        count_download(&self.traffic, bytes.len());
        Ok(())
    }

    fn matmul(&self, out: Out, a: In, b: In, init: Init) -> Result<(), KernelError> {
        let widens = self.target != Target::Cpu || self.workspace.is_some();
        check::matmul(widens, &out, &a, &b, &init)?;
        self.count(out.elements() * a.dims()[1]);
        Ok(())
    }

    fn add_bias(&self, out: Out, bias: In) -> Result<(), KernelError> {
        check::add_bias(&out, &bias)
    }

    fn bias_backward(&self, out: Out, dy: In, init: Init) -> Result<(), KernelError> {
        check::bias_backward(&out, &dy, &init)
    }

    fn embedding(&self, out: Out, table: In, ids: In) -> Result<(), KernelError> {
        check::embedding(&out, &table, &ids)
    }

    fn embedding_backward(
        &self,
        dtable: Out,
        dout: In,
        ids: In,
        init: Init,
    ) -> Result<(), KernelError> {
        check::embedding_backward(&dtable, &dout, &ids, &init)
    }

    fn rms_norm(
        &self,
        y: Option<Out>,
        rstd: Option<Out>,
        x: In,
        weight: In,
        _eps: f32,
    ) -> Result<(), KernelError> {
        check::rms_norm(&y, &rstd, &x, &weight)
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
        )
    }

    fn rotary(&self, x: Out, table: In, _inverse: bool) -> Result<(), KernelError> {
        check::rotary(&x, &table)
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
        check::attention(self.target, &out, &probs, &scratch, (&q, &k, &v), shape)?;
        let products = 1 + usize::from(out.is_some());
        self.count(products * attention_product(&shape));
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
            self.target,
            (&dq, &dk, &dv),
            &scratch,
            &dout,
            &probs,
            (&q, &k, &v),
            shape,
        )?;
        self.count(4 * attention_product(&shape));
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
        check::flash_attention(self.target, &out, &lse, &scratch, qkv, shape, &options)?;
        let products = 1 + usize::from(out.is_some());
        self.count(products * attention_product(&shape));
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
            self.target,
            (&dq, &dk, &dv),
            &scratch,
            (&dout, &out, &lse),
            (&q, &k, &v),
            shape,
            &options,
        )?;
        // Those of `attention_backward`, and the scores once more.
        self.count(5 * attention_product(&shape));
        Ok(())
    }

    fn swiglu(&self, act: Out, gate: In, up: In) -> Result<(), KernelError> {
        check::swiglu(&act, &gate, &up)
    }

    fn swiglu_backward(&self, gate: Out, up: Out, dact: In) -> Result<(), KernelError> {
        check::swiglu_backward(&gate, &up, &dact)
    }

    fn cross_entropy(
        &self,
        losses: Out,
        logits: Out,
        targets: In,
        _scale: f32,
    ) -> Result<(), KernelError> {
        check::cross_entropy(&losses, &logits, &targets)
    }

    fn sum(&self, out: Out, x: In, init: Init) -> Result<(), KernelError> {
        check::sum(&out, &x, &init)
    }

    fn norm_and_clip(
        &self,
        out: Out,
        parts: Out,
        x: In,
        loss: In,
        _max_norm: Option<f32>,
    ) -> Result<(), KernelError> {
        check::norm_and_clip(&out, &parts, &x, &loss)
    }

    fn adamw(&self, update: AdamW) -> Result<(), KernelError> {
        check::adamw(&update)
    }

    unsafe fn start_adamw(&self, update: AdamW) -> Result<(), KernelError> {
        check::adamw(&update)
    }
}
