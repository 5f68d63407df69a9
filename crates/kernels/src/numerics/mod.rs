//! Formats and random numbers that every implementation computes with the same bits: 8-bit maps, FP8, bf16 weights with remainders, random numbers.

pub mod fp8;
pub mod quantise;
pub mod random;
pub mod split;
