//! AdamW on a range of parameters, in every format of its states.

use super::check::{Check, Checked};
use super::contract::{Contract, Operand, changes, reads, writes};
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
}

/// One AdamW update of a range of parameters (Loshchilov and Hutter 2019).
pub struct AdamW<'a> {
    /// Weights `[n]`, f32 or bf16; written.
    pub parameters: Out<'a>,
    /// The exact weights; read and written.
    pub master: MasterOperand<'a>,
    /// First moment; read and written. Has the same format as the second.
    pub first_moment: MomentOperand<'a>,
    /// Second moment; read and written.
    pub second_moment: MomentOperand<'a>,
    /// Gradients `[n]`, f32 or bf16, before clipping.
    pub gradients: In<'a>,
    /// `[3]` f32: learning rate, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t). They are in device memory, so that a
    /// captured step can be launched again with other values.
    pub rates: In<'a>,
    /// `[2]` f32 from [`super::NormAndClip`]: the factor on gradients is the second. If it is not finite,
    /// nothing is changed.
    pub clip: In<'a>,
    /// `[2]` u32: low and high half of the step's key of random numbers ([`crate::random`]).
    pub key: In<'a>,
    /// The number of the range's first element for random numbers; a multiple of 256.
    pub first_index: u64,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay, applied before the update.
    pub weight_decay: f32,
}

impl Contract for AdamW<'_> {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn check(&self, check: &Check) -> Checked {
        let (n, weights) = (self.parameters.elements(), self.parameters.dtype());
        check.real_of_rank("parameters", &self.parameters, 1)?;
        self.master.check(check, n, weights)?;
        self.first_moment.check(check, "first_moment", n)?;
        self.second_moment.check(check, "second_moment", n)?;
        check.that(
            self.first_moment.form() == self.second_moment.form(),
            || "`first_moment` and `second_moment` are not of the same form".into(),
        )?;
        check.real("gradients", &self.gradients, &[n])?;
        check.tensor("rates", &self.rates, &[3], DType::F32)?;
        check.tensor("clip", &self.clip, &[2], DType::F32)?;
        check.tensor("key", &self.key, &[2], DType::U32)?;
        let first = self.first_index;
        check.that(first.is_multiple_of(BLOCK as u64), || {
            format!("`first_index` is {first}, expected a multiple of {BLOCK}")
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let weights = self.master.operands(&self.parameters);
        let moments = [&self.first_moment, &self.second_moment].map(MomentOperand::operands);
        let states = weights.into_iter().chain(moments.into_iter().flatten());
        states.chain([reads(self.gradients)]).collect()
    }

    fn runs_beside(&self) -> bool {
        true
    }
}

impl MomentOperand<'_> {
    pub(super) fn check(&self, check: &Check, name: &str, n: usize) -> Checked {
        match self {
            MomentOperand::Plain(moment) => check.real(name, moment, &[n]),
            MomentOperand::Quantised { codes, absmax } => {
                let blocks = n.div_ceil(BLOCK);
                check.tensor(&format!("{name}.codes"), codes, &[n], DType::U8)?;
                check.tensor(&format!("{name}.absmax"), absmax, &[blocks], DType::F32)
            }
        }
    }

    /// The type of its elements, which tells its format.
    fn form(&self) -> DType {
        match self {
            MomentOperand::Plain(moment) => moment.dtype(),
            MomentOperand::Quantised { codes, .. } => codes.dtype(),
        }
    }

    pub(super) fn operands(&self) -> Vec<Operand<'_>> {
        match self {
            MomentOperand::Plain(values) => vec![changes(values)],
            MomentOperand::Quantised { codes, absmax } => vec![changes(codes), changes(absmax)],
        }
    }
}

impl MasterOperand<'_> {
    /// The operands of the master, and of its parameters.
    pub(super) fn operands<'b>(&'b self, parameters: &'b Out) -> Vec<Operand<'b>> {
        match self {
            MasterOperand::Parameters => vec![changes(parameters)],
            MasterOperand::F32(master) => vec![writes(parameters), changes(master)],
            MasterOperand::Remainder(remainder) => vec![changes(parameters), changes(remainder)],
        }
    }

    pub(super) fn check(&self, check: &Check, n: usize, weights: DType) -> Checked {
        match self {
            MasterOperand::Parameters => return Ok(()),
            MasterOperand::F32(master) => check.tensor("master", master, &[n], DType::F32)?,
            MasterOperand::Remainder(remainder) => {
                check.tensor("remainder", remainder, &[n], DType::I16)?;
            }
        }
        check.that(weights == DType::BF16, || {
            "f32 weights are their own master".into()
        })
    }
}
