//! Attention by cuDNN, which is loaded when it is first asked for.

mod attention;
mod descriptor;
mod graph;
mod interface;
mod library;
mod on_paper;
mod plan;
mod rehearsal;
mod self_check;

pub use library::CudnnVersion;
pub use on_paper::{PaperPlan, plan_on_paper};

use crate::cuda::{
    AttentionPass, AttentionTensors, LibraryAttention, LibraryShape, cudnn_workspace_bytes,
};
use crate::{KernelError, RaggedDocuments};
use cudarc::driver::sys::CUstream;
use descriptor::{Refused, accepted};
use graph::Uid;
use interface as sys;
use plan::{Device, Plan};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// The library at work in one stream, with a plan for each shape seen so far.
pub(super) struct Cudnn {
    handle: sys::CudnnHandle,
    plans: RefCell<HashMap<(LibraryShape, AttentionPass), Rc<Plan>>>,
}

impl Cudnn {
    /// Opens the library for the device whose context is current.
    ///
    /// # Errors
    /// [`KernelError`], with what to install, if it is missing or cannot be used.
    pub(super) fn open(stream: CUstream) -> Result<Cudnn, KernelError> {
        CudnnVersion::look_up()?;
        let opened = || -> Result<Cudnn, Refused> {
            let mut handle = std::ptr::null_mut();
            // SAFETY: writes one pointer.
            let status = unsafe { sys::cudnnCreate(&mut handle) };
            accepted(status, || "starting".into())?;
            let opened = Cudnn {
                handle,
                plans: RefCell::default(),
            };
            // SAFETY: the stream belongs to the current context, and outlives this.
            let status = unsafe { sys::cudnnSetStream(handle, stream) };
            accepted(status, || "taking a stream".into())?;
            Ok(opened)
        };
        opened().map_err(|refused| refused.of("cudnn"))
    }

    /// Computes attention in the order of the stream.
    ///
    /// # Safety
    /// As for `Driver::attention`.
    pub(super) unsafe fn compute(&self, attention: &LibraryAttention) -> Result<(), KernelError> {
        let (shape, pass) = (attention.shape, attention.pass());
        let operation = pass.operation();
        let plan = self.plan_within(shape, pass, attention.workspace.bytes)?;
        // Read before the call returns.
        let [scale, masked, one] = [shape.sizes.scale(), f32::NEG_INFINITY, 1.0];
        let number = |value: &f32| std::ptr::from_ref(value).cast::<u8>();
        let numbers = [(Uid::Scale, number(&scale)), (Uid::Masked, number(&masked))];
        let of_backward = [(Uid::One, number(&one))];
        let mut tensors: Vec<(Uid, *const u8)> = match &attention.tensors {
            AttentionTensors::Forward { q, k, v, out, lse } => [
                (Uid::Q, *q),
                (Uid::K, *k),
                (Uid::V, *v),
                (Uid::Out, *out),
                (Uid::Lse, *lse),
            ]
            .into_iter()
            .chain(numbers)
            .collect(),
            AttentionTensors::Backward(backward) => [
                (Uid::Q, backward.q),
                (Uid::K, backward.k),
                (Uid::V, backward.v),
                (Uid::Out, backward.out),
                (Uid::Lse, backward.lse),
                (Uid::Dout, backward.dout),
                (Uid::Dq, backward.dq),
                (Uid::Dk, backward.dk),
                (Uid::Dv, backward.dv),
                (Uid::DqSums, backward.dq_sums),
                (Uid::RowSums, backward.row_sums),
            ]
            .into_iter()
            .chain(numbers)
            .chain(of_backward)
            .collect(),
        };
        if let (AttentionTensors::Backward(backward), Some(_)) =
            (&attention.tensors, shape.documents)
        {
            tensors.push((Uid::Beyond, number(&masked)));
            if shape.sizes.group() > 1 {
                let [of_dk, of_dv] = backward.of_heads;
                tensors.extend([(Uid::DkOfHeads, of_dk), (Uid::DvOfHeads, of_dv)]);
            }
        }
        tensors.extend(numbers_of_documents(attention));
        let workspace = attention.workspace.pointer.cast_mut();
        // SAFETY: the caller's promise, and the workspace is large enough.
        let run = unsafe { plan.run(self.handle, &tensors, workspace) };
        run.map_err(|error| error.of(operation))
    }

    /// Makes the plans of a shape, so that what has none is known beforehand.
    ///
    /// # Errors
    /// [`KernelError`] if there is none, or it takes more than is leased for it.
    pub(super) fn prepare(&self, shape: LibraryShape) -> Result<(), KernelError> {
        for pass in [AttentionPass::Forward, AttentionPass::Backward] {
            self.plan_within(shape, pass, cudnn_workspace_bytes(shape, pass))?;
        }
        Ok(())
    }

    /// A plan that takes no larger workspace.
    fn plan_within(
        &self,
        shape: LibraryShape,
        pass: AttentionPass,
        bytes: usize,
    ) -> Result<Rc<Plan>, KernelError> {
        let operation = pass.operation();
        let plan = self.plan(shape, pass);
        let plan = plan.map_err(|error| error.of(operation))?;
        let least = plan.workspace_bytes;
        if least > bytes {
            let message = format!(
                "this version of cuDNN wants a workspace of {least} bytes for {shape:?}, and {bytes} are planned, which is \
                 what 9.28 takes: take that version, or --attention flash"
            );
            return Err(KernelError::device(operation, message));
        }
        Ok(plan)
    }

    fn plan(&self, shape: LibraryShape, pass: AttentionPass) -> Result<Rc<Plan>, Refused> {
        let key = (shape, pass);
        if let Some(plan) = self.plans.borrow().get(&key) {
            return Ok(plan.clone());
        }
        let plan = Rc::new(Plan::new(Device::Handle(self.handle), shape, pass)?);
        self.plans.borrow_mut().insert(key, plan.clone());
        Ok(plan)
    }
}

/// Where the numbers about packed documents are, a row for each tensor of them; nothing where there are no documents.
fn numbers_of_documents(attention: &LibraryAttention) -> Vec<(Uid, *const u8)> {
    let (Some(start), Some(most)) = (attention.documents, attention.shape.documents) else {
        return Vec::new();
    };
    let row_bytes = RaggedDocuments::stride(most) * size_of::<i32>();
    let rows = [
        Uid::Lengths,
        Uid::OutOffsets,
        Uid::KeyOffsets,
        Uid::RowOffsets,
    ];
    let rows = rows.into_iter().enumerate();
    rows.map(|(row, uid)| (uid, start.wrapping_add(row * row_bytes)))
        .collect()
}

impl Drop for Cudnn {
    fn drop(&mut self) {
        // What refers to the handle goes first.
        self.plans.borrow_mut().clear();
        // SAFETY: created in `open`. A failure here is one of earlier work, and was or will be told there.
        let _ = unsafe { sys::cudnnDestroy(self.handle) };
    }
}
