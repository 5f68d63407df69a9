//! `generate`, and what `plan` says that it needs.

use crate::workplace::Workplace;
use serde_json::Value;

/// A tokenizer with a chat template, of 360 tokens.
const CHAT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tokenization/tests/fixtures/chatml"
);

/// A model of bytes with 32 positions.
fn place() -> Workplace {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --seed 5 --out model")
        .succeeds();
    place
}

#[track_caller]
fn generate(place: &Workplace, arguments: &str) -> Value {
    let outcome = place
        .trainer(&format!("generate {arguments} --json"))
        .succeeds();
    serde_json::from_str(&outcome.stdout).unwrap()
}

fn tokens(record: &Value) -> Vec<&Value> {
    let made = record["generations"].as_array().unwrap();
    made.iter().map(|made| &made["tokens"]).collect()
}

#[test]
fn a_cache_changes_memory_and_nothing_else() {
    let place = place();
    let asked = "model --prompt abc --prompt once --max-tokens 12 --seed 3 --top-k 50 --top-p 0.9";
    let cached = generate(&place, asked);
    let plain = generate(&place, &format!("{asked} --no-cache"));
    assert_eq!(cached["generations"], plain["generations"]);
    assert_eq!(
        cached["generations"][1]["tokens"].as_array().unwrap().len(),
        12
    );
    for record in [&cached, &plain] {
        assert_eq!(record["peak_bytes"], record["planned_peak_bytes"]);
    }
    assert_ne!(cached["peak_bytes"], plain["peak_bytes"]);
    // Two layers, two KV heads of 16, 16 tokens for each of two sequences, four bytes.
    assert_eq!(cached["kv_cache"]["bytes"], 2 * 2 * 2 * 16 * 16 * 2 * 4);
    assert!(plain["kv_cache"].is_null());
}

#[test]
fn draws_depend_on_the_seed() {
    let place = place();
    let drawn = |seed| {
        generate(
            &place,
            &format!("model --prompt abc --max-tokens 20 --seed {seed}"),
        )
    };
    let (once, again, other) = (drawn(1), drawn(1), drawn(2));
    assert_eq!(once, again);
    assert_ne!(tokens(&once), tokens(&other));
    let greedy = |seed| {
        let asked = format!("model --prompt abc --max-tokens 20 --temperature 0 --seed {seed}");
        generate(&place, &asked)
    };
    assert_eq!(greedy(1), greedy(2));
}

/// What a person reads: prompts with what follows, the same that each alone has.
#[test]
fn prompts_go_on_in_their_order() {
    let place = place();
    let greedy = "--max-tokens 8 --temperature 0";
    let alone = ["abc", "once"].map(|prompt| {
        let asked = format!("generate model --prompt {prompt} {greedy}");
        let text = place.trainer(&asked).succeeds().stdout;
        assert!(
            text.starts_with(prompt) && text.len() > prompt.len() + 1,
            "{text:?}"
        );
        text
    });
    let together = place
        .trainer(&format!(
            "generate model --prompt abc --prompt once {greedy}"
        ))
        .succeeds();
    assert_eq!(together.stdout, alone.join("\n"));
}

#[test]
fn texts_end_where_positions_do() {
    let place = place();
    let prompt = "x".repeat(29);
    let outcome = place
        .trainer(&format!(
            "generate model --prompt {prompt} --max-tokens 9 --json"
        ))
        .succeeds();
    assert!(
        outcome.stderr.contains("the model has 32 positions"),
        "{outcome:?}"
    );
    let record: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(tokens(&record)[0].as_array().unwrap().len(), 3);
    let prompt = "x".repeat(32);
    place
        .trainer(&format!("generate model --prompt {prompt}"))
        .fails(2, &["a prompt has 32 tokens", "32 positions", "shorten it"]);
}

#[test]
fn what_cannot_be_generated_is_refused() {
    let place = place();
    for (arguments, words) in [
        ("--prompt x --temperature -1", "from 0 on"),
        ("--prompt x --top-p 0", "above 0"),
        ("--prompt x --top-k 0", "--top-k"),
        ("--prompt x --chat", "no chat template"),
        ("", "--prompt"),
    ] {
        place
            .trainer(&format!("generate model {arguments}"))
            .fails(2, &[words]);
    }
    let llama = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/golden/transformers/llama"
    );
    place
        .trainer(&format!("generate {llama} --prompt x"))
        .fails(2, &["no tokenizer.json", "53 tokens"]);
}

/// A model with a chat template.
fn chat_place() -> Workplace {
    let place = place();
    place
        .trainer("init --config small.toml --set model.vocab=360 --set data.seq=128 --out chat")
        .succeeds();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(format!("{CHAT}/{name}"), place.path("chat").join(name)).unwrap();
    }
    place
}

