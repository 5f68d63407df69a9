//! The operations as values, one file per family: what each operation computes, what it refuses, and its least cost.
//!
//! Shapes are in brackets: `t` tokens, `b` batch, `s` sequence, `h` hidden, `v` vocabulary. Outputs come first. Unless
//! said otherwise, tensors hold the compute type (f32 or bf16) and are contiguous, and statistics and sums are f32.
//! Token ids are within the vocabulary, which the code that reads the data checks.
//!
//! Every operation is declared by `operation!` (`declaration.rs`), which says what its tensors must be, implements `Contract`
//! (`contract.rs`), and is in the list of [`Operation`].
#![expect(
    missing_docs,
    reason = "the text of an operation says what its fields are"
)]

mod adafactor;
mod adamw;
mod attention;
mod by_columns;
mod cache;
mod check;
mod contract;
mod cross_entropy;
mod declaration;
mod delta_cache;
mod dequantise;
mod dropout;
mod elementwise;
mod embedding;
mod experts;
mod flash;
mod fp8;
mod gated_delta;
mod gelu;
mod init;
mod latent;
mod layer_norm;
mod matmul;
mod muon;
mod norm;
mod operand;
mod output_form;
mod policy;
mod positions;
mod preference;
mod qkv;
mod rms_norm;
mod rotary;
mod router;
mod sigmoid_gate;
mod sum_in_order;
mod swiglu;

use crate::Result;
pub use adafactor::{
    AdafactorRate, AdafactorStep, FactorVariance, MatricesShape, SQUARE_PARTS, UpdateSquares,
    VarianceOperand, VarianceScale, VarianceSums, WeightSquares,
};
pub use adamw::{AdamW, MasterOperand, MomentOperand};
pub use attention::{Attention, AttentionBackward, AttentionShape, Positive};
pub use by_columns::ByColumns;
pub use cache::{CACHE_BLOCK, CachedAttention, StoreInCache};
pub use contract::Cost;
pub use cross_entropy::{CrossEntropy, SoftCap};
pub use delta_cache::{CachedConvolution, CachedDelta};
pub use dequantise::{DequantiseBytes, DequantiseMxfp4, DequantiseNf4};
pub use dropout::{BiasDropoutAdd, Dropout, DropoutScale};
pub use elementwise::{AddBias, BiasBackward, Copy, Fill};
pub use embedding::{Embedding, EmbeddingBackward};
pub use experts::{
    ExpertBias, ExpertBiasDweights, ExpertBiasGradient, ExpertRows, GroupedGradient, GroupedMatmul,
    RowWeights, SumRows, WeighedBias, WeighedGatedActivation, WeighedGatedActivationBackward,
};
pub use flash::{FlashAttention, FlashAttentionBackward, FlashOptions};
pub use fp8::{AbsMax, Quantise, QuantiseTransposed, ScaledMatmul, TransposeCodes};
pub(crate) use gated_delta::TAPS_MAX;
pub use gated_delta::{
    DELTA_CHUNK, DeltaShape, GatedDelta, GatedDeltaBackward, GatedNorm, GatedNormBackward,
    ShortConvolution, ShortConvolutionBackward,
};
pub use gelu::{Gelu, GeluBackward};
pub use init::Init;
pub use latent::{ExpandKeys, ExpandKeysBackward, RotaryTail};
pub use layer_norm::{LayerNorm, LayerNormBackward};
pub use matmul::{Gram, Matmul};
pub use muon::{Combine, DivideByNorm, Momentum, StepAlong};
pub use norm::{NormAndClip, NormGrains, Sum};
pub use operand::{OperandPlace, OperandRow};
pub use output_form::OutputForm;
pub use policy::PolicyGradientLoss;
pub use positions::{AddPositions, AddPositionsBackward, Positions};
pub use preference::PreferenceLoss;
pub use qkv::{JoinQkv, SplitQkv, Turn};
pub use rms_norm::{RmsNorm, RmsNormBackward};
pub use rotary::Rotary;
pub(crate) use router::EXPERTS_MAX;
pub use router::{
    BalanceLoss, CountChoices, GroupByExpert, Route, RouteBackward, RouterGroups, RouterScore,
    RouterZLoss, Routing, StepRouterBias,
};
pub use sigmoid_gate::{SigmoidGate, SigmoidGateBackward};
pub use sum_in_order::SumInOrder;
pub use swiglu::{GateFunction, GatedActivation, GatedActivationBackward};

use check::Check;
use contract::Contract;
pub(crate) use declaration::HasShape;
use memory::In;
use operand::OperandAccess;

