//! The types of elements.

use safetensors::Dtype;

/// A plain number type that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its name among the types of elements.
    const DTYPE: DType;
}

macro_rules! element_types {
    ($($(#[$about:meta])* $dtype:ident = $name:literal, $rust:ty;)+) => {
        /// The type of a tensor's elements.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DType {
            $($(#[$about])* $dtype,)+
        }

        impl DType {
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
                    $(DType::$dtype => Dtype::$dtype,)+
                }
            }
        }

        impl TryFrom<Dtype> for DType {
            /// The type, where no tensor here can have it.
            type Error = Dtype;

            fn try_from(dtype: Dtype) -> Result<DType, Dtype> {
                match dtype {
                    $(Dtype::$dtype => Ok(DType::$dtype),)+
                    other => Err(other),
                }
            }
        }
    };
}

element_types! {
    /// Bytes: codes of 8-bit states.
    U8 = "u8", u8;
    /// Whole numbers from 0 on.
    U32 = "u32", u32;
    /// Remainders of weights in two halves.
    I16 = "i16", i16;
    /// Tokens.
    I32 = "i32", i32;
    /// The upper half of an f32.
    BF16 = "bf16", half::bf16;
    /// Single precision.
    F32 = "f32", f32;
    /// Double precision, of sums and oracles.
    F64 = "f64", f64;
}
