//! The operations on the processor, f32 and bf16.
//!
//! Work is split into parts of fixed size, so results do not depend on the number of threads. Loops have explicit lanes
//! for the vectoriser, and are compiled for several instruction sets.

mod adafactor;
mod adamw;
mod attention;
mod cache;
mod cross_entropy;
mod dequantise;
mod dispatch;
mod dropout;
mod elementwise;
mod embedding;
mod experts;
mod flash;
mod fp8;
mod gelu;
mod gemm;
mod latent;
mod layer_norm;
mod matmul;
mod muon;
mod norm;
mod positions;
mod preference;
mod products;
mod qkv;
mod quantise;
mod rms_norm;
mod rotary;
mod router;
mod simd;
mod states;
mod sum_in_order;
mod swiglu;

use crate::workers::Workers;
use crate::workspace::lease_workspace;
use crate::{
    Backend, Event, Init, Kernels, Operation, Queue, Reading, Request, Result, Target, Traffic,
};
use collectives::Group;
use memory::{Buffer, DType, In, Memory, Out, OutOfMemory};
use std::cell::{Cell, RefCell};
use std::sync::Arc;

pub use products::Instructions;

/// Kernels on the processor, in the current rayon pool.
pub struct Cpu {
    workspace: Option<RefCell<Buffer>>,
    /// The instructions for products with bf16.
    instructions: Instructions,
    /// One thread per queue of copies and exchanges. Operations run in the calling thread.
    workers: Workers,
    traffic: Cell<Traffic>,
}

impl Cpu {
    /// Leases the workspace for matrix products whose narrowest type is `dtype`.
    ///
    /// # Errors
    /// [`OutOfMemory`] if a limit refuses the workspace.
    pub fn new(memory: &Memory, dtype: DType) -> Result<Kernels<Cpu>, OutOfMemory> {
        Cpu::with(memory, dtype, None)
    }

    /// As [`Cpu::new`], for a rank of a group that exchanges pieces.
    ///
    /// # Errors
    /// As for [`Cpu::new`].
    pub fn in_group(
        memory: &Memory,
        dtype: DType,
        group: Arc<dyn Group>,
    ) -> Result<Kernels<Cpu>, OutOfMemory> {
        Cpu::with(memory, dtype, Some(group))
    }