/// Defines [`Operation`] from the structs of the families, by the groups in which what they read and write is added up.
macro_rules! operations {
    ($($group:literal: $($operation:ident),*;)*) => {
        /// An operation with everything that it reads and writes.
        pub enum Operation<'a> {
            $($($operation($operation<'a>),)*)*
        }

        impl<'a> Operation<'a> {
            /// How many there are.
            pub const COUNT: usize = [$($(stringify!($operation)),*),*].len();

            /// The group in which what it reads and writes is added up.
            pub fn group(&self) -> &'static str {
                match self {
                    $($(Operation::$operation(_))|* => $group,)*
                }
            }

            fn contract(&self) -> &(dyn Contract + 'a) {
                match self {
                    $($(Operation::$operation(operation) => operation,)*)*
                }
            }
        }

        $($(impl<'a> From<$operation<'a>> for Operation<'a> {
            fn from(operation: $operation<'a>) -> Operation<'a> {
                Operation::$operation(operation)
            }
        })*)*
    };
}

operations! {
    "products": Matmul, Gram, ScaledMatmul, GroupedMatmul, GroupedGradient;
    "attention": Attention, AttentionBackward, FlashAttention, FlashAttentionBackward, StoreInCache, CachedAttention;
    "gated delta rule": ShortConvolution, ShortConvolutionBackward, GatedDelta, GatedDeltaBackward, GatedNorm, GatedNormBackward,
        CachedConvolution, CachedDelta;
    "norms": RmsNorm, RmsNormBackward, LayerNorm, LayerNormBackward;
    "rotary, split and join": Rotary, SplitQkv, JoinQkv, RotaryTail, ExpandKeys, ExpandKeysBackward;
    "activation functions": GatedActivation, GatedActivationBackward, WeighedGatedActivation,
        WeighedGatedActivationBackward, Gelu, GeluBackward, SigmoidGate, SigmoidGateBackward;
    "passes of FP8": AbsMax, Quantise, QuantiseTransposed, TransposeCodes;
    "widening of frozen codes": DequantiseBytes, DequantiseNf4, DequantiseMxfp4;
    "routing to experts": Route, RouteBackward, RouterZLoss, GroupByExpert, CountChoices, BalanceLoss, StepRouterBias, SumRows;
    "biases": AddBias, BiasBackward, ExpertBiasGradient, ExpertBiasDweights;
    "dropout": BiasDropoutAdd, DropoutScale;
    "embedding": Embedding, EmbeddingBackward, AddPositions, AddPositionsBackward;
    "losses": CrossEntropy, SoftCap, PreferenceLoss, PolicyGradientLoss, Sum;
    "gradients and optimizer": NormGrains, NormAndClip, SumInOrder, AdamW, Momentum, DivideByNorm, Combine, StepAlong,
        VarianceScale, VarianceSums, FactorVariance, UpdateSquares, WeightSquares, AdafactorRate, AdafactorStep;
    "copies": Fill, Copy;
}

impl Operation<'_> {
    /// Its name in messages and measurements.
    pub fn name(&self) -> &'static str {
        self.contract().name()
    }

    /// Its least cost.
    pub fn cost(&self) -> Cost {
        self.contract().cost()
    }

    /// The sizes that distinguish it from other calls of its name: m, k, n of a product, otherwise the shape of its
    /// first operand.
    pub fn sizes(&self) -> Vec<usize> {
        self.contract().sizes()
    }

    /// Whether it may run in [`crate::Queue::Update`], beside the computation.
    pub fn runs_beside(&self) -> bool {
        self.contract().runs_beside()
    }

    /// The tensors that it reads and writes, and whether each is written. Scratch, single numbers, and the tensor that
    /// [`Init::Add`] reads are left out.
    pub fn operands(&self) -> impl Iterator<Item = (In<'_>, bool)> {
        let operands = self.contract().operands().into_iter();
        operands.map(|operand| (operand.view, operand.access != OperandAccess::Read))
    }

    /// Shows each of its tensors, with where it is. An [`Init`] is shown without one too.
    pub fn each_operand<'b>(&'b self, show: &mut dyn FnMut(OperandRow<'b>)) {
        let visited = self.contract().rows(&mut |row| {
            show(row);
            Ok(())
        });
        visited.expect("operations that do not fit are not shown");
    }

    /// Multiplications of its matrix products, attention's without regard to causality.
    pub(crate) fn multiplications(&self) -> usize {
        self.contract().multiplications()
    }

    /// Refuses operands that do not fit. `widens` says whether matrix products may have bf16 operands.
    pub(crate) fn check(&self, widens: bool) -> Result {
        self.contract().check(&Check {
            operation: self.name(),
            widens,
        })
    }

    /// The operation without the lifetime of its views, for work that goes on after the call that enqueued it.
    ///
    /// # Safety
    /// Until the operation has run or is dropped, its operands stay alive, nothing else uses its outputs, and nothing
    /// writes its inputs.
    pub unsafe fn outliving(self) -> Operation<'static> {
        // SAFETY: nothing but the lifetime changes, by the caller's promise.
        unsafe { std::mem::transmute::<Operation<'_>, Operation<'static>>(self) }
    }
}
