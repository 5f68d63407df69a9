//! Model FLOPs, as the field counts them.

use crate::ModelConfig;

/// Floating-point operations of forward and backward for one token, recompute not counted: 6 for each weight of a
/// matrix product, and 12 x layers x query width x sequence for attention. Causality is not subtracted, by the
/// convention of PaLM (Chowdhery et al. 2022), Megatron-LM and torchtitan.
pub fn flops_per_token(config: &ModelConfig, seq: usize) -> u64 {
    let (hidden, q, kv) = (
        config.hidden as u64,
        config.q_width() as u64,
        config.kv_width() as u64,
    );
    let block = hidden * (2 * q + 2 * kv) + 3 * hidden * config.ffn as u64;
    let head = hidden * config.vocab as u64;
    let layers = config.layers as u64;
    6 * (layers * block + head) + 12 * layers * q * seq as u64
}
