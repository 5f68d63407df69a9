//! The operations as values: what each of them reads and writes, by name.
//!
//! A method of [`Kernels`](crate::Kernels) makes its operation of its arguments. From there on the operation is one
//! value, which is checked, carried out, counted, or kept for later.
#![expect(
    missing_docs,
    reason = "fields are the arguments of the method that each operation names"
)]

use crate::{AdamW, AttentionShape, FlashOptions, Init};
use memory::{In, Out};

/// Defines [`Operation`] from the structs below and the names of their methods.
macro_rules! operations {
    ($($operation:ident: $method:literal,)*) => {
        /// An operation with everything that it reads and writes.
        pub enum Operation<'a> {
            $($operation($operation<'a>),)*
        }

        impl Operation<'_> {
            /// The name of its method.
            pub fn name(&self) -> &'static str {
                match self {
                    $(Operation::$operation(_) => $method,)*
                }
            }
        }

        $(impl<'a> From<$operation<'a>> for Operation<'a> {
            fn from(operation: $operation<'a>) -> Operation<'a> {
                Operation::$operation(operation)
            }
        })*
    };
}

operations! {
    Fill: "fill",
    Copy: "copy",
    Matmul: "matmul",
    AddBias: "add_bias",
    BiasBackward: "bias_backward",
    Embedding: "embedding",
    EmbeddingBackward: "embedding_backward",
    RmsNorm: "rms_norm",
    RmsNormBackward: "rms_norm_backward",
    Rotary: "rotary",
    Attention: "attention",
    AttentionBackward: "attention_backward",
    FlashAttention: "flash_attention",
    FlashAttentionBackward: "flash_attention_backward",
    Swiglu: "swiglu",
    SwigluBackward: "swiglu_backward",
    CrossEntropy: "cross_entropy",
    Sum: "sum",
    NormAndClip: "norm_and_clip",
    AdamW: "adamw",
}

impl Operation<'_> {
    /// The operation without the lifetime of what it views, for work that goes on after the call that asked for it.
    ///
    /// # Safety
    /// What the operation reads and writes stays alive until it is carried out or dropped, nothing else touches what it
    /// writes meanwhile, and nothing writes what it reads.
    pub unsafe fn outliving(self) -> Operation<'static> {
        // SAFETY: nothing but the lifetime changes, by the caller's promise.
        unsafe { std::mem::transmute::<Operation<'_>, Operation<'static>>(self) }
    }
}

/// [`Kernels::fill`](crate::Kernels::fill).
pub struct Fill<'a> {
    pub out: Out<'a>,
    pub value: f32,
}

/// [`Kernels::copy`](crate::Kernels::copy).
pub struct Copy<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
}

/// [`Kernels::matmul`](crate::Kernels::matmul).
pub struct Matmul<'a> {
    pub out: Out<'a>,
    pub a: In<'a>,
    pub b: In<'a>,
    pub init: Init<'a>,
}

/// [`Kernels::add_bias`](crate::Kernels::add_bias).
pub struct AddBias<'a> {
    pub out: Out<'a>,
    pub bias: In<'a>,
}

/// [`Kernels::bias_backward`](crate::Kernels::bias_backward).
pub struct BiasBackward<'a> {
    pub out: Out<'a>,
    pub dy: In<'a>,
    pub init: Init<'a>,
}

/// [`Kernels::embedding`](crate::Kernels::embedding).
pub struct Embedding<'a> {
    pub out: Out<'a>,
    pub table: In<'a>,
    pub ids: In<'a>,
}

/// [`Kernels::embedding_backward`](crate::Kernels::embedding_backward).
pub struct EmbeddingBackward<'a> {
    pub dtable: Out<'a>,
    pub dout: In<'a>,
    pub ids: In<'a>,
    pub init: Init<'a>,
}

/// [`Kernels::rms_norm`](crate::Kernels::rms_norm).
pub struct RmsNorm<'a> {
    pub y: Option<Out<'a>>,
    pub rstd: Option<Out<'a>>,
    pub x: In<'a>,
    pub weight: In<'a>,
    pub eps: f32,
}

/// [`Kernels::rms_norm_backward`](crate::Kernels::rms_norm_backward).
pub struct RmsNormBackward<'a> {
    pub dx: Out<'a>,
    pub dx_init: Init<'a>,
    pub dweight: Out<'a>,
    pub dweight_init: Init<'a>,
    pub dy: In<'a>,
    pub x: In<'a>,
    pub weight: In<'a>,
    pub rstd: In<'a>,
}

/// [`Kernels::rotary`](crate::Kernels::rotary).
pub struct Rotary<'a> {
    pub x: Out<'a>,
    pub table: In<'a>,
    pub inverse: bool,
}

/// [`Kernels::attention`](crate::Kernels::attention).
pub struct Attention<'a> {
    pub out: Option<Out<'a>>,
    pub probs: Option<Out<'a>>,
    pub scratch: Out<'a>,
    pub q: In<'a>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub shape: AttentionShape,
}

/// [`Kernels::attention_backward`](crate::Kernels::attention_backward).
pub struct AttentionBackward<'a> {
    pub dq: Out<'a>,
    pub dk: Out<'a>,
    pub dv: Out<'a>,
    pub scratch: Out<'a>,
    pub dout: In<'a>,
    pub probs: In<'a>,
    pub q: In<'a>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub shape: AttentionShape,
}

/// [`Kernels::flash_attention`](crate::Kernels::flash_attention).
pub struct FlashAttention<'a> {
    pub out: Option<Out<'a>>,
    pub lse: Option<Out<'a>>,
    pub scratch: Out<'a>,
    pub q: In<'a>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub shape: AttentionShape,
    pub options: FlashOptions<'a>,
}

/// [`Kernels::flash_attention_backward`](crate::Kernels::flash_attention_backward).
pub struct FlashAttentionBackward<'a> {
    pub dq: Out<'a>,
    pub dk: Out<'a>,
    pub dv: Out<'a>,
    pub scratch: Out<'a>,
    pub dout: In<'a>,
    pub out: In<'a>,
    pub lse: In<'a>,
    pub q: In<'a>,
    pub k: In<'a>,
    pub v: In<'a>,
    pub shape: AttentionShape,
    pub options: FlashOptions<'a>,
}

/// [`Kernels::swiglu`](crate::Kernels::swiglu).
pub struct Swiglu<'a> {
    pub act: Out<'a>,
    pub gate: In<'a>,
    pub up: In<'a>,
}

/// [`Kernels::swiglu_backward`](crate::Kernels::swiglu_backward).
pub struct SwigluBackward<'a> {
    pub gate: Out<'a>,
    pub up: Out<'a>,
    pub dact: In<'a>,
}

/// [`Kernels::cross_entropy`](crate::Kernels::cross_entropy).
pub struct CrossEntropy<'a> {
    pub losses: Out<'a>,
    pub logits: Out<'a>,
    pub targets: In<'a>,
    pub scale: f32,
}

/// [`Kernels::sum`](crate::Kernels::sum).
pub struct Sum<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
    pub init: Init<'a>,
}

/// [`Kernels::norm_and_clip`](crate::Kernels::norm_and_clip).
pub struct NormAndClip<'a> {
    pub out: Out<'a>,
    pub parts: Out<'a>,
    pub x: In<'a>,
    pub loss: In<'a>,
    pub max_norm: Option<f32>,
}
