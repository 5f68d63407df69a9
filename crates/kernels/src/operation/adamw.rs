//! AdamW on a range of parameters, in every format of its states.

use super::check::{Check, Checked};
use super::contract::Contract;
use super::declaration::{Field, Visit, operation};
use super::operand::{OperandAccess, OperandRule};
use crate::quantise::BLOCK;
use memory::{DType, In, Out};

/// A moment of a range of `n` parameters.
pub enum MomentOperand<'a> {
    /// `[n]`, f32, or bf16 with stochastic rounding. Rounded to nearest, a slowly moving average would stand still.
    Plain(Out<'a>),
    /// 8 bits a value, in blocks of [`crate::quantise::BLOCK`] that start at the range's first element.
    Quantised {
        /// `[n]` u8: codes of the signed map in a first moment, of the unsigned one in a second.
        codes: Out<'a>,
        /// `[ceil(n / BLOCK)]` f32.
        absmax: Out<'a>,
    },
}

/// Where the exact weights are, if the parameters are a copy in the compute type.
pub enum MasterOperand<'a> {
    /// The parameters themselves: f32, or bf16 that are rounded stochastically after each update.
    Parameters,
    /// `[n]` f32, beside bf16 parameters, which are its [`crate::split::split`].
    F32(Out<'a>),
    /// `[n]` i16: the bits that bf16 parameters lack ([`crate::split::join`]). With them they are an exact f32 master
    /// in 2 more bytes.
    Remainder(Out<'a>),
    /// `[n]` u8: the bits that bf16 parameters lack of a master that is rounded to 24 bits
    /// ([`crate::split::join_24_bits`]).
    RemainderByte(Out<'a>),
}

operation! {
    /// One AdamW update of a range of parameters (Loshchilov and Hutter 2019).
    AdamW "adamw": parameters [n] {
        /// The weights; written.
        parameters: Out<'a> [n] real used(master.access()),
        /// The exact weights; read and written.
        master: MasterOperand<'a> [n] f32 changes,
        /// First moment; read and written. Has the same format as the second.
        first_moment: MomentOperand<'a> [n] real changes,
        /// Second moment; read and written.
        second_moment: MomentOperand<'a> [n] real changes,
        /// Before clipping.
        gradients: In<'a> [n] real,
        /// Learning rate, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t). They are in device memory, so that a
        /// captured step can be launched again with other values.
        rates: In<'a> [3] f32 uncounted,
        /// From [`super::NormAndClip`]: the factor on gradients is the second. If it is not finite,
        /// nothing is changed.
        clip: In<'a> [2] f32 uncounted,
        /// Low and high half of the step's key of random numbers ([`crate::random`]).
        key: In<'a> [2] u32 uncounted,
        /// The number of the range's first element for random numbers; a multiple of 256.
        first_index: u64,
        /// Decay of the first moment.
        beta1: f32,
        /// Decay of the second moment.
        beta2: f32,
        /// Added to the root of the second moment.
        eps: f32,
        /// Decoupled weight decay, applied before the update.
        weight_decay: f32,
    }
}

impl Contract for AdamW<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        self.master.check(check, self.parameters.dtype())?;
        check.that(
            self.first_moment.form() == self.second_moment.form(),
            || "`first_moment` and `second_moment` are not of the same form".into(),
        )?;
        check.first("first_index", self.first_index)
    }

    fn runs_beside(&self) -> bool {
        true
    }
}

impl MomentOperand<'_> {
    /// The type of its elements, which tells its format.
    fn form(&self) -> DType {
        match self {
            MomentOperand::Plain(moment) => moment.dtype(),
            MomentOperand::Quantised { codes, .. } => codes.dtype(),
        }
    }
}

impl Field for MomentOperand<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        match self {
            MomentOperand::Plain(moment) => moment.visit(rule, visit),
            MomentOperand::Quantised { codes, absmax } => {
                let blocks = codes.elements().div_ceil(BLOCK);
                codes.visit(rule.part(".codes").u8(), &mut *visit)?;
                absmax.visit(rule.part(".absmax").shaped([blocks]).f32(), visit)
            }
        }
    }
}

impl MasterOperand<'_> {
    /// How an update uses the parameters beside it.
    pub(super) fn access(&self) -> OperandAccess {
        match self {
            MasterOperand::F32(_) => OperandAccess::Written,
            MasterOperand::Parameters
            | MasterOperand::Remainder(_)
            | MasterOperand::RemainderByte(_) => OperandAccess::Changed,
        }
    }

    /// Refuses a master of other weights than bf16.
    pub(super) fn check(&self, check: &Check, weights: DType) -> Checked {
        let is_needed = weights == DType::BF16 || matches!(self, MasterOperand::Parameters);
        check.that(is_needed, || "f32 weights are their own master".into())
    }
}

impl Field for MasterOperand<'_> {
    fn visit<'b>(&'b self, rule: OperandRule, visit: Visit<'_, 'b>) -> Checked {
        match self {
            MasterOperand::Parameters => Ok(()),
            MasterOperand::F32(master) => master.visit(rule, visit),
            MasterOperand::Remainder(rest) => rest.visit(rule.named("remainder").i16(), visit),
            MasterOperand::RemainderByte(rest) => rest.visit(rule.named("remainder").u8(), visit),
        }
    }
}
