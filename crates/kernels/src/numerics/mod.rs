//! Formats and random numbers that have the same bits in every implementation: 8-bit maps, FP8, bf16 weights with remainders of 16 or 8 bits.

pub mod fp8;
pub mod quantise;
pub mod random;
pub mod split;
