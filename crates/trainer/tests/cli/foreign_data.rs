//! Data that a model cannot read as what it is: refused with the command that makes tokens of it.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use std::fs;
use trainer::{Failure, Trainer};

/// A tokenizer of 363 tokens with a chat template.
const TOKENIZER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tokenization/tests/fixtures/chatml"
);

/// Data in parquet.
const PARQUET: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/golden/prepare/text.parquet"
);

const TRAIN: &str = "--seq 16 --steps 1 --device cpu --out run";

/// With a model of other tokens than bytes, and its tokenizer.
fn place() -> Workplace {
    let place = Workplace::new();
    place
        .trainer("init --config small.toml --set model.vocab=363 --out model")
        .succeeds();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let from = format!("{TOKENIZER}/{name}");
        fs::copy(from, place.path(&format!("model/{name}"))).unwrap();
    }
    place.file("text.txt", "Some words to train on. ".repeat(50));
    place
}

/// The command between backticks in a hint, without the program's name.
fn hinted(stderr: &str) -> String {
    let hint = stderr.lines().find(|line| line.starts_with("hint: "));
    let command = hint.and_then(|hint| hint.split('`').nth(1));
    let command = command.and_then(|command| command.strip_prefix("trainer "));
    command
        .unwrap_or_else(|| panic!("no command: {stderr}"))
        .into()
}

#[test]
fn text_is_refused_by_a_model_of_other_tokens_wherever_it_is_given() {
    let place = place();
    let words = [
        "text.txt is text",
        "model/tokenizer.json",
        "trainer prepare",
        "text.txt --tokenizer model",
    ];
    let train = place.trainer(&format!("--init-from model --data text.txt {TRAIN}"));
    let refused = train.fails(4, &words);
    assert!(!place.path("run").exists(), "nothing is left behind");
    place.trainer("eval model --data text.txt").fails(4, &words);
    place
        .trainer("bench --init-from model --data text.txt --device cpu")
        .fails(4, &words);
    let builtin = ["built-in data is text", "trainer prepare TEXT"];
    place
        .trainer(&format!("--init-from model {TRAIN}"))
        .fails(4, &builtin);
    // The command that it names makes data that the model takes, and the model's evaluations do.
    place.trainer(&hinted(&refused.stderr)).succeeds();
    // Each strategy may have data of its own.
    let strategy =
        |path: &str| format!("[[strategy]]\nname = '{path}'\nset = ['data.path={path}']\n");
    let strategies = strategy("text-tokens") + &strategy("text.txt");
    place.file("matrix.toml", format!("steps = 1\n{strategies}"));
    place
        .trainer("bench --matrix matrix.toml --init-from model --device cpu --seq 32")
        .fails(4, &words);
    let own = "--data text-tokens --eval-every 1";
    place
        .trainer(&format!(
            "--init-from model {own} --eval-data text.txt {TRAIN}"
        ))
        .fails(4, &words);
    place
        .trainer(&format!(
            "--init-from model {own} --eval-data text-tokens {TRAIN}"
        ))
        .succeeds();
    place.trainer("eval model --data text-tokens").succeeds();
    // It is taken by those who say so.
    let any = "--set data.any_tokenizer=true --out any";
    let train = TRAIN.replace("--out run", any);
    place
        .trainer(&format!("--init-from model --data text.txt {train}"))
        .succeeds();
}

#[test]
fn the_library_refuses_the_same() {
    let place = place();
    let set = format!("data.path={}", place.path("text.txt").display());
    let data = |set: &[&str]| {
        let set = [&["data.seq=16", "train.device=cpu"], set].concat();
        Trainer::from_pretrained(place.path("model"), &set)
            .unwrap()
            .data()
    };
    let refused = data(&[&set]).unwrap_err();
    assert!(matches!(refused, Failure::ForeignData { .. }), "{refused}");
    assert_eq!(refused.exit_code(), 4);
    let taken = data(&[&set, "data.any_tokenizer=true"]).unwrap();
    assert!(
        taken.describe().contains("bytes of text"),
        "{}",
        taken.describe()
    );
}

