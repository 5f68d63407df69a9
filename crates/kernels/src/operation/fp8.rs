//! Tensors as codes of FP8 with one scale each ([`crate::fp8`]), and their products.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Cost};
use super::declaration::{operation, size};
use super::operand::Operand;
use memory::{DType, In, Out};

operation! {
    /// `out [1]` (f32): the largest magnitude of `x`, f32 or bf16 of any shape; infinity if one is infinite, and NaN if one is
    /// NaN. Zero if there are none.
    AbsMax "abs_max": x {
        out: Out<'a> [1] f32,
        x: In<'a> [..x],
    }

    /// `codes`: those of `x`, of the same shape, f32 or bf16, times the factor that follows from `largest [1]` (f32, as
    /// [`AbsMax`] makes it) and the type of `codes`, either of FP8. `scale [1]` (f32): what the values of codes are to be
    /// multiplied by. All implementations give the same bits. If `largest` is not finite, the scale is NaN.
    ///
    /// To `underflows [p, 1]` (f32, rows at any distance), if it is given, is added how many elements of each of `p` parts
    /// ([`Quantise::part`]) are not zero and have codes that are.
    Quantise "quantise": codes {
        codes: Out<'a> [..codes] fp8,
        scale: Out<'a> [1] f32,
        underflows: Option<Out<'a>> [size(underflows.as_ref(), 0), 1] f32 by_rows changes,
        x: In<'a> [..codes],
        largest: In<'a> [1] f32,
    }

    /// As [`Quantise`], but `codes [n, padded m]`, e4m3, are the transpose of those of `x [m, n]`, padded as [`TransposeCodes`] does: for a
    /// product that sums over rows of what is not codes yet.
    QuantiseTransposed "quantise_transposed": codes, x [m, n] {
        codes: Out<'a> [n, TransposeCodes::padded(m)] e4m3,
        scale: Out<'a> [1] f32,
        x: In<'a> [m, n],
        largest: In<'a> [1] f32,
    }

    /// `out [n, padded m]`: the transpose of `x [m, n]`, both of one type of FP8. `n` is a multiple of
    /// [`TransposeCodes::MULTIPLE`], and `m` is padded with zeros to one, so that products can sum over it.
    TransposeCodes "transpose_codes": out, x [m, n] {
        out: Out<'a> [n, TransposeCodes::padded(m)] holds(x.dtype()),
        x: In<'a> [m, n] fp8,
    }

    /// `out [m, n] = init + scales a [m, k] b' + bias [n]`, f32 or bf16, for codes `a` and `b [n, k]` of FP8 that are not both
    /// e5m2, with the product of `scales`, `[1]` f32 each, which lie at multiples of 16 bytes, and the bias, if there is one,
    /// added to every row. All have contiguous rows; those of the codes, and of `out`, have a multiple of [`ScaledMatmul::MULTIPLE`] elements. Sums are f32
    /// and rounded once, when they are stored into `out`. With `fast_accumulation`, tensor cores may keep sums in fewer bits (14 on Hopper);
    /// elsewhere it changes nothing.
    ScaledMatmul "scaled_matmul": a [m, k], b [n, _] {
        out: Out<'a> [m, n] by_rows plus(init),
        a: In<'a> [m, k] fp8,
        b: In<'a> [n, k] fp8,
        scales: [In<'a>; 2] [1] f32,
        bias: Option<In<'a>> [n],
        init: Init<'a> [m, n],
        fast_accumulation: bool,
    }
}

impl Quantise<'_> {
    /// A block of threads makes codes of so many elements at a time.
    const UNIT: usize = 2048;

    /// More parts would not be counted faster.
    const PARTS_MAX: usize = 1024;

    /// In how many parts underflows are best counted among so many elements.
    pub fn parts(elements: usize) -> usize {
        elements.div_ceil(Self::UNIT).clamp(1, Self::PARTS_MAX)
    }

    /// Elements of each of so many parts; the last ones may have fewer, or none.
    pub fn part(elements: usize, parts: usize) -> usize {
        let part = elements.div_ceil(parts);
        part.next_multiple_of(Self::UNIT).max(Self::UNIT)
    }
}

impl TransposeCodes<'_> {
    /// Rows of the transpose are padded to a multiple of this.
    pub const MULTIPLE: usize = ScaledMatmul::MULTIPLE;

    /// Elements of a row of the transpose of a matrix with so many rows.
    pub const fn padded(rows: usize) -> usize {
        rows.next_multiple_of(Self::MULTIPLE)
    }
}

impl ScaledMatmul<'_> {
    /// Sizes must be multiples of this, because cuBLASLt reads 16 bytes at a time.
    pub const MULTIPLE: usize = 16;
}

impl Check {
    fn multiple(&self, name: &str, size: usize) -> Checked {
        self.that(size.is_multiple_of(ScaledMatmul::MULTIPLE), || {
            format!(
                "{name} is {size}, which is no multiple of {}",
                ScaledMatmul::MULTIPLE
            )
        })
    }
}

impl Contract for AbsMax<'_> {}

impl Contract for Quantise<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let Some(underflows) = &self.underflows else {
            return Ok(());
        };
        let (parts, elements, at_most) =
            (underflows.dims()[0], self.x.elements(), Quantise::PARTS_MAX);
        check.that((1..=at_most).contains(&parts), || {
            format!(
                "`underflows` has {parts} parts for {elements} elements, expected 1 to {at_most}"
            )
        })
    }
}

impl Contract for QuantiseTransposed<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.multiple("the number of columns", self.x.dims()[1])
    }
}

impl Contract for TransposeCodes<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        check.multiple("the number of columns", self.x.dims()[1])
    }
}

impl Contract for ScaledMatmul<'_> {
    fn conditions(&self, check: &Check) -> Checked {
        let ScaledMatmul { out, a, b, .. } = self;
        check.that([a, b].iter().any(|x| x.dtype() == DType::F8E4M3), || {
            "`a` and `b` are both F8E5M2, which no GPU multiplies".into()
        })?;
        check.multiple("the inner size", a.dims()[1])?;
        check.multiple("the number of columns", b.dims()[0])?;
        check.multiple("the distance of two rows of `out`", out.strides()[0])?;
        check.product_of(&[DType::BF16])
    }

    fn multiplications(&self) -> usize {
        self.sizes().iter().product()
    }

    /// Tensor cores multiply codes at twice the rate of bf16, so half of them count.
    fn cost(&self) -> Cost {
        Cost {
            flops: self.flops() / 2,
            bytes: self.operands().iter().map(Operand::bytes).sum(),
        }
    }

    /// m, k, n.
    fn sizes(&self) -> Vec<usize> {
        vec![self.a.dims()[0], self.a.dims()[1], self.b.dims()[0]]
    }
}