/// One conversation may be told in three ways: as a flag, as a list of messages, as a line of several.
#[test]
fn conversations_come_from_flags_and_files() {
    let place = chat_place();
    let user = r#"{"role": "user", "content": "hello"}"#;
    let system = r#"{"role": "system", "content": "be-brief"}"#;
    let earlier = r#"{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}"#;
    place.file("one.json", format!("[{user}]"));
    place.file("system.json", format!("[{system}, {user}]"));
    let several = format!("{{\"messages\": [{user}]}}\n{{\"messages\": [{earlier}, {user}]}}\n");
    place.file("several.jsonl", several);
    let greedy = "--max-tokens 4 --temperature 0";
    let asked = |flags: &str| generate(&place, &format!("chat {flags} {greedy}"));
    let made = |record: &Value, at: usize| record["generations"][at].clone();
    let flag = asked("--prompt hello --chat");
    assert_eq!(made(&flag, 0), made(&asked("--chat-file one.json"), 0));
    let several = asked("--chat-file several.jsonl");
    assert_eq!(
        made(&flag, 0)["prompt_tokens"],
        made(&several, 0)["prompt_tokens"]
    );
    assert_eq!(made(&several, 1)["prompt"], "hello");
    let tokens = |record: &Value, at| made(record, at)["prompt_tokens"].as_u64().unwrap();
    assert!(
        tokens(&several, 1) > tokens(&several, 0),
        "earlier turns are read too"
    );
    let with_system = asked("--prompt hello --chat --system be-brief");
    assert_eq!(
        made(&with_system, 0),
        made(&asked("--chat-file system.json"), 0)
    );
    assert!(tokens(&with_system, 0) > tokens(&flag, 0));
    // The answer stands apart from what was said.
    let text = place.trainer(&format!("generate chat --chat-file one.json {greedy}"));
    let answer = made(&flag, 0)["text"].as_str().unwrap().to_owned();
    assert_eq!(text.succeeds().stdout, format!("> hello\n{answer}\n"));
}

#[test]
fn prompts_are_lines_of_a_file() {
    let place = place();
    place.file("prompts.txt", "abc\n\nonce\n");
    let greedy = "--max-tokens 6 --temperature 0";
    let from_file = generate(&place, &format!("model --prompt-file prompts.txt {greedy}"));
    let from_flags = generate(
        &place,
        &format!("model --prompt abc --prompt once {greedy}"),
    );
    assert_eq!(from_file, from_flags);
}

#[test]
fn files_without_prompts_are_refused() {
    let place = chat_place();
    place.file("empty.txt", "\n");
    place.file("broken.json", "[{");
    place.file(
        "answered.json",
        r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#,
    );
    place.file("none.json", r#"{"text": "a"}"#);
    for (flags, words) in [
        (
            "--prompt-file nowhere.txt",
            "nowhere.txt cannot be used: it cannot be read",
        ),
        ("--prompt-file empty.txt", "no line with a prompt"),
        ("--chat-file broken.json", "it is not JSON"),
        ("--chat-file answered.json", "ends with an answer"),
        ("--chat-file none.json", "messages"),
    ] {
        place
            .trainer(&format!("generate chat {flags}"))
            .fails(4, &[words]);
    }
    for (flags, words) in [("--prompt a --system b", "--chat"), ("--chat", "--prompt")] {
        place
            .trainer(&format!("generate chat {flags}"))
            .fails(2, &[words]);
    }
}

/// The template writes what a user says as the model knows it.
#[test]
fn chats_go_through_the_template() {
    let place = chat_place();
    let asked = "chat --prompt hello --max-tokens 4 --temperature 0";
    let (plain, chat) = (
        generate(&place, asked),
        generate(&place, &format!("{asked} --chat")),
    );
    let length = |record: &Value| record["generations"][0]["prompt_tokens"].as_u64().unwrap();
    assert!(length(&plain) < length(&chat), "{plain} {chat}");
}

/// As transformers has prompts: this tokenizer.json puts a token before them, and one after, which would end the text.
#[test]
fn prompts_begin_as_the_tokenizer_says() {
    let place = place();
    place
        .trainer("init --config small.toml --set model.vocab=360 --out llama")
        .succeeds();
    let fixture = CHAT.replace("chatml", "llama3-adds");
    let prompted = |fixture: &str| {
        let copy = place.path("llama").join("tokenizer.json");
        std::fs::copy(format!("{fixture}/tokenizer.json"), copy).unwrap();
        let record = generate(&place, "llama --prompt 1 --max-tokens 1");
        record["generations"][0]["prompt_tokens"].as_u64().unwrap()
    };
    assert_eq!((prompted(CHAT), prompted(&fixture)), (1, 2));
}

#[test]
fn weights_that_are_no_numbers() {
    let place = place();
    let file = place.path("model/model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let last = bytes.len() - 4;
    bytes[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    place
        .trainer("generate model --prompt abc --json")
        .fails(4, &["not finite", "weights are not sound"]);
}

#[test]
fn a_plan_holds_any_prompts() {
    let place = place();
    let plan = "plan --init-from model --device cpu --dtype f32 --generate 20 --batch 2";
    let planned: Value =
        serde_json::from_str(&place.trainer(&format!("{plan} --json")).succeeds().stdout).unwrap();
    let measured = generate(
        &place,
        "model --prompt abcdefghij --prompt once --max-tokens 10",
    );
    assert_eq!(planned["kv_cache"], measured["kv_cache"]);
    assert!(planned["peak_bytes"].as_u64() >= measured["peak_bytes"].as_u64());
    let words = place.trainer(plan).succeeds().stdout;
    let formula =
        "2 x 2 layers x 2 KV heads x 16 wide x 32 tokens in blocks of 16 x 2 sequences x 4 bytes";
    for word in ["weights", "KV cache", formula, "peak", "reserved"] {
        assert!(words.contains(word), "{word}: {words}");
    }
}

/// Text is read as bytes by a model of any vocabulary, so its samples are bytes; files of bare tokens say nothing.
#[test]
fn samples_are_bytes_where_the_data_is() {
    let place = Workplace::new();
    let run = "--config small.toml --set model.vocab=300 --steps 1 --sample-every 1 --save-every 0";
    place.trainer(&format!("{run} --out text")).succeeds();
    assert!(
        place
            .text("text/metrics.jsonl")
            .contains("\"kind\":\"sample\"")
    );
    place.file("tokens.bin", [7, 0].repeat(2000));
    place
        .trainer(&format!(
            "{run} --data tokens.bin --set data.format=\"u16\" --out tokens"
        ))
        .fails(2, &["--sample-every has to know", "tokenizer.json"]);
}
