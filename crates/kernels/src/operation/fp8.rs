//! Tensors as codes of FP8 with one scale each ([`crate::fp8`]), and their products.

use super::Init;
use super::check::{Check, Checked, View};
use super::contract::{Contract, Cost, Operand, reads, sets, writes};
use memory::{DType, In, Out};

/// `out [1]` (f32): the largest magnitude of `x`, f32 or bf16 of any shape; infinity if one is infinite, and NaN if one is
/// NaN. Zero if there are none.
pub struct AbsMax<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
}

/// `codes`: those of `x`, of the same shape, f32 or bf16, times the factor that follows from `largest [1]` (f32, as
/// [`AbsMax`] makes it) and the type of `codes`, either of FP8. `scale [1]` (f32): what the values of codes are to be
/// multiplied by. All implementations give the same bits. If `largest` is not finite, the scale is NaN.
///
/// To `underflows [p, 1]` (f32, rows at any distance), if it is given, is added how many elements of each of `p` parts
/// ([`Quantise::part`]) are not zero and have codes that are.
pub struct Quantise<'a> {
    pub codes: Out<'a>,
    pub scale: Out<'a>,
    pub underflows: Option<Out<'a>>,
    pub x: In<'a>,
    pub largest: In<'a>,
}

/// As [`Quantise`], but `codes [n, padded m]`, e4m3, are the transpose of those of `x [m, n]`, padded as [`TransposeCodes`] does: for a
/// product that sums over rows of what is not codes yet.
pub struct QuantiseTransposed<'a> {
    pub codes: Out<'a>,
    pub scale: Out<'a>,
    pub x: In<'a>,
    pub largest: In<'a>,
}

/// `out [n, padded m]`: the transpose of `x [m, n]`, both of one type of FP8. `n` is a multiple of
/// [`TransposeCodes::MULTIPLE`], and `m` is padded with zeros to one, so that products can sum over it.
pub struct TransposeCodes<'a> {
    pub out: Out<'a>,
    pub x: In<'a>,
}

/// `out [m, n] = init + scales a [m, k] b' + bias [n]`, f32 or bf16, for codes `a` and `b [n, k]` of FP8 that are not both
/// e5m2, with the product of `scales`, `[1]` f32 each, which lie at multiples of 16 bytes, and the bias, if there is one,
/// added to every row. All have contiguous rows; those of the codes, and of `out`, have a multiple of [`ScaledMatmul::MULTIPLE`] elements. Sums are f32
/// and rounded once, when they are stored into `out`. With `fast_accumulation`, tensor cores may keep sums in fewer bits (14 on Hopper);
/// elsewhere it changes nothing.
pub struct ScaledMatmul<'a> {
    pub out: Out<'a>,
    pub a: In<'a>,
    pub b: In<'a>,
    pub scales: [In<'a>; 2],
    pub bias: Option<In<'a>>,
    pub init: Init<'a>,
    pub fast_accumulation: bool,
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

/// The shape of a matrix's transpose, padded.
fn transposed(x: &In) -> [usize; 2] {
    [x.dims()[1], TransposeCodes::padded(x.dims()[0])]
}

impl ScaledMatmul<'_> {
    /// Sizes must be multiples of this, because cuBLASLt reads 16 bytes at a time.
    pub const MULTIPLE: usize = 16;
}

impl Check {
    /// Checks for codes of FP8.
    fn codes(&self, name: &str, x: &dyn View) -> Checked {
        let dtype = x.view().dtype();
        self.that(dtype.is_fp8(), || {
            format!("`{name}` holds {dtype:?}, expected F8E4M3 or F8E5M2")
        })
    }

    fn multiple(&self, name: &str, size: usize) -> Checked {
        self.that(size.is_multiple_of(ScaledMatmul::MULTIPLE), || {
            format!(
                "{name} is {size}, which is no multiple of {}",
                ScaledMatmul::MULTIPLE
            )
        })
    }
}

impl Contract for AbsMax<'_> {
    fn name(&self) -> &'static str {
        "abs_max"
    }

    fn check(&self, check: &Check) -> Checked {
        check.tensor("out", &self.out, &[1], DType::F32)?;
        check.real("x", &self.x, self.x.dims())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![reads(self.x), writes(&self.out)]
    }
}

