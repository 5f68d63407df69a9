//! Products in FP8: gradients near those of bf16, and bf16 wherever nothing is trained.

mod plans;
mod runs;

use crate::common::elsewhere::{self, all_pinned, state};
use crate::common::{config, parameters, session, settings, step_batch};
use kernels::fp8::Fp8;
use memory::DType;
use model::{Fp8Layer, Fp8Operand, Fp8Products, Fp8Site, LatentConfig, ModelConfig, NamePatterns};
use optim::MomentFormat;
use runs::{assert_same, in_fp8, models, products, run, with};
use session::SessionError;
use settings::Settings;

/// What must change bits does: FP8 itself, the format of gradients, each product that is left out.
#[test]
fn what_is_computed_otherwise_has_other_bits() {
    for (name, model) in models(2) {
        let plain = settings(model, DType::BF16, "none");
        let except = |pattern: &str| Fp8Products {
            except: NamePatterns::new(&[pattern.into()]),
            ..products()
        };
        let mut all = vec![
            ("bf16".to_string(), plain.clone()),
            ("fp8".into(), with(&plain, products())),
            (
                "e4m3".into(),
                with(
                    &plain,
                    Fp8Products {
                        gradients: Fp8::E4m3,
                        ..products()
                    },
                ),
            ),
        ];
        let names = match name {
            "GPT-2" => [
                "*.0.*",
                "*attn.c_attn*",
                "*attn.c_proj*",
                "*mlp.c_fc*",
                "*mlp.c_proj*",
            ],
            _ if plain.model.fused_projections => [
                "*.0.*",
                "*qkv_proj*",
                "*o_proj*",
                "*gate_up_proj*",
                "*down_proj*",
            ],
            _ => ["*.0.*", "*k_proj*", "*o_proj*", "*up_proj*", "*down_proj*"],
        };
        all.extend(names.map(|pattern| (pattern.into(), with(&plain, except(pattern)))));
        let mut seen: Vec<(String, elsewhere::Bits)> = Vec::new();
        for (what, settings) in all {
            let (bits, _) = run(&format!("{name} {what}"), &settings);
            for (other, before) in &seen {
                assert!(bits.steps != before.steps, "{name}: {what} is as {other}");
            }
            seen.push((what, bits));
        }
        let everything = with(&plain, except("*"));
        let (bits, planned) = run("all excepted", &everything);
        assert_same(&bits, &seen[0].1, "all excepted is bf16");
        assert_eq!(planned.peak_bytes, run("bf16", &plain).1.peak_bytes);
    }
}

/// Small matrices whose states stay f32 lie apart from those beside them, and are multiplied as one all the same: what the
/// states are like changes no bit of a first step.
#[test]
fn matrices_that_lie_apart_are_one_product() {
    for (name, model) in models(2) {
        let of = |moments, keeps_weights| {
            let fp8 = Fp8Products {
                keeps_weights,
                ..products()
            };
            let mut settings = with(&settings(model.clone(), DType::BF16, "full"), fp8);
            settings.states.moments = moments;
            run(name, &settings).0.steps[0]
        };
        let expected = of(MomentFormat::F32, false);
        assert_eq!(of(MomentFormat::Quantised, false), expected, "{name}");
        assert_eq!(of(MomentFormat::Quantised, true), expected, "{name}");
    }
}

/// There dense layers and the output of attention are in FP8, all else is as before.
#[test]
fn models_with_experts_and_latents_have_both_kinds_of_products() {
    for (name, model) in crate::common::experts::models() {
        let latent = model.latent.map(|latent| LatentConfig {
            v_head_dim: 16,
            ..latent
        });
        let model = ModelConfig {
            hidden: 64,
            head_dim: 16,
            ffn: 144,
            latent,
            ..model
        };
        let (coded, _) = run(name, &in_fp8(&model, "none"));
        let (bf16, _) = run(name, &settings(model, DType::BF16, "none"));
        assert!(bf16.steps != coded.steps, "{name}");
    }
}

/// The gradients of a first step, of matrices and of vectors, with the names of their tensors.
fn gradients(settings: &Settings) -> [Vec<(String, Vec<f32>)>; 2] {
    let mut session = session(settings);
    session.step(&step_batch(settings, 0)).unwrap();
    let entries = session.model().layout().entries().iter().enumerate();
    let (matrices, vectors): (Vec<_>, Vec<_>) =
        entries.partition(|(_, entry)| entry.shape.len() == 2);
    [matrices, vectors].map(|entries| {
        let gradient = |(index, entry): (usize, &memory::Entry)| {
            (entry.name.clone(), session.gradient(index).unwrap())
        };
        entries.into_iter().map(gradient).collect()
    })
}

/// How far values are from others, as a share of the size of these.
fn distance<'a>(pairs: impl Iterator<Item = (&'a f32, &'a f32)>) -> f64 {
    let (mut error, mut size) = (0.0, 0.0);
    for (value, reference) in pairs {
        error += f64::from(value - reference).powi(2);
        size += f64::from(*reference).powi(2);
    }
    (error / size).sqrt()
}

