//! The types of elements.

use safetensors::Dtype;

/// A plain number type that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its [`DType`].
    const DTYPE: DType;
}

macro_rules! element_types {
    ($($(#[$about:meta])* $dtype:ident = $name:literal, $rust:ty, $stored:ident;)+) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DType {
            $($(#[$about])* $dtype,)+
        }

        impl DType {
            /// Whether its elements are codes of FP8.
            pub const fn is_fp8(self) -> bool {
                matches!(self, DType::F8E4M3 | DType::F8E5M2)
            }

            /// Its name in plans and files, such as `bf16`.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(DType::$dtype => $name,)+
                }
            }

            /// Bytes of an element.
            pub const fn size_in_bytes(self) -> usize {
                match self {
                    $(DType::$dtype => size_of::<$rust>(),)+
                }
            }
        }

        $(impl Element for $rust {
            const DTYPE: DType = DType::$dtype;
        })+

        impl From<DType> for Dtype {
            fn from(dtype: DType) -> Dtype {
                match dtype {
                    $(DType::$dtype => Dtype::$stored,)+
                }
            }
        }

        impl TryFrom<Dtype> for DType {
            /// The type of a safetensors file, if no tensor here can have it.
            type Error = Dtype;

            fn try_from(dtype: Dtype) -> Result<DType, Dtype> {
                match dtype {
                    $(Dtype::$stored => Ok(DType::$dtype),)+
                    other => Err(other),
                }
            }
        }
    };
}

/// A code of eight bits: sign, four bits of exponent, three of fraction; no infinity (e4m3fn).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// A code of eight bits: sign, five bits of exponent, two of fraction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct E5m2(pub u8);

// SAFETY: each is a byte, of which every value is a code, and zero is one.
unsafe impl bytemuck::Zeroable for E4m3 {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for E4m3 {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for E5m2 {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for E5m2 {}

element_types! {
    /// Bytes, such as the codes of 8-bit states.
    U8 = "u8", u8, U8;
    /// FP8 with four bits of exponent: codes of values to be multiplied, beside a scale.
    F8E4M3 = "f8_e4m3", E4m3, F8_E4M3;
    /// FP8 with five bits of exponent, for gradients.
    F8E5M2 = "f8_e5m2", E5m2, F8_E5M2;
    /// Unsigned integers.
    U32 = "u32", u32, U32;
    /// Remainders of weights: the lower halves of split f32 values.
    I16 = "i16", i16, I16;
    /// Token ids.
    I32 = "i32", i32, I32;
    /// The upper half of an f32.
    BF16 = "bf16", half::bf16, BF16;
    /// Single precision.
    F32 = "f32", f32, F32;
    /// Double precision, for sums and for reference results in tests.
    F64 = "f64", f64, F64;
}
