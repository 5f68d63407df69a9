//! The closed sets of values: one enum each, named as in a configuration.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Defines an enum whose variants are read and written under the given names.
macro_rules! choices {
    (
        $(#[$attribute:meta])*
        $set:ident { $($(#[$variant_attribute:meta])* $variant:ident = $name:literal,)+ }
    ) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $set {
            $($(#[$variant_attribute])* #[serde(rename = $name)] $variant,)+
        }

        impl $set {
            /// The names of all values, as a configuration spells them.
            pub const NAMES: &'static [&'static str] = &[$($name),+];

            /// The name of this value, as a configuration spells it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }

        impl fmt::Display for $set {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

choices! {
    /// Data type of weights and activations.
    Dtype {
        /// 32-bit floating point.
        F32 = "f32",
        /// 16-bit floating point with the range of f32.
        Bf16 = "bf16",
    }
}

choices! {
    /// How the data file is read.
    #[derive(Default)]
    DataFormat {
        /// By the file's ending: .safetensors, .bin, else text.
        #[default]
        Auto = "auto",
        /// A safetensors file with `input_ids` and `targets`.
        Batches = "batches",
        /// llm.c's token file, with its header.
        LlmC = "llmc",
        /// 16-bit tokens without a header (nanoGPT).
        U16 = "u16",
        /// Bytes of text, a vocabulary of 256.
        Text = "text",
    }
}

choices! {
    /// How the learning rate moves after the warmup.
    #[derive(Default)]
    Schedule {
        /// It stays at its peak.
        #[default]
        Constant = "constant",
        /// It falls along a straight line.
        Linear = "linear",
        /// It falls along half a cosine wave.
        Cosine = "cosine",
        /// It stays at its peak and falls at the end (warmup, stable, decay).
        Wsd = "wsd",
    }
}

choices! {
    /// Data type of AdamW's moments.
    #[derive(Default)]
    StateDtype {
        /// 32-bit floating point.
        #[default]
        F32 = "f32",
        /// 16-bit floating point with the range of f32.
        Bf16 = "bf16",
        /// Eight bits, quantised in blocks.
        EightBit = "8bit",
    }
}

choices! {
    /// What is kept of bf16 weights beyond their 16 bits.
    #[derive(Default)]
    Master {
        /// A copy in f32.
        #[default]
        F32 = "f32",
        /// The lower 16 bits of an exact f32 copy.
        Bf16Split = "bf16-split",
        /// Nothing; updates are rounded stochastically.
        None = "none",
    }
}

choices! {
    /// Data type in which gradients are accumulated.
    #[derive(Default)]
    GradDtype {
        /// 32-bit floating point.
        #[default]
        F32 = "f32",
        /// 16-bit floating point with the range of f32.
        Bf16 = "bf16",
    }
}

choices! {
    /// The implementation of attention.
    #[derive(Default)]
    AttentionBackend {
        /// The best that the device and the shape allow.
        #[default]
        Auto = "auto",
        /// Scores and probabilities are stored.
        Eager = "eager",
        /// Scores are never stored.
        Flash = "flash",
        /// cuDNN's, where it is built.
        Cudnn = "cudnn",
    }
}

choices! {
    /// When offloaded optimizer state is updated.
    #[derive(Default)]
    OffloadWindow {
        /// During the next forward pass, each layer before it is needed.
        #[default]
        Forward = "forward",
        /// At the end of the step.
        End = "end",
    }
}

choices! {
    /// Where the optimizer's state lives.
    #[derive(Default)]
    OptimizerPlace {
        /// On the device.
        #[default]
        None = "none",
        /// In pinned host memory.
        Pinned = "pinned",
    }
}
