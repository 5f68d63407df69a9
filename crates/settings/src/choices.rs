//! The closed sets of values that belong to settings alone; others stand with what they choose.

use choices::choices;
use memory::DType;
use model::Attention;

choices! {
    /// A type that is computed in, or in which gradients are accumulated.
    FloatType {
        /// 32-bit floating point.
        F32 = "f32",
        /// 16-bit floating point with the range of f32.
        Bf16 = "bf16",
    }
}

impl From<FloatType> for DType {
    fn from(float: FloatType) -> DType {
        match float {
            FloatType::F32 => DType::F32,
            FloatType::Bf16 => DType::BF16,
        }
    }
}

choices! {
    /// The implementation of attention.
    AttentionBackend {
        /// The best that the device and the shape allow.
        Auto = "auto",
        /// Scores and probabilities are stored.
        Eager = "eager",
        /// Scores are never stored.
        Flash = "flash",
        /// Never stored either, by cuDNN.
        Cudnn = "cudnn",
    }
}

impl From<Attention> for AttentionBackend {
    fn from(attention: Attention) -> AttentionBackend {
        match attention {
            Attention::Eager => AttentionBackend::Eager,
            Attention::Flash => AttentionBackend::Flash,
            Attention::Cudnn => AttentionBackend::Cudnn,
        }
    }
}

choices! {
    /// Whether micro-batches after the first of a step are asked for at once, where a device can.
    Graphs {
        /// Where it can be.
        Auto = "auto",
        /// Never.
        Off = "off",
    }
}

choices! {
    /// Where weights or gradients are to live.
    HostPlace {
        /// On the device.
        None = "none",
        /// In pinned host memory.
        Pinned = "pinned",
    }
}

choices! {
    /// When a unit's gradient has served its purpose.
    Release {
        /// At the end of the step.
        Step = "step",
        /// As soon as it is there: the unit is updated in the backward pass.
        Backward = "backward",
    }
}
