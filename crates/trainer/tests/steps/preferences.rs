//! Preferences begin where the model stands, without dropout.

use crate::common::elsewhere::run;
use crate::common::{config, session, variants};
use settings::{Objective, Settings};
use std::f32::consts::LN_2;

/// Fresh adapters add nothing, so that the first step finds the model and its reference alike, to the bit. Nothing is dropped
/// out, whatever the model and its adapters say.
#[test]
fn the_first_step_finds_the_model_and_its_reference_alike() {
    for variant in [0, 3] {
        for dtype in crate::common::DTYPES {
            let of = |mode: &str, dropout: f64| {
                let (_, model) = variants(2)[variant].clone();
                let mut config = config(model, dtype, mode);
                config.lora.rank = Some(3);
                config.train.objective = Objective::Dpo;
                config.lora.dropout = dropout;
                if config.model.max_positions.is_some() {
                    config.model.dropout = dropout;
                }
                let settings = Settings::new(&config).unwrap();
                run(&mut session(&settings), &settings, 0..3, |outcome| {
                    let rewards = outcome.rewards.expect("pairs have rewards");
                    match outcome.step {
                        1 => {
                            assert_eq!(outcome.loss, LN_2);
                            assert_eq!((rewards.chosen, rewards.rejected), (0.0, 0.0));
                        }
                        _ => assert!(rewards.margin != 0.0 && outcome.loss != LN_2),
                    }
                })
            };
            let kept = of("none", 0.0);
            for (mode, dropout) in [("full", 0.0), ("none", 0.2)] {
                assert!(
                    of(mode, dropout) == kept,
                    "{variant} {dtype:?} {mode} {dropout}"
                );
            }
        }
    }
}