    /// Runs an operation, already checked, in this thread.
    fn compute(&self, operation: Operation) {
        match operation {
            Operation::Fill(operation) => elementwise::fill(operation),
            Operation::Copy(operation) => elementwise::copy(operation),
            Operation::DequantiseBytes(operation) => dequantise::dequantise_bytes(operation),
            Operation::DequantiseNf4(operation) => dequantise::dequantise_nf4(operation),
            Operation::Matmul(operation) => {
                matmul::matmul(self.workspace.as_ref(), self.instructions, operation)
            }
            Operation::Gram(operation) => {
                matmul::gram(self.workspace.as_ref(), self.instructions, operation)
            }
            Operation::AbsMax(operation) => fp8::abs_max(operation),
            Operation::Quantise(operation) => fp8::quantise(operation),
            Operation::QuantiseTransposed(operation) => fp8::quantise_transposed(operation),
            Operation::TransposeCodes(operation) => fp8::transpose_codes(operation),
            Operation::ScaledMatmul(operation) => {
                fp8::scaled_matmul(self.workspace.as_ref(), self.instructions, operation)
            }
            Operation::AddBias(operation) => elementwise::add_bias(operation),
            Operation::BiasBackward(operation) => elementwise::bias_backward(operation),
            Operation::BiasDropoutAdd(operation) => dropout::bias_dropout_add(operation),
            Operation::DropoutBackward(operation) => dropout::dropout_backward(operation),
            Operation::Embedding(operation) => embedding::embedding(operation),
            Operation::EmbeddingBackward(operation) => embedding::embedding_backward(operation),
            Operation::AddPositions(operation) => positions::add_positions(operation),
            Operation::AddPositionsBackward(operation) => {
                positions::add_positions_backward(operation)
            }
            Operation::RmsNorm(operation) => rms_norm::rms_norm(operation),
            Operation::RmsNormBackward(operation) => rms_norm::rms_norm_backward(operation),
            Operation::LayerNorm(operation) => layer_norm::layer_norm(operation),
            Operation::LayerNormBackward(operation) => layer_norm::layer_norm_backward(operation),
            Operation::Rotary(operation) => rotary::rotary(operation),
            Operation::SplitQkv(operation) => qkv::split_qkv(operation),
            Operation::JoinQkv(operation) => qkv::join_qkv(operation),
            Operation::Attention(operation) => attention::attention(operation),
            Operation::AttentionBackward(operation) => attention::attention_backward(operation),
            Operation::FlashAttention(operation) => flash::flash_attention(operation),
            Operation::FlashAttentionBackward(operation) => {
                flash::flash_attention_backward(operation)
            }
            Operation::StoreInCache(operation) => cache::store_in_cache(operation),
            Operation::CachedAttention(operation) => cache::cached_attention(operation),
            Operation::Swiglu(operation) => swiglu::swiglu(operation),
            Operation::SwigluBackward(operation) => swiglu::swiglu_backward(operation),
            Operation::Route(operation) => router::route(operation),
            Operation::RouteBackward(operation) => router::route_backward(operation),
            Operation::RouterZLoss(operation) => router::router_z_loss(operation),
            Operation::GroupByExpert(operation) => router::group_by_expert(operation),
            Operation::CountChoices(operation) => router::count_choices(operation),
            Operation::BalanceLoss(operation) => router::balance_loss(operation),
            Operation::StepRouterBias(operation) => router::step_router_bias(operation),
            Operation::SumRows(operation) => experts::sum_rows(operation),
            Operation::GroupedMatmul(operation) => {
                experts::grouped_matmul(self.workspace.as_ref(), self.instructions, operation)
            }
            Operation::GroupedGradient(operation) => {
                experts::grouped_gradient(self.workspace.as_ref(), self.instructions, operation)
            }
            Operation::WeighedSwiglu(operation) => experts::weighed_swiglu(operation),
            Operation::WeighedSwigluBackward(operation) => {
                experts::weighed_swiglu_backward(operation)
            }
            Operation::RotaryTail(operation) => latent::rotary_tail(operation),
            Operation::ExpandKeys(operation) => latent::expand_keys(operation),
            Operation::ExpandKeysBackward(operation) => latent::expand_keys_backward(operation),
            Operation::Gelu(operation) => gelu::gelu(operation),
            Operation::GeluBackward(operation) => gelu::gelu_backward(operation),
            Operation::CrossEntropy(operation) => cross_entropy::cross_entropy(operation),
            Operation::PreferenceLoss(operation) => preference::preference_loss(operation),
            Operation::Sum(operation) => norm::sum(operation),
            Operation::NormGrains(operation) => norm::norm_grains(operation),
            Operation::NormAndClip(operation) => norm::norm_and_clip(operation),
            Operation::SumInOrder(operation) => sum_in_order::sum_in_order(operation),
            Operation::AdamW(update) => adamw::adamw(update),
            Operation::Momentum(operation) => muon::momentum(operation),
            Operation::DivideByNorm(operation) => muon::divide_by_norm(operation),
            Operation::Combine(operation) => muon::combine(operation),
            Operation::StepAlong(operation) => muon::step_along(operation),
            Operation::VarianceScale(operation) => adafactor::variance_scale(operation),
            Operation::VarianceSums(operation) => adafactor::variance_sums(operation),
            Operation::FactorVariance(operation) => adafactor::factor_variance(operation),
            Operation::UpdateSquares(operation) => adafactor::update_squares(operation),
            Operation::WeightSquares(operation) => adafactor::weight_squares(operation),
            Operation::AdafactorRate(operation) => adafactor::adafactor_rate(operation),
            Operation::AdafactorStep(operation) => adafactor::adafactor_step(operation),
        }
    }