/// Whoever reads them, and whatever they are called.
#[test]
fn what_is_no_text_is_read_as_bytes_by_nobody() {
    let place = place();
    let gzip = [&b"\x1f\x8b\x08\0\0\0\0\0"[..], &[7; 100]].concat();
    let files: [(&str, Vec<u8>, &str); 6] = [
        ("chat.jsonl", b"{\"text\": \"Hi\"}\n".repeat(50), "is JSONL"),
        ("lines.txt", b"{\"text\": \"Hi\"}\n".repeat(50), "is JSONL"),
        ("rows.txt", fs::read(PARQUET).unwrap(), "is parquet"),
        ("packed.txt", gzip, "is compressed (gzip)"),
        (
            "program",
            [&b"\x7fELF\x02\x01"[..], &[7; 100]].concat(),
            "an executable",
        ),
        (
            "zip.txt",
            [&b"PK\x03\x04"[..], &[7; 100]].concat(),
            "a zip archive",
        ),
    ];
    for (name, contents, kind) in files {
        place.file(name, contents);
        let words = [name, kind, "neither text nor tokens"];
        for model in ["--config small.toml", "--init-from model"] {
            for format in ["auto", "text"] {
                let data = format!("--data {name} --set data.format={format}");
                place
                    .trainer(&format!("{model} {data} {TRAIN}"))
                    .fails(4, &words);
            }
        }
    }
    place
        .trainer("--config small.toml --eval-every 1 --eval-data chat.jsonl --out run")
        .fails(4, &["chat.jsonl is JSONL", "chat.jsonl --tokenizer bytes"]);
    let refused = place
        .trainer("eval model --data chat.jsonl")
        .fails(4, &["chat.jsonl"]);
    place.trainer(&hinted(&refused.stderr)).succeeds();
    place
        .trainer("eval model --data chat-tokens --seq 16")
        .succeeds();
    assert!(!place.path("run").exists(), "nothing is left behind");
}

#[test]
fn a_folder_of_another_tokenizer_is_refused() {
    let place = place();
    let prepare = "prepare text.txt --validation 0.2 --out";
    place
        .trainer(&format!("{prepare} bytes --tokenizer bytes"))
        .succeeds();
    place
        .trainer(&format!("{prepare} own --tokenizer model"))
        .succeeds();
    let train = |data: &str| place.trainer(&format!("--init-from model --data {data} {TRAIN}"));
    let words = [
        "bytes was prepared with bytes as tokens",
        "trainer prepare text.txt --tokenizer model",
    ];
    let refused = train("bytes").fails(4, &words);
    place.trainer("eval model --data bytes").fails(4, &words);
    place.trainer(&hinted(&refused.stderr)).succeeds();
    let again = fs::read(place.path("bytes-tokens/train-00000.bin")).unwrap();
    assert_eq!(again, fs::read(place.path("own/train-00000.bin")).unwrap());
    // The same tokenizer in other words, with settings of its last use, is the same.
    let mut tokenizer: serde_json::Value =
        serde_json::from_str(&place.text("model/tokenizer.json")).unwrap();
    tokenizer["padding"] = serde_json::json!({"strategy": "BatchLongest"});
    place.file(
        "model/tokenizer.json",
        serde_json::to_vec_pretty(&tokenizer).unwrap(),
    );
    train("own").succeeds();
    // And one that has another token is another.
    tokenizer["added_tokens"][0]["content"] = "<other>".into();
    place.file(
        "model/tokenizer.json",
        serde_json::to_vec_pretty(&tokenizer).unwrap(),
    );
    let words = ["own was prepared with another tokenizer", "any_tokenizer"];
    let elsewhere = TRAIN.replace("--out run", "--out other");
    let command = format!("--init-from model --data own {elsewhere}");
    place.trainer(&command).fails(4, &words);
    place
        .trainer(&format!("{command} --set data.any_tokenizer=true"))
        .succeeds();
    // Nor do two go together.
    place
        .trainer(&format!(
            "--config small.toml --set model.vocab=363 --data own --data bytes {elsewhere}"
        ))
        .fails(4, &["different tokenizers"]);
}

/// A run of more tokens than bytes that was trained on bytes goes on, and is evaluated, on bytes.
#[test]
fn a_run_on_bytes_reads_bytes() {
    let place = place();
    let small = "--config small.toml --set model.vocab=363 --save-every 2";
    let began = place
        .trainer(&format!("{small} --data text.txt --steps 2 --out run"))
        .succeeds();
    let said = began.stderr.matches("each byte is a token").count();
    assert_eq!(said, 1, "{}", began.stderr);
    place.trainer("--resume run --steps 4").succeeds();
    assert_eq!(Metrics::read(&place, "run").losses().len(), 4);
    place.trainer("eval run --data text.txt").succeeds();
    place
        .trainer("prepare text.txt --out own --tokenizer model")
        .succeeds();
    let other = "--resume run/checkpoints/step-4 --steps 6 --out other --data own --allow-change";
    place.trainer(other).fails(
        4,
        &["own was prepared with another tokenizer, not with bytes"],
    );
    // What it exports no longer says so.
    place.trainer("export run --out exported").succeeds();
    place
        .trainer("eval exported --data text.txt")
        .fails(4, &["text.txt is text", "no tokenizer.json says which"]);
}
