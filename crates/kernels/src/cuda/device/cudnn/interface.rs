//! The functions and constants of cuDNN's backend interface that are used here, under their names in `cudnn_graph.h`.
//!
//! These are ours because cuDNN is loaded in every build, and only when it is asked for. cudarc would link it in a build with
//! candle's kernels, and such a program would not start where there is no cuDNN.

use crate::cuda::device::loading::CUDNN;
use cudarc::driver::sys::CUstream;
use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

/// The library's state for a device (`cudnnHandle_t`).
pub(super) type CudnnHandle = *mut CudnnContext;

/// The opaque type behind [`CudnnHandle`].
pub(super) enum CudnnContext {}

/// A descriptor (`cudnnBackendDescriptor_t`).
pub(super) type Raw = *mut c_void;

macro_rules! functions {
    ($($name:ident ($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        $(
            /// cuDNN's function of this name.
            ///
            /// # Safety
            /// As NVIDIA documents it.
            ///
            /// # Panics
            /// If cuDNN was not found. Call `CudnnVersion::look_up` first.
            #[allow(non_snake_case, reason = "NVIDIA's name")]
            pub(super) unsafe fn $name($($argument: $type),*) -> $result {
                static FOUND: OnceLock<unsafe extern "C" fn($($type),*) -> $result> = OnceLock::new();
                let function = FOUND.get_or_init(|| {
                    // SAFETY: the function has this type in every version from 9.0 on.
                    let found = unsafe { CUDNN.function(concat!(stringify!($name), "\0")) };
                    found.expect("cuDNN was found, and has all functions of its interface")
                });
                // SAFETY: the caller's promise.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

functions! {
    cudnnGetVersion() -> usize;
    cudnnGetCudartVersion() -> usize;
    cudnnGetErrorString(status: Status) -> *const c_char;
    cudnnGetLastErrorString(text: *mut c_char, bytes: usize) -> ();
    cudnnCreate(handle: *mut CudnnHandle) -> Status;
    cudnnDestroy(handle: CudnnHandle) -> Status;
    cudnnSetStream(handle: CudnnHandle, stream: CUstream) -> Status;
    cudnnBackendCreateDescriptor(kind: Kind, descriptor: *mut Raw) -> Status;
    cudnnBackendDestroyDescriptor(descriptor: Raw) -> Status;
    cudnnBackendFinalize(descriptor: Raw) -> Status;
    cudnnBackendSetAttribute(descriptor: Raw, name: Name, of: Type, count: i64, values: *const c_void) -> Status;
    cudnnBackendGetAttribute(descriptor: Raw, name: Name, of: Type, room: i64, count: *mut i64, values: *mut c_void) -> Status;
    cudnnBackendExecute(handle: CudnnHandle, plan: Raw, pack: Raw) -> Status;
}

/// Makes a type for each kind of number, with names for the values used here. cuDNN may return others.
macro_rules! numbers {
    ($($(#[$doc:meta])* $type:ident { $($name:ident = $number:literal,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, PartialEq, Eq)]
            #[repr(transparent)]
            pub(super) struct $type(c_int);

            impl $type {
                $(pub(super) const $name: $type = $type($number);)*
            }

            impl std::fmt::Debug for $type {
                fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                    match self.0 {
                        $($number => f.write_str(stringify!($name)),)*
                        other => write!(f, "{} {other}", stringify!($type)),
                    }
                }
            }
        )*
    };
}

numbers! {
    /// Result of a call (`cudnnStatus_t`).
    Status {
        CUDNN_STATUS_SUCCESS = 0,
        CUDNN_STATUS_NOT_SUPPORTED = 3000,
    }
    /// Kind of a descriptor (`cudnnBackendDescriptorType_t`).
    Kind {
        CUDNN_BACKEND_POINTWISE_DESCRIPTOR = 0,
        CUDNN_BACKEND_ENGINE_DESCRIPTOR = 2,
        CUDNN_BACKEND_ENGINECFG_DESCRIPTOR = 3,
        CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR = 4,
        CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR = 5,
        CUDNN_BACKEND_KNOB_CHOICE_DESCRIPTOR = 7,
        CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR = 13,
        CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR = 15,
        CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR = 16,
        CUDNN_BACKEND_TENSOR_DESCRIPTOR = 17,
        CUDNN_BACKEND_MATMUL_DESCRIPTOR = 18,
        CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR = 19,
        CUDNN_BACKEND_REDUCTION_DESCRIPTOR = 21,
        CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR = 22,
        CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR = 31,
        CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR = 38,
        CUDNN_BACKEND_OPERATION_SDPA_FWD_DESCRIPTOR = 41,
        CUDNN_BACKEND_OPERATION_DIAGONAL_BAND_MASK_DESCRIPTOR = 44,
        CUDNN_BACKEND_OPERATION_SOFTMAX_DESCRIPTOR = 45,
    }
    /// Name of an attribute (`cudnnBackendAttributeName_t`).
    Name {
        CUDNN_ATTR_POINTWISE_MODE = 0,
        CUDNN_ATTR_POINTWISE_MATH_PREC = 1,
        CUDNN_ATTR_POINTWISE_AXIS = 9,
        CUDNN_ATTR_ENGINEHEUR_MODE = 200,
        CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH = 201,
        CUDNN_ATTR_ENGINEHEUR_RESULTS = 202,
        CUDNN_ATTR_ENGINEHEUR_DEVICEPROP = 204,
        CUDNN_ATTR_ENGINECFG_ENGINE = 300,
        CUDNN_ATTR_ENGINECFG_KNOB_CHOICES = 302,
        CUDNN_ATTR_EXECUTION_PLAN_HANDLE = 400,
        CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG = 401,
        CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE = 402,
        CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION = 405,
        CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP = 407,
        CUDNN_ATTR_KNOB_CHOICE_KNOB_TYPE = 600,
        CUDNN_ATTR_KNOB_CHOICE_KNOB_VALUE = 601,
        CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR = 750,
        CUDNN_ATTR_OPERATION_POINTWISE_XDESC = 751,
        CUDNN_ATTR_OPERATION_POINTWISE_BDESC = 752,
        CUDNN_ATTR_OPERATION_POINTWISE_YDESC = 753,
        CUDNN_ATTR_OPERATION_POINTWISE_ALPHA1 = 754,
        CUDNN_ATTR_OPERATION_POINTWISE_ALPHA2 = 755,
        CUDNN_ATTR_OPERATION_POINTWISE_TDESC = 758,
        CUDNN_ATTR_OPERATIONGRAPH_HANDLE = 800,
        CUDNN_ATTR_OPERATIONGRAPH_OPS = 801,
        CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT = 900,
        CUDNN_ATTR_TENSOR_DATA_TYPE = 901,
        CUDNN_ATTR_TENSOR_DIMENSIONS = 902,
        CUDNN_ATTR_TENSOR_STRIDES = 903,
        CUDNN_ATTR_TENSOR_UNIQUE_ID = 906,
        CUDNN_ATTR_TENSOR_IS_VIRTUAL = 907,
        CUDNN_ATTR_TENSOR_IS_BY_VALUE = 908,
        CUDNN_ATTR_TENSOR_RAGGED_OFFSET_DESC = 913,
        CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS = 1000,
        CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS = 1001,
        CUDNN_ATTR_VARIANT_PACK_WORKSPACE = 1003,
        CUDNN_ATTR_ENGINE_OPERATION_GRAPH = 1300,
        CUDNN_ATTR_ENGINE_GLOBAL_INDEX = 1301,
        CUDNN_ATTR_ENGINE_DEVICEPROP = 1307,
        CUDNN_ATTR_MATMUL_COMP_TYPE = 1500,
        CUDNN_ATTR_OPERATION_MATMUL_ADESC = 1520,
        CUDNN_ATTR_OPERATION_MATMUL_BDESC = 1521,
        CUDNN_ATTR_OPERATION_MATMUL_CDESC = 1522,
        CUDNN_ATTR_OPERATION_MATMUL_DESC = 1523,
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC = 1525,
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC = 1526,
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC = 1527,
        CUDNN_ATTR_REDUCTION_OPERATOR = 1600,
        CUDNN_ATTR_REDUCTION_COMP_TYPE = 1601,
        CUDNN_ATTR_REDUCTION_IS_DETERMINISTIC = 1602,
        CUDNN_ATTR_OPERATION_REDUCTION_XDESC = 1610,
        CUDNN_ATTR_OPERATION_REDUCTION_YDESC = 1611,
        CUDNN_ATTR_OPERATION_REDUCTION_DESC = 1612,
        CUDNN_ATTR_OPERATION_RESHAPE_XDESC = 2200,
        CUDNN_ATTR_OPERATION_RESHAPE_YDESC = 2201,
        CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION = 2702,
        CUDNN_ATTR_OPERATION_SDPA_FWD_QDESC = 2800,
        CUDNN_ATTR_OPERATION_SDPA_FWD_KDESC = 2801,
        CUDNN_ATTR_OPERATION_SDPA_FWD_VDESC = 2802,
        CUDNN_ATTR_OPERATION_SDPA_FWD_ODESC = 2803,
        CUDNN_ATTR_OPERATION_SDPA_FWD_SCALEDESC = 2805,
        CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_QDESC = 2809,
        CUDNN_ATTR_OPERATION_SDPA_FWD_SEQ_LEN_KVDESC = 2810,
        CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH = 2811,
        CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID = 2812,
        CUDNN_ATTR_OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID = 2813,
        CUDNN_ATTR_OPERATION_SDPA_FWD_SOFTMAX_DESC = 2814,
        CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_XDESC = 3000,
        CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_BDESC = 3005,
        CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_YDESC = 3006,
        CUDNN_ATTR_OPERATION_DIAGONAL_BAND_MASK_COMPARISON_MODE = 3007,
        CUDNN_ATTR_OPERATION_SOFTMAX_XDESC = 3100,
        CUDNN_ATTR_OPERATION_SOFTMAX_YDESC = 3101,
        CUDNN_ATTR_OPERATION_SOFTMAX_STATS_DESC = 3102,
    }
    /// Type of an attribute's values (`cudnnBackendAttributeType_t`).
    Type {
        CUDNN_TYPE_HANDLE = 0,
        CUDNN_TYPE_DATA_TYPE = 1,
        CUDNN_TYPE_BOOLEAN = 2,
        CUDNN_TYPE_INT64 = 3,
        CUDNN_TYPE_FLOAT = 4,
        CUDNN_TYPE_VOID_PTR = 6,
        CUDNN_TYPE_HEUR_MODE = 8,
        CUDNN_TYPE_KNOB_TYPE = 9,
        CUDNN_TYPE_POINTWISE_MODE = 14,
        CUDNN_TYPE_BACKEND_DESCRIPTOR = 15,
        CUDNN_TYPE_REDUCTION_OPERATOR_TYPE = 18,
        CUDNN_TYPE_CHAR = 24,
    }
    /// Element type of a tensor (`cudnnDataType_t`).
    DataType {
        CUDNN_DATA_FLOAT = 0,
        CUDNN_DATA_INT32 = 4,
        CUDNN_DATA_BFLOAT16 = 9,
        CUDNN_DATA_BOOLEAN = 11,
    }
    /// An operation on elements (`cudnnPointwiseMode_t`).
    Pointwise {
        CUDNN_POINTWISE_MUL = 1,
        CUDNN_POINTWISE_SUB = 9,
        CUDNN_POINTWISE_EXP = 13,
        CUDNN_POINTWISE_IDENTITY = 21,
        CUDNN_POINTWISE_CMP_GE = 303,
        CUDNN_POINTWISE_CMP_LT = 304,
        CUDNN_POINTWISE_LOGICAL_AND = 400,
        CUDNN_POINTWISE_GEN_INDEX = 501,
        CUDNN_POINTWISE_BINARY_SELECT = 601,
    }
    /// How a dimension is reduced (`cudnnReduceTensorOp_t`).
    Reduction {
        CUDNN_REDUCE_TENSOR_ADD = 0,
    }
    /// How engines are asked for (`cudnnBackendHeurMode_t`).
    Mode {
        CUDNN_HEUR_MODE_A = 3,
    }
    /// Knob of an engine (`cudnnBackendKnobType_t`).
    Knob {
        CUDNN_KNOB_TYPE_STAGES = 14,
        CUDNN_KNOB_TYPE_KERNEL_CFG = 24,
        CUDNN_KNOB_TYPE_TILE_CGA_M = 27,
        CUDNN_KNOB_TYPE_STREAM_K = 38,
        CUDNN_KNOB_TYPE_TILE_M = 40,
        CUDNN_KNOB_TYPE_TILE_N = 41,
    }
}