impl Contract for Quantise<'_> {
    fn name(&self) -> &'static str {
        "quantise"
    }

    fn check(&self, check: &Check) -> Checked {
        check.codes("codes", &self.codes)?;
        check.contiguous("codes", &self.codes)?;
        check.tensor("scale", &self.scale, &[1], DType::F32)?;
        check.real("x", &self.x, self.codes.dims())?;
        check.tensor("largest", &self.largest, &[1], DType::F32)?;
        let Some(underflows) = &self.underflows else {
            return Ok(());
        };
        check.rank("underflows", underflows, 2)?;
        let parts = underflows.dims()[0];
        check.by_rows("underflows", underflows, &[parts, 1], DType::F32)?;
        let (elements, at_most) = (self.x.elements(), Quantise::PARTS_MAX);
        check.that((1..=at_most).contains(&parts), || {
            format!(
                "`underflows` has {parts} parts for {elements} elements, expected 1 to {at_most}"
            )
        })
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let underflows = self.underflows.as_ref();
        let underflows = underflows.map(|underflows| sets(underflows, &Init::Accumulate));
        let outs = [writes(&self.codes), writes(&self.scale)];
        outs.into_iter()
            .chain(underflows)
            .chain([reads(self.x), reads(self.largest)])
            .collect()
    }
}

impl Contract for QuantiseTransposed<'_> {
    fn name(&self) -> &'static str {
        "quantise_transposed"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("x", &self.x, 2)?;
        check.real("x", &self.x, self.x.dims())?;
        check.tensor("codes", &self.codes, &transposed(&self.x), DType::F8E4M3)?;
        check.multiple("the number of columns", self.x.dims()[1])?;
        check.tensor("scale", &self.scale, &[1], DType::F32)?;
        check.tensor("largest", &self.largest, &[1], DType::F32)
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let outs = [writes(&self.codes), writes(&self.scale)];
        outs.into_iter()
            .chain([reads(self.x), reads(self.largest)])
            .collect()
    }
}

impl Contract for TransposeCodes<'_> {
    fn name(&self) -> &'static str {
        "transpose_codes"
    }

    fn check(&self, check: &Check) -> Checked {
        check.rank("x", &self.x, 2)?;
        check.codes("x", &self.x)?;
        check.contiguous("x", &self.x)?;
        check.multiple("the number of columns", self.x.dims()[1])?;
        check.tensor("out", &self.out, &transposed(&self.x), self.x.dtype())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        vec![writes(&self.out), reads(self.x)]
    }
}

impl Contract for ScaledMatmul<'_> {
    fn name(&self) -> &'static str {
        "scaled_matmul"
    }

    fn check(&self, check: &Check) -> Checked {
        let ScaledMatmul { out, a, b, .. } = self;
        for (name, x) in [("a", a), ("b", b)] {
            check.rank(name, x, 2)?;
            check.codes(name, x)?;
            check.contiguous(name, x)?;
        }
        check.that([a, b].iter().any(|x| x.dtype() == DType::F8E4M3), || {
            "`a` and `b` are both F8E5M2, which no GPU multiplies".into()
        })?;
        check.that(a.dims()[1] == b.dims()[1], || {
            let (a, b) = (a.dims(), b.dims());
            format!("`a` is {a:?} and `b` {b:?}: inner sizes differ")
        })?;
        check.multiple("the inner size", a.dims()[1])?;
        check.multiple("the number of columns", b.dims()[0])?;
        check.real_by_rows("out", out, &[a.dims()[0], b.dims()[0]])?;
        check.multiple("the distance of two rows of `out`", out.strides()[0])?;
        for scale in &self.scales {
            check.tensor("scale", scale, &[1], DType::F32)?;
        }
        if let Some(bias) = &self.bias {
            check.tensor("bias", bias, &out.dims()[1..], out.dtype())?;
        }
        super::matmul::check_types(check, &[DType::BF16])?;
        match &self.init {
            Init::Add(x) => check.tensor("init", x, out.dims(), out.dtype()),
            Init::Overwrite | Init::Accumulate => Ok(()),
        }
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let [a_scale, b_scale] = self.scales;
        let ins = [self.a, self.b, a_scale, b_scale];
        let ins = ins.into_iter().chain(self.bias).map(reads);
        [sets(&self.out, &self.init)]
            .into_iter()
            .chain(ins)
            .collect()
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
