//! Configurations that nobody would write: refused with an error or read, never a panic.

use proptest::prelude::*;
use settings::keys::KEYS;
use settings::kind::Kind;
use settings::load::{Override, Source};
use settings::{Given, RunOptions, Settings, Task, resolve};

/// Values that some key takes and others must refuse.
const ODD: [&str; 25] = [
    "0",
    "-1",
    "1",
    "7",
    "65536",
    "9223372036854775807",
    "-9223372036854775808",
    "1e308",
    "nan",
    "inf",
    "-0.5",
    "true",
    "\"\"",
    "\"auto\"",
    "\"full\"",
    "[]",
    "[\"*\"]",
    "[1]",
    "{}",
    "{ a = 1 }",
    "{ \"0-\" = \"full\" }",
    "1979-05-27",
    "'",
    "\"0-18446744073709551615\"",
    "200%",
];

/// A value of any kind, as TOML has it or not.
fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        prop::sample::select(ODD.to_vec()).prop_map(str::to_owned),
        "\\PC{0,12}",
    ]
}

fn key() -> impl Strategy<Value = String> {
    let names: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
    prop_oneof![
        prop::sample::select(names).prop_map(str::to_owned),
        "[a-z._\"]{0,12}",
    ]
}

/// What a plan would be made of; whether it is accepted does not matter here.
fn settle(given: Given) {
    if let Ok(resolved) = resolve(Task::Plan, given, RunOptions::default()) {
        let _ = Settings::new(&resolved.decided(resolved.config.data.seq));
    }
}

fn settle_set(set: Vec<String>) {
    settle(Given {
        set,
        ..Given::default()
    });
}

/// Many of these go together with no block that there is.
#[test]
fn every_choice_in_every_kind_of_model() {
    for config in ["tiny", "tiny-moe", "tiny-mla", "gpt2"] {
        for key in KEYS {
            let values = match key.kind {
                Kind::Choice(names) => names,
                Kind::Bool => &["true", "false"],
                _ => continue,
            };
            for value in values {
                settle(Given {
                    config: Some(config.into()),
                    set: vec![format!("{}={value}", key.name)],
                    ..Given::default()
                });
            }
        }
    }
}

/// Each alone, so that none is left to chance.
#[test]
fn every_key_with_every_odd_value() {
    for key in KEYS {
        for value in ODD {
            settle_set(vec![format!("{}={value}", key.name)]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_text(text in "\\PC{0,80}") {
        let _ = Source::parse("any".into(), "a file".into(), &text);
        let _ = Override::from_set(&text);
    }

    #[test]
    fn keys_with_values_of_any_kind(pairs in prop::collection::vec((key(), value()), 1..4)) {
        let set: Vec<String> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
        let lines: Vec<String> = pairs.iter().map(|(key, value)| format!("{key} = {value}")).collect();
        let _ = Source::parse("any".into(), "a file".into(), &lines.join("\n"));
        settle_set(set);
    }
}
