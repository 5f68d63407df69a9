//! Weights, gradients and states elsewhere than on the device, each alone and all together: the bits of a run that has
//! everything there, and memory and traffic that were planned to the byte. What goes together is drawn so that every two
//! choices meet in some run.

use crate::common::covering::covering;
use crate::common::elsewhere::{
    Bits, OPTIMIZERS, all_pinned, can_update, forms, models, resident, run, with_form,
    with_optimizer,
};
use crate::common::frozen;
use crate::common::side_by_side::side_by_side;
use crate::common::{assert_as_planned, plan, session};
use memory::{DType, Home, Homes, Window};
use model::{Attention, OffloadLabels};
use optim::{Hyperparameters, MasterFormat, OptimizerKind};
use settings::Settings;
use std::collections::BTreeSet;
use std::fmt;
use std::panic::catch_unwind;
use tempfile::TempDir;

const STEPS: usize = 3;

/// Recompute modes, each with activations that it leaves to be offloaded, if there are such in every layer.
const MODES: [(&str, &str); 5] = [
    ("none", "mlp,attn_out,block_input"),
    ("full", "block_input"),
    ("full:uniform:2", ""),
    ("core_attn", "qkv,mlp"),
    ("core_attn,layernorm,mlp", "block_input,qkv"),
];

/// What is chosen for a run, and how many choices there are.
#[derive(Clone, Copy, Debug)]
enum Factor {
    ParameterSlots,
    Gradients,
    States,
    Window,
    Fraction,
    Mode,
    Activations,
    Attention,
    Tile,
    Accum,
    Form,
    GradientType,
    Model,
    Freeze,
    Optimizer,
}

const FACTORS: [(Factor, usize); 15] = [
    (Factor::ParameterSlots, 4),
    (Factor::Gradients, 3),
    (Factor::States, 3),
    (Factor::Window, 2),
    (Factor::Fraction, 2),
    (Factor::Mode, MODES.len()),
    (Factor::Activations, 2),
    (Factor::Attention, 2),
    (Factor::Tile, 2),
    (Factor::Accum, 3),
    (Factor::Form, 12),
    (Factor::GradientType, 2),
    (Factor::Model, 7),
    (Factor::Freeze, frozen::CHOICES),
    (Factor::Optimizer, OPTIMIZERS.len()),
];

/// A choice for each factor, by number.
#[derive(Clone)]
struct Choices(Vec<usize>);

impl fmt::Display for Choices {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let chosen = FACTORS
            .iter()
            .map(|(factor, _)| (*factor, self.of(*factor)));
        f.debug_map().entries(chosen).finish()
    }
}

impl Choices {
    fn of(&self, factor: Factor) -> usize {
        self.0[factor as usize]
    }

    fn optimizer(&self) -> OptimizerKind {
        OPTIMIZERS[self.of(Factor::Optimizer)]
    }

    fn is_released(&self) -> bool {
        self.of(Factor::Gradients) == 2
    }

    /// Whether anything is elsewhere, and nothing contradicts.
    fn go_together(&self) -> bool {
        let elsewhere = [Factor::ParameterSlots, Factor::Gradients, Factor::States];
        let can_offload = !MODES[self.of(Factor::Mode)].1.is_empty();
        let release = self.of(Factor::Accum) == 0 && self.of(Factor::Window) == 0;
        // Half of the states are those of blocks, and frozen blocks have none.
        let has_half = self.of(Factor::Fraction) == 0 || self.of(Factor::Freeze) != 3;
        let optimizer = self.optimizer();
        // Adafactor has masters alone, and only some forms have these.
        let has_states = optimizer != OptimizerKind::Adafactor
            || self.of(Factor::States) == 0
            || forms()[self.of(Factor::Form)].2 != MasterFormat::None;
        has_half
            && has_states
            && can_update(optimizer, self.of(Factor::Freeze))
            && elsewhere.iter().any(|factor| self.of(*factor) > 0)
            && (release || !self.is_released())
            && (can_offload || self.of(Factor::Activations) == 0)
    }

    fn homes(&self, folder: &TempDir) -> Homes {
        Homes {
            weights: match self.of(Factor::ParameterSlots) {
                0 => Home::Device,
                _ => Home::Pinned,
            },
            unit_slots: [2, 1, 2, 3][self.of(Factor::ParameterSlots)],
            gradients: [Home::Device, Home::Pinned, Home::Released][self.of(Factor::Gradients)]
                .clone(),
            states: match self.of(Factor::States) {
                0 => Home::Device,
                1 => Home::Pinned,
                _ => Home::Disk(folder.path().to_owned()),
            },
            window: [Window::Forward, Window::End][self.of(Factor::Window)],
            fraction: [1.0, 0.5][self.of(Factor::Fraction)],
            ..all_pinned()
        }
    }

