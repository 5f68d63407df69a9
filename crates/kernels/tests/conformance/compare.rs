//! The one rule by which results are judged.
//!
//! An f32 result may be 1e-5 of the tensor's largest expected entry away from the f64 result. A bf16 result is such
//! an f32 result, rounded: it may be two bf16 ulps of the element away from the f64 result rounded to bf16, or 1e-5
//! of the largest entry where sums cancel and that is more. Infinities and NaN must be where they are expected.
//!
//! What is looser or tighter than that is a [`Rule`] of its own.

use crate::host::Host;
use half::bf16;
use kernels::Target;
use memory::DType;

/// How a result is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// The rule that the module states.
    Standard,
    /// bf16 results of a chain with a bf16 tensor in between: each of its roundings is as large as the last, and
    /// sums carry them from large elements into small ones. Two ulps of the largest entry.
    Chained,
    /// Bit for bit, but for which NaN.
    Exact,
    /// A bf16 rounded stochastically: one of the two around the result, each end 1e-6 of the largest entry wider.
    Neighbour,
    /// This far off, or two bf16 ulps if that is more.
    Within(f64),
    /// Codes of a map: at most one off, in at most one of 200.
    Codes,
}

/// What an oracle expects of one output.
pub struct Expected {
    pub name: &'static str,
    values: Vec<f64>,
    rule: Rule,
    /// Where another rule holds.
    exception: Option<(Target, Rule)>,
    /// Counts as the largest entry where entries are smaller.
    terms: f64,
}

impl Expected {
    pub fn new(name: &'static str, values: Vec<f64>, rule: Rule) -> Expected {
        Expected {
            name,
            values,
            rule,
            exception: None,
            terms: 0.0,
        }
    }

    /// Judged by another rule on one target.
    pub fn with_exception(self, target: Target, rule: Rule) -> Expected {
        Expected {
            exception: Some((target, rule)),
            ..self
        }
    }

    /// Names the size of the terms that cancel, for results that vanish.
    pub fn with_terms(self, terms: f64) -> Expected {
        Expected { terms, ..self }
    }

    /// The worst error of a target's result as a share of what is allowed, or what is wrong.
    pub fn judge(&self, got: &Host, target: Target) -> Result<f64, String> {
        let exception = self.exception.filter(|exception| exception.0 == target);
        let rule = exception.map_or(self.rule, |exception| exception.1);
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
        match rule {
            Rule::Neighbour => return self.judge_neighbours(&got_values, largest),
            Rule::Codes => return self.judge_codes(&got_values),
            Rule::Standard | Rule::Chained | Rule::Within(_) | Rule::Exact => {}
        }
        let mut worst: f64 = 0.0;
        for (index, (got_value, want)) in got_values.into_iter().zip(&self.values).enumerate() {
            let want = if got.dtype == DType::BF16 {
                bf16::from_f64(*want).to_f64()
            } else {
                *want
            };
            let same = got_value == want || (got_value.is_nan() && want.is_nan());
            let allowed = allowed(rule, got.dtype, want, largest);
            let share = if same {
                0.0
            } else {
                (got_value - want).abs() / allowed
            };
            if share.is_nan() || share > 1.0 {
                let dims = got.dims;
                return Err(format!(
                    "element {index} of {dims:?} is {got_value}, expected {want} +- {allowed}"
                ));
            }
            worst = worst.max(share);
        }
        Ok(worst)
    }

    fn judge_neighbours(&self, got: &[f64], largest: f64) -> Result<f64, String> {
        let slack = 1e-6 * largest;
        let mut worst: f64 = 0.0;
        for (index, (got, want)) in got.iter().zip(&self.values).enumerate() {
            let (low, high) = (bf16_below(want - slack), bf16_above(want + slack));
            if !(low..=high).contains(got) {
                return Err(format!(
                    "element {index} is {got}, expected {want} between {low} and {high}"
                ));
            }
            worst = worst.max((got - want).abs() / (high - low).max(f64::MIN_POSITIVE));
        }
        Ok(worst)
    }

    fn judge_codes(&self, got: &[f64]) -> Result<f64, String> {
        let mut off = 0;
        for (index, (got, want)) in got.iter().zip(&self.values).enumerate() {
            if (got - want).abs() > 1.0 {
                return Err(format!("code {index} is {got}, expected {want}"));
            }
            off += usize::from(got != want);
        }
        let share = 200.0 * off as f64 / got.len() as f64;
        if share > 1.0 {
            return Err(format!("{off} of {} codes are one off", got.len()));
        }
        Ok(share)
    }
}

fn allowed(rule: Rule, dtype: DType, want: f64, largest: f64) -> f64 {
    let of_sum = 1e-5 * largest;
    match (rule, dtype) {
        (Rule::Exact | Rule::Neighbour | Rule::Codes, _) => 0.0,
        (Rule::Within(bound), DType::BF16) => bound.max(2.0 * bf16_ulp(want)),
        (Rule::Within(bound), _) => bound,
        (Rule::Standard, DType::BF16) => of_sum.max(2.0 * bf16_ulp(want)),
        (Rule::Chained, DType::BF16) => of_sum.max(2.0 * bf16_ulp(largest)),
        (Rule::Standard | Rule::Chained, _) => of_sum,
    }
}

/// The distance between neighbours of bf16 at a value: eight bits of significand.
fn bf16_ulp(value: f64) -> f64 {
    let exponent = value.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor();
    (exponent - 7.0).exp2()
}

/// The largest bf16 that is not above a value.
fn bf16_below(value: f64) -> f64 {
    let nearest = bf16::from_f64(value);
    if nearest.to_f64() <= value {
        return nearest.to_f64();
    }
    // Next towards minus infinity.
    let bits = nearest.to_bits();
    let below = match bits {
        0 | 0x8000 => 0x8001,
        _ if bits & 0x8000 == 0 => bits - 1,
        _ => bits + 1,
    };
    bf16::from_bits(below).to_f64()
}

fn bf16_above(value: f64) -> f64 {
    -bf16_below(-value)
}

#[test]
fn neighbours_and_codes_can_be_refused() {
    let judge = |dtype, rule, got: &[f64], want: &[f64]| {
        let expected = Expected::new("x", want.to_vec(), rule);
        let got = Host::new(dtype, [got.len()], got.iter().copied());
        expected.judge(&got, Target::Cpu).is_ok()
    };
    let neighbour = |got, want| judge(DType::BF16, Rule::Neighbour, &[got], &[want]);
    for sign in [1.0, -1.0] {
        assert!(neighbour(sign, sign * 1.001));
        assert!(neighbour(sign * (1.0 + 1.0 / 128.0), sign * 1.001));
        assert!(!neighbour(sign * (1.0 - 1.0 / 256.0), sign * 1.001));
        assert!(!neighbour(sign * (1.0 + 2.0 / 128.0), sign * 1.001));
    }
    let codes = |got: &[f64], want: &[f64]| judge(DType::U8, Rule::Codes, got, want);
    let want = vec![7.0; 400];
    let with = |off: usize, code: f64| {
        let mut got = want.clone();
        got[..off].fill(code);
        codes(&got, &want)
    };
    assert!(with(0, 7.0) && with(2, 8.0) && with(2, 6.0));
    assert!(!with(3, 8.0) && !with(1, 9.0));
}

#[test]
fn the_rule_can_refuse() {
    let judge = |dtype, rule, got: f64, want: f64| {
        let expected = Expected::new("x", vec![want, 1.0], rule);
        let got = Host::new(dtype, [2], [got, 1.0]);
        expected.judge(&got, Target::Cpu).is_ok()
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