    fn with(
        memory: &Memory,
        dtype: DType,
        group: Option<Arc<dyn Group>>,
    ) -> Result<Kernels<Cpu>, OutOfMemory> {
        Ok(Kernels::new(Cpu {
            workspace: lease_workspace(memory, Target::Cpu, dtype)?.map(RefCell::new),
            instructions: Instructions::best(),
            workers: Workers::new(Box::new(|_, _| {}), group),
            traffic: Cell::default(),
        }))
    }
}

impl Kernels<Cpu> {
    /// The same kernels with other instructions for products with bf16. The processor must have them
    /// ([`Instructions::are_here`]). [`Cpu::new`] takes the best.
    ///
    /// # Panics
    /// If this processor does not have them.
    pub fn multiplying_by(self, instructions: Instructions) -> Kernels<Cpu> {
        assert!(
            instructions.are_here(),
            "this processor does not have {instructions:?}"
        );
        Kernels::new(Cpu {
            instructions,
            ..self.backend
        })
    }

    /// The instructions that multiply bf16.
    pub fn instructions(&self) -> Instructions {
        self.backend.instructions
    }
}

/// Upper limit for the packing buffers that the GEMM library allocates outside the ledger, for `threads` threads. It is
/// the only allocation of an operation on the CPU, and a test checks the limit.
pub fn untracked_bytes_max(threads: usize) -> u64 {
    gemm::packing_bytes_max(threads)
}

impl Backend for Cpu {
    fn target(&self) -> Target {
        Target::Cpu
    }

    fn runs_ahead(&self) -> bool {
        false
    }

    fn widens(&self) -> bool {
        self.workspace.is_some()
    }

    fn rank(&self) -> usize {
        self.workers.rank()
    }

    fn traffic(&self) -> &Cell<Traffic> {
        &self.traffic
    }

    unsafe fn ask(&self, queue: Queue, request: Request) -> Result {
        // SAFETY: the caller's promise.
        unsafe {
            match request {
                Request::Operation(operation) => self.compute(operation),
                Request::Copy(out, x) => self.workers.copy(queue, out, x)?,
                Request::Disk(copy) => self.workers.disk(copy)?,
                Request::Exchange(exchange) => self.workers.exchange(exchange)?,
            }
        }
        Ok(())
    }

    unsafe fn write(&self, out: Out, bytes: &[u8]) -> Result {
        assert!(!out.pointer().is_null(), "a shape has no data");
        // SAFETY: the view covers as many bytes as `bytes`, which the borrow checker keeps apart from it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.pointer(), bytes.len()) };
        Ok(())
    }

    unsafe fn read(&self, bytes: &mut [u8], x: In) -> Result {
        assert!(!x.pointer().is_null(), "a shape has no data");
        self.workers.check()?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(x.pointer(), bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    unsafe fn start_reading(&self, x: In) -> Result<Reading> {
        let mut bytes = vec![0; x.bytes()];
        // SAFETY: the caller's promise, and there are as many bytes.
        unsafe { self.read(&mut bytes, x)? };
        Ok(Reading::done(bytes))
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.workers.record(queue)
    }

    fn wait(&self, queue: Queue, event: Event, _reason: &'static str) -> Result {
        match queue {
            Queue::Compute | Queue::Update => self.workers.finish(event),
            _ => self.workers.wait(queue, event),
        }
    }

    fn finish(&self, event: Event) -> Result {
        self.workers.finish(event)
    }

    fn is_over(&self, _event: Event) -> bool {
        true
    }
}

fn overwrites(init: &Init) -> bool {
    matches!(init, Init::Overwrite)
}

/// A pointer into an output that several tasks write in disjoint places.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);

// SAFETY: the code that makes one ensures that no two tasks touch the same element.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// The pointer moved by `offset` elements. It is a method so that a closure captures the whole wrapper.
    fn at(self, offset: usize) -> *mut T {
        self.0.wrapping_add(offset)
    }
}
