//! `chat`: answers, and what the cache of keys and values keeps between them.

use crate::workplace::{Outcome, Workplace};
use serde_json::{Value, json};

/// A tokenizer with a chat template, of 360 tokens.
const CHAT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tokenization/tests/fixtures/chatml"
);

const GREEDY: &str = "--temperature 0 --max-tokens 6";

/// A model with a chat template and 128 positions.
fn place() -> Workplace {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --set model.vocab=360 --set data.seq=128 --out model")
        .succeeds();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(format!("{CHAT}/{name}"), place.path("model").join(name)).unwrap();
    }
    place
}

/// What a chat with these lines comes to.
fn chat(place: &Workplace, flags: &str, lines: &str) -> Outcome {
    place.trainer_reading(&format!("chat model {flags}"), lines)
}

fn turns(place: &Workplace, flags: &str, lines: &str) -> Vec<Value> {
    let outcome = chat(place, &format!("{GREEDY} --json {flags}"), lines).succeeds();
    let lines = outcome.stdout.lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// The answer that `generate` gives to the same messages, which it reads anew.
fn generated(place: &Workplace, messages: &[Value]) -> Value {
    place.file("messages.json", json!(messages).to_string());
    let asked = format!("generate model --chat-file messages.json {GREEDY} --json");
    let record: Value = serde_json::from_str(&place.trainer(&asked).succeeds().stdout).unwrap();
    record["generations"][0].clone()
}

fn count(turn: &Value, of: &str) -> u64 {
    turn[of].as_u64().unwrap()
}

/// Each answer is that of `generate` to the whole conversation, but only what is new is read for it.
#[test]
fn answers_follow_from_all_that_was_said() {
    let place = place();
    let made = turns(&place, "--system brief", "hello\n\n  tides? \n");
    assert_eq!(made.len(), 2, "an empty line says nothing: {made:?}");
    let said = |role: &str, text: &str| json!({"role": role, "content": text});
    let first = made[0]["text"].as_str().unwrap();
    let messages = [
        said("system", "brief"),
        said("user", "hello"),
        said("assistant", first),
        said("user", "tides?"),
    ];
    for (turn, messages) in made.iter().zip([&messages[..2], &messages]) {
        let expected = generated(&place, messages);
        for field in ["text", "tokens", "prompt_tokens", "finish_reason"] {
            assert_eq!(turn[field], expected[field], "{field}");
        }
    }
    assert_eq!(count(&made[0], "cached_tokens"), 0);
    // At least everything before the first answer is the same; the second question is new.
    let (cached, prompt) = (
        count(&made[1], "cached_tokens"),
        count(&made[1], "prompt_tokens"),
    );
    assert!(
        cached >= count(&made[0], "prompt_tokens") && cached < prompt - 1,
        "{made:?}"
    );
}

#[test]
fn a_reset_forgets_what_was_said() {
    let place = place();
    let made = turns(&place, "--system brief", "hello\n/reset\nhello\n");
    assert_eq!(made[0]["tokens"], made[1]["tokens"]);
    // Of a prompt that is cached, the last token is read again, for the one that follows it.
    assert_eq!(
        count(&made[1], "cached_tokens"),
        count(&made[0], "prompt_tokens") - 1
    );
    let remembered = turns(&place, "--system brief", "hello\nhello\n");
    assert!(count(&remembered[1], "prompt_tokens") > count(&made[1], "prompt_tokens"));
}

/// What scripts get are the answers, each with a line break behind it.
#[test]
fn answers_are_all_that_is_printed() {
    let place = place();
    let expected: String = turns(&place, "", "hello\ntides?\n")
        .iter()
        .map(|turn| turn["text"].as_str().unwrap().to_owned() + "\n")
        .collect();
    let outcome = chat(&place, GREEDY, "hello\ntides?\n").succeeds();
    assert_eq!(outcome.stdout, expected);
    assert_eq!(chat(&place, GREEDY, "").succeeds().stdout, "");
}

#[test]
fn what_cannot_be_said_is_refused() {
    let place = place();
    chat(&place, "--context 4", "hello\n")
        .fails(2, &["there is room for 4", "/reset", "--context"]);
    chat(&place, "--context 129", "hello\n").fails(2, &["--context 129", "128 positions"]);
    place
        .trainer("init --config small.toml --out bytes")
        .succeeds();
    place.trainer("chat bytes").fails(
        2,
        &["bytes has no chat template", "trainer generate --prompt"],
    );
}