/// At equal weights, the gradient is as far from that of bf16 as FP8's roundings say, and no farther: all of it, and that of each
/// matrix. A scale that is twice what it should be, in one of a layer's products, moves a matrix by its whole size; so do
/// codes that are not transposed.
#[test]
fn gradients_are_near_those_of_bf16() {
    let figures = [(Fp8::E4m3, 0.03..0.10), (Fp8::E5m2, 0.04..0.12)];
    for (name, model) in models(3) {
        // The same is dropped in both. Larger weights make more of each rounding.
        let model = ModelConfig {
            init_std: 0.02,
            ..model
        };
        let plain = settings(model, DType::BF16, "none");
        let reference = gradients(&plain);
        for (format, allowed) in figures.clone() {
            let fp8 = Fp8Products {
                gradients: format,
                ..products()
            };
            let values = gradients(&with(&plain, fp8));
            let pairs = || values.iter().flatten().zip(reference.iter().flatten());
            let all = pairs().flat_map(|(one, other)| one.1.iter().zip(&other.1));
            let share = distance(all);
            println!("{name} {format:?}: {:.1} %", 100.0 * share);
            // Norms behind sublayers make their roundings as large as the residual stream, and multipliers of the embedding and of
            // sublayers make them small beside it.
            let behind = match name {
                "norms behind" | "norms on both sides, caps" => 2.0,
                _ => 1.0,
            };
            let beside = if name == "multipliers" { 0.2 } else { 1.0 };
            let allowed = beside * allowed.start..behind * allowed.end;
            assert!(allowed.contains(&share), "{name} {format:?}: {share}");
            for (one, other) in values[0].iter().zip(&reference[0]) {
                let share = distance(one.1.iter().zip(&other.1));
                // 0.153 was seen: the keys behind a norm, with gradients in e5m2.
                assert!(
                    share < behind * 0.25,
                    "{name} {format:?}: {}: {share}",
                    one.0
                );
            }
        }
    }
}

/// Evaluations have the bits of bf16.
#[test]
fn evaluations_stay_in_bf16() {
    for (name, model) in models(2) {
        let plain = settings(model, DType::BF16, "none");
        let loss = |settings: &Settings, steps| {
            let mut session = session(settings);
            for step in 0..steps {
                session.step(&step_batch(settings, step)).unwrap();
            }
            let micro = step_batch(settings, 9).micro.into_iter();
            let evaluation = session
                .forward()
                .unwrap()
                .evaluate(micro.map(Ok::<_, SessionError>));
            evaluation.unwrap().loss().to_bits()
        };
        let coded = with(&plain, products());
        assert_eq!(loss(&plain, 0), loss(&coded, 0), "{name}");
        assert_ne!(loss(&plain, 2), loss(&coded, 2), "{name}: weights differ");
        let kept = Fp8Products {
            keeps_weights: true,
            ..products()
        };
        let away = Settings {
            homes: all_pinned(),
            ..with(&plain, kept)
        };
        assert_eq!(loss(&away, 2), loss(&coded, 2), "{name}: codes stay away");
    }
}

/// What is not finite has no scale: neither loss nor norm is a number, and the step changes nothing.
#[test]
fn a_weight_that_is_not_finite_skips_the_step() {
    let (_, model) = models(2).swap_remove(0);
    let settings = in_fp8(&model, "none");
    let mut session = session(&settings);
    session.step(&step_batch(&settings, 0)).unwrap();
    let entry = session
        .model()
        .layout()
        .find("model.layers.1.mlp.down_proj.weight");
    let offset = session.model().layout().entries()[entry.unwrap()].offset;
    session
        .incoming()
        .set_values(offset, &[f32::INFINITY])
        .unwrap();
    let before = state(&session);
    let outcome = session.step(&step_batch(&settings, 1)).unwrap();
    assert!(!outcome.is_finite());
    assert!(state(&session) == before);
}

/// Weights are finite, and an output of a norm is not: it does not saturate to the largest code.
#[test]
fn an_activation_that_is_not_finite_skips_the_step() {
    let (_, model) = models(2).swap_remove(0);
    for saves_codes in [true, false] {
        let fp8 = Fp8Products {
            saves_codes,
            ..products()
        };
        let settings = with(&in_fp8(&model, "none"), fp8);
        let mut session = session(&settings);
        session.step(&step_batch(&settings, 0)).unwrap();
        let entry = session
            .model()
            .layout()
            .find("model.layers.1.input_layernorm.weight");
        let offset = session.model().layout().entries()[entry.unwrap()].offset;
        // Nearly the largest number of bf16, and normed values of some tokens are larger than one.
        session.incoming().set_values(offset, &[3.3e38]).unwrap();
        assert!(
            parameters(&session)
                .concat()
                .iter()
                .all(|value| value.is_finite())
        );
        let before = state(&session);
        let outcome = session.step(&step_batch(&settings, 1)).unwrap();
        assert!(!outcome.is_finite(), "{saves_codes}");
        assert!(state(&session) == before, "{saves_codes}");
    }
}

