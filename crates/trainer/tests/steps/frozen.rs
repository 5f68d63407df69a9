//! Frozen parameters: the others have the bits of a run in which everything is trained and what is frozen is put back after
//! every step; the norm counts the others alone; and what freezing saves is what the plan says.

use crate::common::elsewhere::{all_pinned, forms, models, with_form};
use crate::common::side_by_side::side_by_side;
use crate::common::{MODES, assert_as_planned, frozen, parameters, plan, session, step_batch};
use memory::{DType, Home, Homes};
use optim::Hyperparameters;
use session::{Session, SessionError};
use settings::Settings;

const STEPS: usize = 3;

/// Without clipping, and without states that are rounded at random, so that one parameter's update knows nothing of others.
fn settings_of(model: usize, choice: usize, form: usize, mode: &str) -> Settings {
    let (_, model) = models(3).swap_remove(model);
    let settings = with_form(model, forms()[form], mode, DType::F32);
    Settings {
        freeze: frozen::patterns(&settings.model, choice),
        optimizer: Hyperparameters {
            clip_norm: f64::INFINITY,
            ..settings.optimizer
        },
        ..settings
    }
}

fn thawed(settings: &Settings) -> Settings {
    Settings {
        freeze: Vec::new(),
        ..settings.clone()
    }
}

fn is_trained(session: &Session, index: usize) -> bool {
    session.model().layout().entries()[index].role.is_trained()
}

/// The norm of the gradients of what another session trains.
fn norm(session: &Session, of: &Session) -> f64 {
    let count = of.model().layout().entries().len();
    let trained = (0..count).filter(|index| is_trained(of, *index));
    let squares = trained.map(|index| {
        let gradient = session.gradient(index).unwrap();
        gradient.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()
    });
    squares.sum::<f64>().sqrt()
}

fn compare(name: &str, settings: &Settings) {
    let everything = thawed(settings);
    let (mut own, mut reference) = (session(settings), session(&everything));
    let initial = parameters(&own);
    let planned = plan(settings);
    for step in 0..STEPS {
        let outcome = own.step(&step_batch(settings, step)).unwrap();
        assert_as_planned(name, &planned, &outcome);
        let expected = reference.step(&step_batch(settings, step)).unwrap();
        assert_eq!(outcome.loss.to_bits(), expected.loss.to_bits(), "{name}");
        let norm = norm(&reference, &own);
        let distance = (f64::from(outcome.grad_norm) / norm - 1.0).abs();
        assert!(distance < 1e-6, "{name}: {} {norm}", outcome.grad_norm);
        assert!(expected.grad_norm > outcome.grad_norm, "{name}");
        for (index, values) in initial.iter().enumerate() {
            if !is_trained(&own, index) {
                let offset = reference.model().layout().entries()[index].offset;
                reference.incoming().set_values(offset, values).unwrap();
            }
        }
        assert!(parameters(&own) == parameters(&reference), "{name}");
    }
    for (index, values) in initial.iter().enumerate() {
        let changed = own.parameter(index).unwrap() != *values;
        assert_eq!(changed, is_trained(&own, index), "{name}: {index}");
        let states = own.states(index).unwrap();
        assert_eq!(states.is_empty(), !is_trained(&own, index), "{name}");
    }
    assert!(own.padding_is_zero(), "{name}");
}

#[test]
fn the_others_are_trained_as_if_frozen_gradients_were_thrown_away() {
    let mut all = Vec::new();
    for model in 0..models(3).len() {
        // Matrices that are multiplied as one are frozen as one: apart, f32 products may have other bits.
        for choice in 1..frozen::CHOICES - 1 {
            // f32, and bf16 with either kind of exact weights beside it.
            for form in [0, 3, 4] {
                let mode = MODES[(model + 5 * choice + form) % MODES.len()];
                let name = format!("model {model}, choice {choice}, form {form}, {mode}");
                all.push((name, settings_of(model, choice, form, mode)));
            }
        }
    }
    side_by_side(all, |(name, settings)| compare(&name, &settings));
}

