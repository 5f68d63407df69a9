//! Models with products in FP8, and runs of them.

use crate::common::elsewhere::{self, Bits};
use crate::common::{assert_as_planned, plan, session, settings, variants};
use kernels::fp8::Fp8;
use memory::DType;
use model::{Fp8Products, ModelConfig, NamePatterns};
use planner::Plan;
use settings::Settings;

pub const STEPS: usize = 3;

/// The variants, with widths that are multiples of 16.
pub fn models(layers: usize) -> Vec<(&'static str, ModelConfig)> {
    let whole = |(name, model): (&'static str, ModelConfig)| {
        let model = ModelConfig {
            hidden: 64,
            head_dim: 16,
            ffn: 144,
            ..model
        };
        (name, model)
    };
    variants(layers).map(whole).into()
}

pub fn products() -> Fp8Products {
    Fp8Products {
        gradients: Fp8::E5m2,
        except: NamePatterns::default(),
        saves_codes: true,
        keeps_weights: false,
        fast_accumulation: false,
    }
}

pub fn with(settings: &Settings, fp8: Fp8Products) -> Settings {
    Settings {
        fp8: Some(fp8),
        ..settings.clone()
    }
}

pub fn in_fp8(model: &ModelConfig, mode: &str) -> Settings {
    with(&settings(model.clone(), DType::BF16, mode), products())
}

/// Loss, norm and state of a few steps to the bit, each of which takes the memory that is planned.
pub fn run(name: &str, settings: &Settings) -> (Bits, Plan) {
    let (planned, mut session) = (plan(settings), session(settings));
    let bits = elsewhere::run(&mut session, settings, 0..STEPS, |outcome| {
        assert!(outcome.is_finite(), "{name}");
        assert_as_planned(name, &planned, outcome);
    });
    (bits, planned)
}

#[track_caller]
pub fn assert_same(one: &Bits, other: &Bits, name: &str) {
    assert_eq!(one.steps, other.steps, "{name}");
    assert!(one.state == other.state, "{name}: weights or states differ");
}
