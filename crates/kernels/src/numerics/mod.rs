//! What every implementation computes to the bit: 8-bit maps, bf16 weights with their remainders, random numbers.

pub mod quantise;
pub mod random;
pub mod split;