/// What has no gradient is said to have none, and dumps leave it out.
#[test]
fn a_frozen_parameter_has_no_gradient() {
    let settings = settings_of(0, 1, 0, "none");
    let mut session = session(&settings);
    session.step(&step_batch(&settings, 0)).unwrap();
    let frozen = session.model().layout().find("model.embed_tokens.weight");
    let error = session.gradient(frozen.unwrap()).unwrap_err();
    assert!(matches!(error, SessionError::Frozen(_)), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gradients.safetensors");
    session.export_gradients(&path).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let entries = session.model().layout().entries().iter();
    let trained = entries.filter(|entry| entry.role.is_trained());
    assert_eq!(tensors.len(), trained.clone().count());
    for (index, entry) in session.model().layout().entries().iter().enumerate() {
        if entry.role.is_trained() {
            let dumped = tensors.tensor(&entry.name).unwrap();
            let own = session.gradient(index).unwrap();
            assert_eq!(dumped.data(), bytemuck::cast_slice::<f32, u8>(&own));
        }
    }
}

/// Bytes of all that is not weights.
fn training_bytes(settings: &Settings) -> u64 {
    let plan = plan(settings);
    let arenas = plan.arenas.iter().chain(&plan.host_arenas);
    let arenas = arenas.filter(|arena| !arena.name.ends_with("parameters"));
    arenas.map(|arena| arena.bytes).sum::<u64>() + plan.disk_bytes
}

#[test]
fn a_plan_says_what_freezing_saves() {
    let folder = tempfile::tempdir().unwrap();
    let homes = [
        Homes::default(),
        all_pinned(),
        Homes {
            gradients: Home::Released,
            states: Home::Disk(folder.path().into()),
            ..all_pinned()
        },
    ];
    for (home, choice) in homes
        .iter()
        .flat_map(|home| (0..frozen::CHOICES).map(move |choice| (home, choice)))
    {
        let settings = Settings {
            homes: home.clone(),
            accum: 1,
            ..settings_of(0, choice, 3, "none")
        };
        let everything = thawed(&settings);
        let freeze = plan(&settings).freeze;
        if choice == 0 {
            assert_eq!(freeze, None);
            continue;
        }
        let freeze = freeze.unwrap();
        let saved = training_bytes(&everything) - training_bytes(&settings);
        assert_eq!(freeze.saved_bytes, saved);
        assert!(saved > 0 && freeze.trained_parameters < plan(&settings).parameters);
        assert!(
            plan(&settings)
                .notes
                .iter()
                .any(|note| note.contains(&format!("{saved} bytes")))
        );
    }
}

/// Below what is trained nothing is kept, and nothing runs backward.
#[test]
fn the_backward_pass_ends_above_what_is_frozen() {
    let [lower, embedding] = [2, 1].map(|choice| plan(&settings_of(0, choice, 0, "none")));
    let kept = |plan: &planner::Plan| {
        let activations = plan.activations.iter();
        let kept = activations.filter(|one| one.layer == 0 && one.action == model::Action::Keep);
        kept.count()
    };
    assert_eq!(kept(&lower), 0);
    assert!(kept(&embedding) > 5);
    assert!(lower.flops_per_token < embedding.flops_per_token);
    assert!(lower.peak_bytes < embedding.peak_bytes);
}

#[test]
fn patterns_that_fit_nothing_or_everything_are_refused() {
    let refused = |patterns: &[&str]| {
        let settings = Settings {
            freeze: patterns.iter().map(|text| text.to_string()).collect(),
            ..settings_of(0, 0, 0, "none")
        };
        let error = settings.layout(&settings.architecture()).unwrap_err();
        error.to_string()
    };
    let error = refused(&["*embed*", "*q_porj*"]);
    assert!(
        error.contains("`*q_porj*` in train.freeze") && error.contains("q_proj.weight`"),
        "{error}"
    );
    let error = refused(&["model.*", "lm_head*"]);
    assert!(error.contains("nothing is left to train"), "{error}");
}
