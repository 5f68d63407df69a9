//! The formats in which the optimizer keeps its states, with their names in settings.

use choices::choices;

choices! {
    /// How moments are kept.
    #[derive(Default)]
    MomentFormat {
        /// 4 bytes a value.
        #[default]
        F32 = "f32",
        /// 2 bytes a value, rounded stochastically.
        Bf16 = "bf16",
        /// 1 byte a value and 4 bytes per 256 values, for the tensors that may be quantised. The others keep f32.
        Quantised = "8bit",
    }
}

choices! {
    /// How the exact values of bf16 weights are kept. f32 weights are exact themselves.
    #[derive(Default)]
    MasterFormat {
        /// An f32 copy.
        #[default]
        F32 = "f32",
        /// The 16 bits of the exact f32 that the bf16 weight does not have.
        Remainder = "bf16-split",
        /// 8 of these bits. The exact value is rounded to the 24 bits that the weight and they have together.
        RemainderByte = "bf16+8",
        /// The exact values are not kept: updated weights are rounded stochastically.
        None = "none",
    }
}

/// Tensors with fewer elements keep f32 moments when others are quantised, as in bitsandbytes. They need little memory,
/// and a short block is quantised coarsely.
pub const SMALLEST_QUANTISED: usize = 4096;
