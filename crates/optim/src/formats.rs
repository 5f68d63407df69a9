//! The forms in which the optimizer keeps its states; names are those of settings.

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
        /// 1 byte a value and 4 for each 256, in the part of the layout that may be quantised; f32 elsewhere.
        Quantised = "8bit",
    }
}

choices! {
    /// How the exact weights behind bf16 weights are kept. f32 weights are their own master.
    #[derive(Default)]
    MasterFormat {
        /// An f32 copy.
        #[default]
        F32 = "f32",
        /// The 16 bits that the bf16 weight leaves out of an exact f32.
        Remainder = "bf16-split",
        /// Not at all: updated weights are rounded stochastically.
        None = "none",
    }
}

/// Tensors with fewer elements keep f32 moments where others are quantised, as in bitsandbytes: they cost little, and a
/// block that ends early is coarse.
pub const SMALLEST_QUANTISED: usize = 4096;
