//! What every implementation computes with the same bits: 8-bit maps, bf16 weights with remainders, random numbers.

pub mod quantise;
pub mod random;
pub mod split;
