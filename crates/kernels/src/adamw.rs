//! What AdamW reads and writes, in each of the forms that its states can have.

use memory::{In, Out};

/// A moment of a range of `n` parameters.
pub enum Moment<'a> {
    /// `[n]`, f32, or bf16 with stochastic rounding: a slowly moving average would stand still if it were rounded to
    /// the nearest.
    Plain(Out<'a>),
    /// 8 bits a value, in blocks of [`crate::quantise::BLOCK`] that start at the range's first element.
    Quantised {
        /// `[n]` u8: codes of the signed map in a first moment, of the unsigned one in a second.
        codes: Out<'a>,
        /// `[ceil(n / BLOCK)]` f32.
        absmax: Out<'a>,
    },
}

/// Where the exact weights are of which the parameters are the compute type's copy.
pub enum Master<'a> {
    /// The parameters themselves: f32, or bf16 that are rounded stochastically after each update.
    Parameters,
    /// `[n]` f32, beside bf16 parameters, which are its [`crate::split::split`].
    F32(Out<'a>),
    /// `[n]` i16, what bf16 parameters leave out ([`crate::split::join`]): an exact f32 master in 2 bytes.
    Remainder(Out<'a>),
}

/// One range of parameters, with everything that AdamW reads and writes of it.
pub struct AdamW<'a> {
    /// Weights `[n]`, f32 or bf16; written.
    pub parameters: Out<'a>,
    /// The exact weights; read and written.
    pub master: Master<'a>,
    /// First moment; read and written. Of the same form as the second.
    pub first_moment: Moment<'a>,
    /// Second moment; read and written.
    pub second_moment: Moment<'a>,
    /// Gradients `[n]`, f32 or bf16, before clipping.
    pub gradients: In<'a>,
    /// `[3]` f32: learning rate, 1 / (1 - beta1^t), 1 / sqrt(1 - beta2^t). In device memory, so that a captured
    /// step can be launched again with other values.
    pub rates: In<'a>,
    /// `[2]` f32 from [`crate::Kernels::norm_and_clip`]: the factor on gradients is the second. If it is not finite,
    /// nothing is changed.
    pub clip: In<'a>,
    /// `[2]` u32: low and high half of the step's key of random numbers ([`crate::random`]).
    pub key: In<'a>,
    /// What the range's first element counts as in random numbers; a multiple of 256.
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
