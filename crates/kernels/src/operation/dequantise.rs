//! Matrices that are stored as codes become matrices of plain numbers.

use super::check::{Check, Checked};
use super::contract::{Contract, Operand, reads, writes};
use memory::{Codes, DType, In, Out};

/// `out`, f32 or bf16 of any shape with `n` elements: the values of 8-bit codes `codes [n]` (u8) of the signed map, each
/// times the `absmax` (f32, one for each 256 codes) of its block.
pub struct DequantiseBytes<'a> {
    pub out: Out<'a>,
    pub codes: In<'a>,
    pub absmax: In<'a>,
}

/// `out`, f32 or bf16 of any shape with `n` elements: the values of 4-bit codes, each times the scale of its block of 64.
/// `codes` (u8) has two codes in a byte, the first in the upper half. A block's scale is the value of its code in
/// `absmax_codes` (u8, one for each block) times its `absmax` (f32, one for each 256 blocks), plus `offset [1]` (f32).
/// Every product and sum is f32 on its own, so all implementations give the same bits.
pub struct DequantiseNf4<'a> {
    pub out: Out<'a>,
    pub codes: In<'a>,
    pub absmax_codes: In<'a>,
    pub absmax: In<'a>,
    pub offset: In<'a>,
}

impl Contract for DequantiseBytes<'_> {
    fn name(&self) -> &'static str {
        "dequantise_bytes"
    }

    fn check(&self, check: &Check) -> Checked {
        let n = self.out.elements();
        check.real("out", &self.out, self.out.dims())?;
        check.tensor("codes", &self.codes, &[n], DType::U8)?;
        let blocks = n.div_ceil(Codes::BLOCK);
        check.tensor("absmax", &self.absmax, &[blocks], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.out), reads(self.codes), reads(self.absmax)]
    }
}

impl Contract for DequantiseNf4<'_> {
    fn name(&self) -> &'static str {
        "dequantise_nf4"
    }

    fn check(&self, check: &Check) -> Checked {
        let n = self.out.elements();
        let blocks = n.div_ceil(Codes::NF4_BLOCK);
        check.real("out", &self.out, self.out.dims())?;
        check.tensor("codes", &self.codes, &[n.div_ceil(2)], DType::U8)?;
        check.tensor("absmax_codes", &self.absmax_codes, &[blocks], DType::U8)?;
        let absmax = blocks.div_ceil(Codes::BLOCK);
        check.tensor("absmax", &self.absmax, &[absmax], DType::F32)?;
        check.tensor("offset", &self.offset, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let ins = [self.codes, self.absmax_codes, self.absmax, self.offset];
        let ins = ins.into_iter().map(reads);
        [writes(&self.out)].into_iter().chain(ins).collect()
    }
}