/// Beside one large weight the others become zero, and only that matrix' do. What is kept or made again changes no count.
#[test]
fn what_becomes_zero_is_counted() {
    let (_, model) = models(2).swap_remove(0);
    let down = Fp8Site {
        block: 1,
        layer: Fp8Layer::MlpDown,
        operand: Fp8Operand::Weight,
    };
    let shares = |mode: &str, saves_codes, keeps_weights, large| {
        let fp8 = Fp8Products {
            saves_codes,
            keeps_weights,
            ..products()
        };
        let settings = with(&in_fp8(&model, mode), fp8);
        let mut session = session(&settings);
        let layout = session.model().layout();
        let entry = layout.find("model.layers.1.mlp.down_proj.weight").unwrap();
        let offset = layout.entries()[entry].offset;
        session.incoming().set_values(offset, &[large]).unwrap();
        session
            .step(&step_batch(&settings, 0))
            .unwrap()
            .fp8_underflows
    };
    let none = shares("none", true, false, 0.01);
    // Two blocks of four layers, which multiply three operands each.
    assert_eq!(none.len(), 2 * 4 * 3);
    let some = none.iter().filter(|share| share.share > 0.0).count();
    assert!(some > 0, "small gradients become zero");
    assert!(none.iter().all(|share| share.share < 0.1), "{none:?}");
    assert_eq!(shares("full", false, true, 0.01), none);
    for share in shares("none", true, false, 1e9) {
        let is_lost = share.share > 0.99;
        assert!(
            is_lost == (share.site == down) || share.site.operand == Fp8Operand::Gradient,
            "{share:?}"
        );
    }
}

#[test]
fn a_model_learns() {
    let (_, model) = models(2).swap_remove(0);
    let settings = in_fp8(&model, "full");
    let mut session = session(&settings);
    let batch = step_batch(&settings, 0);
    let losses: Vec<f32> = (0..40)
        .map(|_| session.step(&batch).unwrap().loss)
        .collect();
    assert!(losses[39] < 0.6 * losses[0], "{losses:?}");
    assert!(
        parameters(&session)
            .concat()
            .iter()
            .all(|value| value.is_finite())
    );
}

#[test]
fn what_is_not_built_or_does_not_go_together_is_refused_with_what_to_do() {
    let (_, model) = models(2).swap_remove(0);
    let config = config(model, DType::BF16, "none");
    let refusal = |set: &[&str]| {
        let set: Vec<String> = set.iter().map(ToString::to_string).collect();
        let settings = config.with(&set).and_then(|config| {
            let settings = Settings::new(&config)?;
            settings.layout(&settings.architecture())?;
            Ok(settings)
        });
        settings
            .err()
            .map_or_else(String::new, |error| error.to_string())
    };
    let tensor = "fp8.recipe=tensor";
    assert_eq!(refusal(&[tensor]), "");
    assert_eq!(refusal(&[tensor, "fp8.except=[\"*.0.*\"]"]), "");
    let refused: [(&[&str], &str); 17] = [
        (&["fp8.recipe=rowwise"], "Take --fp8 tensor"),
        (&["fp8.recipe=block"], "Take --fp8 tensor"),
        (&[tensor, "train.dtype=f32"], "add --dtype bf16"),
        (&[tensor, "lora.rank=4"], "leave one of the two out"),
        (
            &[tensor, "memory.tile_tokens=16"],
            "leave --fp8 or the tiles out",
        ),
        (&[tensor, "model.hidden=72"], "model.hidden is 72"),
        (&[tensor, "model.ffn=150"], "model.ffn is 150"),
        (&[tensor, "model.head_dim=20"], "multiples of 16"),
        (&[tensor, "batch.micro=200000"], "takes 2^31"),
        (&["fp8.gradients=e4m3"], "--fp8 tensor"),
        (
            &[
                tensor,
                "fp8.weights=step",
                "batch.accum=1",
                "optim.release=backward",
                "optim.clip_norm=inf",
                "offload.parameters=pinned",
            ],
            "make fp8.weights use",
        ),
        (
            &[tensor, "fp8.except=[\"*porj*\"]"],
            "model.layers.*.mlp.down_proj.weight, in blocks 0 to 1",
        ),
        (&[tensor, "fp8.except=[\"*.layers.2.*\"]"], "fits no matrix"),
        // They exist, and their products are in bf16 anyway.
        (&[tensor, "fp8.except=[\"*embed*\"]"], "fits no matrix"),
        (&[tensor, "fp8.except=[\"*norm*\"]"], "fits no matrix"),
        (
            &[tensor, "fp8.except=[\"*k_proj*\",\"*o_proj*\",\"*mlp*\"]"],
            "no product is left",
        ),
        (
            &[tensor, "train.freeze=[\"*layers*\"]"],
            "no product is left",
        ),
    ];
    for (set, message) in refused {
        let said = refusal(set);
        assert!(said.contains(message), "{set:?}: {said:?}");
    }
}
