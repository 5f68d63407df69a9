//! Tests of what every [`kernels::Backend`] must do, and of what [`kernels::Kernels`] refuses on every device.
//!
//! An operation is tested by cases ([`case::Case`]): inputs made from a seed, a call, and what an oracle in f64
//! expects. The same cases are then run for planning, on pools of several sizes, and on poisoned memory. A new
//! implementation joins in [`device::computing`]. Run with `--nocapture` to see the worst errors.

mod adafactor;
mod adamw;
mod adamw_bits;
mod alignment;
mod attention;
mod beyond_int32;
mod cached_attention;
mod case;
mod compare;
mod contradictions;
mod cross_entropy;
mod delta_cache;
mod dequantise;
mod determinism;
mod device;
mod dropout;
mod elementwise;
mod embedding;
mod experts;
mod flash_attention;
mod fp8;
mod gated_delta;
mod gated_norm;
mod gelu;
#[cfg(feature = "cuda")]
mod gpu;
mod gram;
mod grouped_products;
#[cfg(feature = "cuda")]
mod hopper;
mod host;
mod instructions;
#[cfg(feature = "cuda")]
mod interpreted;
mod largest;
mod latent;
mod layer_norm;
mod layout;
mod linear;
mod matmul;
mod muon;
mod norm;
mod optional_outputs;
mod oracle;
mod planning;
mod poison;
mod policy;
mod positions;
mod preference;
mod properties;
mod qkv;
mod refusals;
mod rms_norm;
mod rotary;
mod router;
mod scaled_mm;
mod short_convolution;
mod sigmoid_gate;
mod sinks;
mod sum_in_order;
mod swiglu;

use case::Cases;
use memory::DType;

/// The compute types.
const DTYPES: [DType; 2] = [DType::F32, DType::BF16];

/// One test for each module of cases, and the list of them all.
macro_rules! suite {
    ($($module:ident),* $(,)?) => {
        const SUITE: &[(&str, Cases)] = &[$((stringify!($module), $module::cases)),*];
        $(
            #[test]
            fn $module() {
                case::conform($module::cases);
            }
        )*
    };
}

suite![
    adafactor,
    adamw,
    attention,
    cached_attention,
    cross_entropy,
    delta_cache,
    dequantise,
    dropout,
    elementwise,
    embedding,
    experts,
    flash_attention,
    fp8,
    gated_delta,
    gated_norm,
    gelu,
    gram,
    grouped_products,
    latent,
    layer_norm,
    matmul,
    muon,
    norm,
    policy,
    positions,
    preference,
    qkv,
    rms_norm,
    rotary,
    router,
    scaled_mm,
    short_convolution,
    sigmoid_gate,
    sum_in_order,
    swiglu,
];
