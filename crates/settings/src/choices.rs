//! Types of values that only settings use. Other types are defined where they are used.

use choices::choices;
use memory::DType;
use model::Attention;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

choices! {
    /// A type for computing, or for accumulating gradients.
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
    /// The type of a frozen model.
    BaseType {
        /// 16 bits.
        Bf16 = "bf16",
        /// 8 bits, by blocks.
        EightBit = "8bit",
        /// 4 bits, by blocks (Dettmers et al. 2023).
        Nf4 = "nf4",
        /// 4 bits, by blocks with powers of two, of experts alone.
        Mxfp4 = "mxfp4",
    }
}

choices! {
    /// How blocks multiply in eight bits.
    Fp8Recipe {
        /// They do not.
        Off = "off",
        /// One scale for a tensor.
        Tensor = "tensor",
        /// One scale for a row.
        Rowwise = "rowwise",
        /// One scale for a block of a row or of a matrix.
        Block = "block",
    }
}

choices! {
    /// The format of gradients in products of eight bits.
    Fp8Gradients {
        /// Five bits of exponent.
        E5m2 = "e5m2",
        /// Four bits of exponent.
        E4m3 = "e4m3",
    }
}

choices! {
    /// How long the codes of weights are kept.
    Fp8Weights {
        /// While they are used: each use makes them.
        Use = "use",
        /// For the whole step.
        Step = "step",
    }
}

choices! {
    /// What training minimises.
    Objective {
        /// The loss of next tokens.
        NextToken = "next-token",
        /// That of preferences between two sequences (Rafailov et al. 2023).
        Dpo = "dpo",
        /// A policy, by its gradient, in steps that a program makes.
        Policy = "policy",
    }
}

choices! {
    /// How the loss of a pair follows from the margin of its rewards.
    DpoLoss {
        /// Minus the logarithm of its sigmoid.
        Sigmoid = "sigmoid",
    }
}

choices! {
    /// The implementation of attention.
    AttentionBackend {
        /// Flash for packed documents and from 256 tokens on, else eager.
        Auto = "auto",
        /// Stores scores and probabilities.
        Eager = "eager",
        /// Never stores scores.
        Flash = "flash",
    }
}

impl From<Attention> for AttentionBackend {
    fn from(attention: Attention) -> AttentionBackend {
        match attention {
            Attention::Eager => AttentionBackend::Eager,
            Attention::Flash => AttentionBackend::Flash,
        }
    }
}

choices! {
    /// Which of the kernels for CUDA compute an operation that has several kinds.
    KernelChoice {
        /// Those for 9.0 on a GPU of this compute capability, else those for 8.0.
        Auto = "auto",
        /// Those for compute capability 8.0 and later.
        Sm80 = "sm80",
        /// Those for compute capability 9.0 alone.
        Sm90 = "sm90",
    }
}

choices! {
    /// Whether a device launches the calls of a step's later micro-batches together.
    Graphs {
        /// If possible.
        Auto = "auto",
        /// Never.
        Off = "off",
    }
}

choices! {
    /// The home of weights or gradients.
    HostPlace {
        /// On the device.
        None = "none",
        /// In pinned host memory.
        Pinned = "pinned",
    }
}

choices! {
    /// When a unit's gradient is released.
    Release {
        /// At the end of the step.
        Step = "step",
        /// As soon as it is complete: the unit is updated in the backward pass.
        Backward = "backward",
    }
}

choices! {
    /// The library that moves bytes between ranks.
    RankEngine {
        /// NCCL between GPUs, MPI between CPU devices.
        Auto = "auto",
        /// An MPI library.
        Mpi = "mpi",
        /// NVIDIA's NCCL.
        Nccl = "nccl",
        /// None: the process is alone, even if a launcher started it.
        Alone = "alone",
    }
}

/// The home of optimizer states in `offload.optimizer`: a name, or else a folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum OptimizerPlace {
    /// On the device, unless `offload.path` names a folder.
    None,
    /// In pinned host memory.
    Pinned,
    /// In the folder that `offload.path` names.
    Disk,
    /// In this folder.
    Folder(PathBuf),
}

impl OptimizerPlace {
    /// The values that are not folders.
    pub const NAMES: &'static [&'static str] = &["none", "pinned", "disk"];
}

impl From<String> for OptimizerPlace {
    fn from(text: String) -> OptimizerPlace {
        match &text[..] {
            "none" => OptimizerPlace::None,
            "pinned" => OptimizerPlace::Pinned,
            "disk" => OptimizerPlace::Disk,
            _ => OptimizerPlace::Folder(text.into()),
        }
    }
}

impl From<OptimizerPlace> for String {
    fn from(place: OptimizerPlace) -> String {
        match place {
            OptimizerPlace::None => "none".into(),
            OptimizerPlace::Pinned => "pinned".into(),
            OptimizerPlace::Disk => "disk".into(),
            // It was read from a text, so nothing is lost.
            OptimizerPlace::Folder(folder) => folder.to_string_lossy().into_owned(),
        }
    }
}

/// Asks for an automatic choice in [`crate::RecomputeConfig::spec`], [`crate::OffloadConfig::activations`] or a number.
pub(crate) const AUTO: &str = "auto";

/// A number, or `auto` for a number that is chosen where it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AutoOr<T> {
    /// Chosen automatically.
    #[serde(with = "auto")]
    Auto,
    /// This number.
    Number(T),
}

impl<T> AutoOr<T> {
    /// The number, or `default` for `auto`.
    pub fn or(self, default: T) -> T {
        match self {
            AutoOr::Auto => default,
            AutoOr::Number(number) => number,
        }
    }
}

/// The word `auto` in a file.
mod auto {
    use super::AUTO;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(AUTO)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<(), D::Error> {
        match &String::deserialize(deserializer)?[..] {
            AUTO => Ok(()),
            other => Err(D::Error::custom(format!("`{other}` is not {AUTO}"))),
        }
    }
}
