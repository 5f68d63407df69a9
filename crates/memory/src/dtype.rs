//! The types of elements.

use safetensors::Dtype;

/// A plain number type that a tensor can hold.
pub trait Element: bytemuck::Pod + Send + Sync {
    /// Its [`DType`].
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
            /// The type of a safetensors file, if no tensor here can have it.
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
    /// Bytes, such as the codes of 8-bit states.
    U8 = "u8", u8;
    /// Unsigned integers.
    U32 = "u32", u32;
    /// Remainders of weights: the lower halves of split f32 values.
    I16 = "i16", i16;
    /// Token ids.
    I32 = "i32", i32;
    /// The upper half of an f32.
    BF16 = "bf16", half::bf16;
    /// Single precision.
    F32 = "f32", f32;
    /// Double precision, for sums and for reference results in tests.
    F64 = "f64", f64;
}
