//! Calls generic functions for the element type of a view.

/// Calls a function generic over the element type with the type that a view holds.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match $dtype {
            ::memory::DType::F32 => $function::<f32>($($argument),*),
            ::memory::DType::BF16 => $function::<::half::bf16>($($argument),*),
            other => unreachable!("the check before admits only f32 and bf16, not {other:?}"),
        }
    };
}

/// Calls a function generic over two element types.
macro_rules! by_dtypes {
    ($first:expr, $second:expr, $function:ident($($argument:expr),* $(,)?)) => {
        match ($first, $second) {
            (::memory::DType::F32, ::memory::DType::F32) => $function::<f32, f32>($($argument),*),
            (::memory::DType::F32, _) => $function::<f32, ::half::bf16>($($argument),*),
            (_, ::memory::DType::F32) => $function::<::half::bf16, f32>($($argument),*),
            (_, _) => $function::<::half::bf16, ::half::bf16>($($argument),*),
        }
    };
}

pub(super) use {by_dtype, by_dtypes};