    /// With nothing elsewhere but activations.
    fn settings(&self) -> Settings {
        let (mode, labels) = MODES[self.of(Factor::Mode)];
        let (_, model) = models(3).swap_remove(self.of(Factor::Model));
        let gradients = [DType::F32, DType::BF16][self.of(Factor::GradientType)];
        let settings = with_form(model, forms()[self.of(Factor::Form)], mode, gradients);
        let settings = with_optimizer(settings, self.optimizer());
        let offloaded = match self.of(Factor::Activations) {
            0 => OffloadLabels::default(),
            _ => OffloadLabels::parse(labels).unwrap(),
        };
        Settings {
            freeze: frozen::patterns(&settings.model, self.of(Factor::Freeze)),
            policy: settings.policy.clone().offload(&offloaded).unwrap(),
            attention: [Attention::Eager, Attention::Flash][self.of(Factor::Attention)],
            tile_tokens: [None, Some(50)][self.of(Factor::Tile)],
            accum: 1 + self.of(Factor::Accum),
            optimizer: Hyperparameters {
                // The norm of all gradients is not known yet when the first are used up.
                clip_norm: match self.is_released() {
                    true => f64::INFINITY,
                    false => settings.optimizer.clip_norm,
                },
                ..settings.optimizer
            },
            ..settings
        }
    }
}

/// Runs with everything on the device and with what is chosen elsewhere, and compares.
fn compare(choices: &Choices) {
    let folder = tempfile::tempdir().unwrap();
    let resident = choices.settings();
    let settings = Settings {
        homes: choices.homes(&folder),
        ..resident.clone()
    };
    let model = models(3)[choices.of(Factor::Model)].0;
    let name = format!("{choices}: {model}, {:?}", settings.homes);
    let expected = run(&mut session(&resident), &resident, 0..STEPS, |_| {});
    let planned = plan(&settings);
    assert_they_differ(&name, [&resident, &settings]);
    let actual = run(&mut session(&settings), &settings, 0..STEPS, |outcome| {
        assert_as_planned(&name, &planned, outcome);
    });
    assert_eq!(actual.steps, expected.steps, "{name}");
    assert!(actual.state == expected.state, "{name}");
}

/// What is said to be elsewhere is not on the device.
fn assert_they_differ(name: &str, settings: [&Settings; 2]) {
    let [here, elsewhere] = settings.map(plan);
    let crossing = |plan: &planner::Plan| plan.h2d_bytes + plan.d2h_bytes;
    let homes = &settings[1].homes;
    let has = |plan: &planner::Plan, arena: &str| plan.arenas.iter().any(|one| one.name == arena);
    assert!(has(&here, "gradients"), "{name}: {:?}", here.arenas);
    let is_here = homes.gradients == Home::Device;
    let bytes = |plan: &planner::Plan, arena: &str| -> u64 {
        let own = plan.arenas.iter().filter(|one| one.name == arena);
        own.map(|one| one.bytes).sum()
    };
    let gradients = [&here, &elsewhere].map(|plan| bytes(plan, "gradients"));
    let weights = [&here, &elsewhere].map(|plan| bytes(plan, "parameters"));
    assert_eq!(gradients[0] == gradients[1], is_here, "{name}");
    assert_eq!(
        weights[0] == weights[1],
        homes.weights == Home::Device,
        "{name}"
    );
    if homes.streams_updates() {
        assert!(crossing(&elsewhere) > crossing(&here), "{name}");
    }
    if homes.streams_updates() && !matches!(homes.states, Home::Disk(_)) {
        assert!(
            elsewhere.host_pinned_bytes > here.host_pinned_bytes,
            "{name}"
        );
    }
}

#[test]
fn whatever_is_elsewhere_changes_nothing_but_memory() {
    let counts = FACTORS.map(|(_, count)| count);
    let (runs, never) = covering(&counts, 16, |choices| {
        Choices(choices.clone()).go_together()
    });
    let runs: Vec<Choices> = runs.into_iter().map(Choices).collect();
    let release = (Factor::Gradients, 2);
    let expected = [
        [release, (Factor::Window, 1)],
        [release, (Factor::Accum, 1)],
        [release, (Factor::Accum, 2)],
        [(Factor::Mode, 2), (Factor::Activations, 1)],
        [(Factor::Fraction, 1), (Factor::Freeze, 3)],
        [(Factor::Freeze, 3), (Factor::Optimizer, 1)],
    ];
    let expected = expected.map(|pair| pair.map(|(factor, choice)| (factor as usize, choice)));
    assert_eq!(never, BTreeSet::from(expected));
    assert!(
        runs.len() >= 12 * 7,
        "every form of every model: {}",
        runs.len()
    );
    // All of them, so that what the wrong ones have in common shows.
    let compared = side_by_side(&runs, |choices| {
        let compared = catch_unwind(|| compare(choices));
        compared.is_ok() || {
            println!("wrong: {choices}");
            false
        }
    });
    let wrong = compared.iter().filter(|is_right| !**is_right).count();
    assert_eq!(wrong, 0, "of {} runs", runs.len());
}

/// With weights, gradients and states of a larger model elsewhere, the device has a fraction of them.
#[test]
fn the_device_holds_what_is_used() {
    let (_, model) = models(12).swap_remove(0);
    let here = with_form(model, forms()[0], "full", DType::F32);
    let elsewhere = Settings {
        homes: all_pinned(),
        ..here.clone()
    };
    let plans = [&here, &elsewhere].map(plan);
    let persistent = plans.each_ref().map(|plan| plan.persistent_bytes);
    assert!(10 * persistent[1] < persistent[0], "{persistent:?}");
    assert!(2 * plans[1].peak_bytes < plans[0].peak_bytes);
    let Bits { steps, state } = run(&mut session(&here), &here, 0..2, |_| {});
    let actual = run(&mut session(&elsewhere), &elsewhere, 0..2, |_| {});
    assert_eq!(actual.steps, steps);
    assert!(actual.state == state);
    assert!(resident(&elsewhere).homes == here.homes);
}
