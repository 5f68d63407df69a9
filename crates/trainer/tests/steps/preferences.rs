//! Preferences: the same bits under every mode, in every home and on any number of ranks, as planned.

use crate::common::elsewhere::{all_pinned, run};
use crate::common::ranks::{each, on_cpu, ranks, together};
use crate::common::{assert_as_planned, config, on_schedule, plan, session, variants};
use memory::{DType, Homes};
use settings::{Config, Objective, Settings};
use std::f32::consts::LN_2;
use units::Zero;

const STEPS: usize = 3;

fn preferring(variant: usize, dtype: DType, mode: &str) -> Config {
    let (_, model) = variants(2).into_iter().nth(variant).unwrap();
    let mut config = config(model, dtype, mode);
    config.lora.rank = Some(3);
    config.train.objective = Objective::Dpo;
    config.batch.micro = 2;
    config.optim.clip_norm = f64::INFINITY;
    config
}

/// Fresh adapters add nothing, so that the first step finds the model and its reference alike, to the bit. Nothing is dropped
/// out, whatever the model and its adapters say.
#[test]
fn modes_and_homes_give_the_same_bits_as_planned() {
    for variant in [0, 3] {
        for dtype in crate::common::DTYPES {
            let of = |mode: &str, homes: Homes, dropout: f64| {
                let mut config = preferring(variant, dtype, mode);
                config.lora.dropout = dropout;
                if config.model.max_positions.is_some() {
                    config.model.dropout = dropout;
                }
                Settings {
                    homes,
                    ..Settings::new(&config).unwrap()
                }
            };
            let went = |name: &str, settings: &Settings| {
                let planned = plan(settings);
                let mut session = session(settings);
                let bits = run(&mut session, settings, 0..STEPS, |outcome| {
                    assert_as_planned(name, &planned, outcome);
                    let rewards = outcome.rewards.expect("pairs have rewards");
                    match outcome.step {
                        1 => {
                            assert_eq!(outcome.loss, LN_2, "{name}");
                            assert_eq!((rewards.chosen, rewards.rejected), (0.0, 0.0));
                        }
                        _ => assert!(rewards.margin != 0.0 && outcome.loss != LN_2, "{name}"),
                    }
                });
                (bits, planned.peak_bytes)
            };
            let (kept, peak) = went("none", &of("none", Homes::default(), 0.0));
            for mode in ["lora", "full", "qkv,mlp,lora"] {
                let (made, other) = went(mode, &of(mode, Homes::default(), 0.0));
                assert!(made == kept && other < peak, "{variant} {dtype:?} {mode}");
            }
            let (made, other) = went("pinned", &of("full", all_pinned(), 0.0));
            assert!(made == kept && other < peak, "{variant} {dtype:?} pinned");
            let (made, _) = went("dropout", &of("none", Homes::default(), 0.2));
            assert!(made == kept, "{variant} {dtype:?} dropout");
        }
    }
}

/// Tiles change the order of sums, and gradients may be given back as they come: as planned all the same.
#[test]
fn tiles_and_released_gradients_are_as_planned() {
    let mut config = preferring(0, DType::F32, "full");
    config.batch.accum = 1;
    let whole = plan(&Settings::new(&config).unwrap());
    config.memory.tile_tokens = Some(8);
    let tiled = Settings::new(&config).unwrap();
    let mut released = tiled.clone();
    released.tile_tokens = None;
    released.homes.gradients = memory::Home::Released;
    for (name, settings) in [("tiles", tiled), ("released", released)] {
        let planned = plan(&settings);
        assert_ne!(planned.peak_bytes, whole.peak_bytes, "{name}");
        run(&mut session(&settings), &settings, 0..STEPS, |outcome| {
            assert_as_planned(name, &planned, outcome);
        });
    }
}

/// With everything offloaded, on a device whose queues run in any order that events allow.
#[test]
fn late_queues_give_the_same_bits() {
    let settings = Settings {
        homes: all_pinned(),
        ..Settings::new(&preferring(0, DType::F32, "full")).unwrap()
    };
    let expected = run(&mut session(&settings), &settings, 0..STEPS, |_| ());
    for seed in 0..3 {
        let (mut session, waits) = on_schedule(&settings, seed, None);
        let made = run(&mut session, &settings, 0..STEPS, |_| ());
        assert!(made == expected, "seed {seed}");
        let unordered = waits.unordered();
        assert!(unordered.is_empty(), "seed {seed}: {unordered:?}");
    }
}

#[test]
fn ranks_give_the_same_bits() {
    let of = |size, zero| Settings {
        ranks: Some(ranks(size, zero)),
        accum: 4 / size,
        ..Settings::new(&preferring(0, DType::BF16, "lora")).unwrap()
    };
    let one = together(&each("alone", &of(1, Zero::States), STEPS, on_cpu));
    for zero in Zero::ALL {
        let name = format!("{zero:?}");
        let two = together(&each(&name, &of(2, zero), STEPS, on_cpu));
        assert!(two == one, "{name}");
    }
}
