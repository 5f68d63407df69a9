//! The one rule by which results are judged.
//!
//! An f32 result may be 1e-5 of the tensor's largest expected entry away from the f64 result. A bf16 result is such
//! an f32 result, rounded: it may be two bf16 ulps of the element away from the f64 result rounded to bf16, or 1e-5
//! of the largest entry where sums cancel and that is more. Infinities and NaN must be where they are expected.
//!
//! What is looser or tighter than that is a [`Rule`] of its own.

use crate::host::Host;
use half::bf16;
use memory::DType;

/// How a result is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// As the module says.
    Standard,
    /// bf16 results of a chain with a bf16 tensor in between: each of its roundings is as large as the last, and
    /// sums carry them from large elements into small ones. Two ulps of the largest entry.
    Chained,
    /// Bit for bit, but for which NaN.
    Exact,
}

/// What an oracle expects of one output.
pub struct Expected {
    pub name: &'static str,
    values: Vec<f64>,
    rule: Rule,
    /// Counts as the largest entry where entries are smaller.
    terms: f64,
}

impl Expected {
    pub fn new(name: &'static str, values: Vec<f64>, rule: Rule) -> Expected {
        Expected {
            name,
            values,
            rule,
            terms: 0.0,
        }
    }

    /// For results that vanish: the size of the terms that cancel.
    pub fn with_terms(self, terms: f64) -> Expected {
        Expected { terms, ..self }
    }

    /// The worst error as a share of what is allowed, or what is wrong.
    pub fn judge(&self, got: &Host) -> Result<f64, String> {
        let got_values = got.values();
        if got_values.len() != self.values.len() {
            return Err(format!(
                "{} elements, expected {}",
                got_values.len(),
                self.values.len()
            ));
        }
        let finite = self.values.iter().filter(|value| value.is_finite());
        let largest = finite.fold(self.terms, |largest, value| largest.max(value.abs()));
        let mut worst: f64 = 0.0;
        for (index, (got_value, want)) in got_values.into_iter().zip(&self.values).enumerate() {
            let want = if got.dtype == DType::BF16 {
                bf16::from_f64(*want).to_f64()
            } else {
                *want
            };
            let same = got_value == want || (got_value.is_nan() && want.is_nan());
            let allowed = self.allowed(got.dtype, want, largest);
            let share = if same {
                0.0
            } else {
                (got_value - want).abs() / allowed
            };
            // A NaN is no share of anything.
            if !(share <= 1.0) {
                let dims = got.dims;
                return Err(format!(
                    "element {index} of {dims:?} is {got_value}, expected {want} +- {allowed}"
                ));
            }
            worst = worst.max(share);
        }
        Ok(worst)
    }

    fn allowed(&self, dtype: DType, want: f64, largest: f64) -> f64 {
        let of_sum = 1e-5 * largest;
        match (self.rule, dtype) {
            (Rule::Exact, _) => 0.0,
            (Rule::Standard, DType::BF16) => of_sum.max(2.0 * bf16_ulp(want)),
            (Rule::Chained, DType::BF16) => of_sum.max(2.0 * bf16_ulp(largest)),
            (Rule::Standard | Rule::Chained, _) => of_sum,
        }
    }
}

/// The distance between neighbours of bf16 at a value: eight bits of significand.
fn bf16_ulp(value: f64) -> f64 {
    let exponent = value.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor();
    (exponent - 7.0).exp2()
}

#[test]
fn the_rule_can_refuse() {
    let judge = |dtype, rule, got: f64, want: f64| {
        let expected = Expected::new("x", vec![want, 1.0], rule);
        expected.judge(&Host::new(dtype, [2], [got, 1.0])).is_ok()
    };
    assert!(judge(DType::F32, Rule::Standard, 0.5 + 9e-6, 0.5));
    assert!(!judge(DType::F32, Rule::Standard, 0.5 + 2e-5, 0.5));
    assert!(judge(DType::BF16, Rule::Standard, 0.5 + 2.0 / 256.0, 0.5));
    assert!(!judge(DType::BF16, Rule::Standard, 0.5 + 3.0 / 256.0, 0.5));
    assert!(judge(DType::BF16, Rule::Chained, 0.5 + 4.0 / 256.0, 0.5));
    assert!(!judge(DType::BF16, Rule::Chained, 0.5 + 5.0 / 256.0, 0.5));
    assert!(!judge(DType::F32, Rule::Exact, 0.5 + 1e-7, 0.5));
    assert!(!judge(DType::F32, Rule::Standard, f64::NAN, 0.5));
    assert!(!judge(DType::F32, Rule::Standard, 0.5, f64::NAN));
    assert!(judge(DType::F32, Rule::Exact, f64::NAN, f64::NAN));
    assert!(!judge(DType::F32, Rule::Standard, f64::INFINITY, 0.5));
    assert!(judge(
        DType::F32,
        Rule::Standard,
        f64::INFINITY,
        f64::INFINITY
    ));
}
