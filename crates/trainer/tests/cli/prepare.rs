//! `prepare`: what it reads, what it writes, and what it refuses.

use crate::workplace::{Outcome, Workplace};
use data::ShardIndex;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// A tokenizer with a chat template.
const TOKENIZER: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tokenization/tests/fixtures/chatml"
);

/// Tokens of a shard of u16.
fn tokens(shard: &Path) -> Vec<u32> {
    let bytes = fs::read(shard).unwrap();
    let (header, tokens) = bytes.split_at(1024);
    let word = |at: usize| i32::from_le_bytes(header[4 * at..4 * at + 4].try_into().unwrap());
    let tokens: Vec<u32> = tokens
        .chunks(2)
        .map(|two| u32::from(u16::from_le_bytes([two[0], two[1]])))
        .collect();
    assert_eq!(
        (word(0), word(1), word(2)),
        (20240520, 1, tokens.len() as i32)
    );
    tokens
}

fn index(shard: &Path) -> ShardIndex {
    ShardIndex::beside(shard).unwrap()
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let named = entries.map(|entry| {
        (
            entry.file_name().into_string().unwrap(),
            fs::read(entry.path()).unwrap(),
        )
    });
    named.collect()
}

/// Lines of all lengths, in all writing systems.
fn lines(count: usize) -> String {
    let words = [
        "the quick",
        "naïve",
        "数据",
        "it's\\n2 + 2",
        "🦀",
        "x = 1\\n\\ny",
        "",
    ];
    let line =
        |at: usize| words[at % 7].to_owned() + &" and so on".repeat(at * at % 97) + words[at % 5];
    (0..count)
        .map(|at| format!("{{\"text\": \"{}\"}}\n", line(at)))
        .collect()
}

#[test]
fn bytes_of_files_in_order() {
    let place = Workplace::new();
    place.folder("in/b");
    place.file("in/a.txt", "one");
    place.file("in/b/c.md", "\u{feff}two");
    place.file("in/b/.hidden", "no");
    place.file("in/d.txt", "");
    place.file(
        "last.jsonl",
        "{\"text\": \"three\"}\n\n{\"text\": \"\"}\n{\"id\": 4, \"text\": \"four\"}",
    );
    let outcome = place
        .trainer("prepare in last.jsonl --out out --tokenizer bytes --shard-tokens 10")
        .succeeds();
    let [first, second] =
        ["out/train-00000.bin", "out/train-00001.bin"].map(|name| place.path(name));
    let held: Vec<u32> = [tokens(&first), tokens(&second)].concat();
    let text: String = held.iter().map(|token| char::from(*token as u8)).collect();
    assert_eq!(text, "one\0two\0three\0four\0");
    assert_eq!(
        (index(&first).documents, index(&second).documents),
        (vec![0, 4, 8], vec![4])
    );
    assert_eq!(
        (index(&first).text_bytes, index(&second).text_bytes),
        (7, 8)
    );
    assert!(
        outcome.stdout.contains("4 documents, 19 tokens"),
        "{outcome:?}"
    );
    assert!(
        outcome.stdout.contains("train: 19 tokens in 2 shards"),
        "{outcome:?}"
    );
    let summary: serde_json::Value = serde_json::from_str(&place.text("out/dataset.json")).unwrap();
    assert_eq!(
        (&summary["train"]["tokens"], &summary["tokenizer"]["kind"]),
        (&19.into(), &"bytes".into())
    );
    let shards = serde_json::json!([
        {"name": "train-00000.bin", "tokens": 10},
        {"name": "train-00001.bin", "tokens": 9}
    ]);
    assert_eq!(summary["train"]["shards"], shards);
}

#[test]
fn the_same_files_with_any_number_of_threads() {
    let place = Workplace::new();
    place.file("a.jsonl", lines(3000));
    place.file("b.txt", "def f(x):\n    return 1\nnext\n".repeat(40_000));
    let prepare = |threads: usize| {
        let out = format!("out{threads}");
        let rest = "--validation 0.1 --shard-tokens 50000";
        place
            .trainer(&format!("prepare a.jsonl b.txt --out {out} --tokenizer {TOKENIZER} {rest} --threads {threads}"))
            .succeeds();
        files(&place.path(&out))
    };
    let (one, four) = (prepare(1), prepare(4));
    assert!(
        one.keys().any(|name| name == "train-00007.bin"),
        "{:?}",
        one.keys()
    );
    assert!(one.contains_key("tokenizer.json") && one.contains_key("tokenizer_config.json"));
    assert!(one == four);
    let summary: serde_json::Value = serde_json::from_slice(&one["dataset.json"]).unwrap();
    let validation = summary["validation"]["documents"].as_u64().unwrap();
    assert!((200..400).contains(&validation), "{validation}");
}

#[test]
fn conversations_are_masked_but_for_the_assistant() {
    let place = Workplace::new();
    let line = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}"#;
    place.file("chats.jsonl", format!("{line}\n{line}\n"));
    place
        .trainer(&format!(
            "prepare chats.jsonl --out out --tokenizer {TOKENIZER}"
        ))
        .succeeds();
    let shard = place.path("out/train-00000.bin");
    let (tokens, index) = (tokens(&shard), index(&shard));
    let half = tokens.len() / 2;
    assert_eq!(tokens[..half], tokens[half..]);
    assert_eq!(index.documents, [0, half as u64]);
    let learnt: Vec<u32> = (0..half)
        .filter(|at| {
            !index
                .masked
                .iter()
                .any(|range| range.contains(&(*at as u64)))
        })
        .map(|at| tokens[at])
        .collect();
    let tokenizer = tokenization::Tokenizer::open(Path::new(TOKENIZER)).unwrap();
    assert_eq!(learnt, tokenizer.encode("Hello!<|im_end|>").unwrap());
    place
        .trainer("prepare chats.jsonl --out other --tokenizer bytes")
        .fails(4, &["chats.jsonl, line 1", "chat template"]);
}

#[test]
fn parquet_and_compressed_files() {
    let place = Workplace::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/prepare");
    let prepare = |input: &str, out: &str| {
        place
            .trainer(&format!(
                "prepare {fixtures}/{input} --out {out} --tokenizer {TOKENIZER}"
            ))
            .succeeds();
        let mut files = files(&place.path(out));
        files.remove("dataset.json");
        files
    };
    for content in ["text", "messages"] {
        let plain = prepare(&format!("{content}.jsonl"), &format!("{content}-plain"));
        assert!(
            index(&place.path(&format!("{content}-plain/train-00000.bin")))
                .documents
                .len()
                == 3
        );
        for end in ["parquet", "gzip.parquet", "jsonl.gz", "jsonl.zst"] {
            let other = prepare(&format!("{content}.{end}"), &format!("{content}-{end}"));
            assert!(other == plain, "{content}.{end}");
        }
    }
    let cut = fs::read(format!("{fixtures}/text.parquet")).unwrap();
    place.file("cut.parquet", &cut[..cut.len() - 9]);
    place
        .trainer("prepare cut.parquet --out cut --tokenizer bytes")
        .fails(4, &["cut.parquet", "parquet"]);
}

/// The text that is learnt of a shard, its tokens being bytes.
fn learnt(shard: &Path) -> String {
    let (tokens, index) = (tokens(shard), index(shard));
    let is_masked = |at: u64| index.masked.iter().any(|range| range.contains(&at));
    let learnt = tokens.iter().zip(0..).filter(|(_, at)| !is_masked(*at));
    learnt.map(|(token, _)| char::from(*token as u8)).collect()
}

/// The forms that instructions come in: of each only the answer is learnt.
#[test]
fn instructions_of_all_forms() {
    let place = Workplace::new();
    let alpaca = r#"{"instruction": "Add.", "input": "1 2", "output": "3"}"#;
    place.file("alpaca.jsonl", alpaca);
    place.file("list.json", format!("[\n  {alpaca},\n  {alpaca}\n]\n"));
    place.file(
        "pairs.jsonl",
        r#"{"prompt": "1 + 2 =", "completion": " 3"}"#,
    );
    let prepare = |input: &str, tokenizer: &str| {
        let out = format!("{input}.{}", tokenizer.len());
        place
            .trainer(&format!(
                "prepare {input} --out {out} --tokenizer {tokenizer}"
            ))
            .succeeds();
        place.path(&format!("{out}/train-00000.bin"))
    };
    let shard = prepare("alpaca.jsonl", "bytes");
    assert_eq!(learnt(&shard), "3\0");
    let whole: String = tokens(&shard)
        .iter()
        .map(|token| char::from(*token as u8))
        .collect();
    assert!(whole.starts_with("Below is an instruction"), "{whole}");
    assert!(
        whole.ends_with("### Input:\n1 2\n\n### Response:3\0"),
        "{whole}"
    );
    assert_eq!(learnt(&prepare("pairs.jsonl", "bytes")), " 3\0");
    assert_eq!(learnt(&prepare("list.json", "bytes")), "3\x003\0");
    // With a chat template they are conversations, as are those of ShareGPT.
    let chat = |user: &str| {
        let messages = format!(
            r#"[{{"role": "user", "content": "{user}"}}, {{"role": "assistant", "content": "3"}}]"#
        );
        place.file("chat.jsonl", format!("{{\"messages\": {messages}}}\n"));
        fs::remove_dir_all(place.path(&format!("chat.jsonl.{}", TOKENIZER.len()))).ok();
        let shard = prepare("chat.jsonl", TOKENIZER);
        (tokens(&shard), index(&shard).masked)
    };
    let shard = prepare("alpaca.jsonl", TOKENIZER);
    assert_eq!(
        (tokens(&shard), index(&shard).masked),
        chat("Add.\\n\\n1 2")
    );
    let turns = r#"[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "3"}]"#;
    place.file("share.jsonl", format!("{{\"conversations\": {turns}}}\n"));
    let shard = prepare("share.jsonl", TOKENIZER);
    assert_eq!((tokens(&shard), index(&shard).masked), chat("Hi"));
    place.file(
        "cat.jsonl",
        r#"{"conversations": [{"from": "cat", "value": "Miaow"}]}"#,
    );
    place
        .trainer(&format!(
            "prepare cat.jsonl --out cat --tokenizer {TOKENIZER}"
        ))
        .fails(4, &["cat.jsonl, line 1", "`cat`", "human, user, gpt"]);
    place.file("cut.json", format!("[{alpaca}, "));
    place
        .trainer("prepare cut.json --out cut --tokenizer bytes")
        .fails(4, &["cut.json", "has no end"]);
}

/// Names say nothing that bytes say otherwise.
#[test]
fn files_are_read_as_what_they_are() {
    let place = Workplace::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/prepare");
    let prepare = |input: &str, out: &str| {
        place
            .trainer(&format!("prepare {input} --out {out} --tokenizer bytes"))
            .succeeds();
        tokens(&place.path(&format!("{out}/train-00000.bin")))
    };
    let expected = prepare(&format!("{fixtures}/text.jsonl"), "plain");
    for end in ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"] {
        let name = end.replace('.', "-");
        fs::copy(format!("{fixtures}/text.{end}"), place.path(&name)).unwrap();
        assert_eq!(prepare(&name, &format!("of-{name}")), expected, "{end}");
    }
    let mut command = place.command("prepare - --out piped --tokenizer bytes");
    command.stdin(fs::File::open(format!("{fixtures}/text.jsonl.gz")).unwrap());
    assert!(command.output().unwrap().status.success());
    assert_eq!(tokens(&place.path("piped/train-00000.bin")), expected);
    place.file("notes.txt", [&b"\x7fELF\x02\x01"[..], &[7; 100]].concat());
    place
        .trainer("prepare notes.txt --out no --tokenizer bytes")
        .fails(4, &["notes.txt is an executable"]);
}

#[test]
fn standard_input() {
    let place = Workplace::new();
    place.file("a.txt", "some text");
    place.file("a.jsonl", "\n{\"text\": \"one\"}\n{\"text\": \"two\"}\n");
    for (name, expected) in [("a.txt", "some text\0"), ("a.jsonl", "one\0two\0")] {
        let mut command = place.command(&format!("prepare - --out {name}.out --tokenizer bytes"));
        command.stdin(fs::File::open(place.path(name)).unwrap());
        assert!(command.output().unwrap().status.success());
        let shard = place.path(&format!("{name}.out/train-00000.bin"));
        let held = tokens(&shard).into_iter();
        let held: String = held.map(|token| char::from(token as u8)).collect();
        assert_eq!(held, expected);
    }
    place.file("bad.jsonl", "{\"text\": \"one\"}\nplain\n");
    let mut command = place.command("prepare - --out out --tokenizer bytes");
    command.stdin(fs::File::open(place.path("bad.jsonl")).unwrap());
    let outcome = command.output().unwrap();
    let said = String::from_utf8_lossy(&outcome.stderr);
    assert!(said.contains("standard input, line 2"), "{said}");
}

/// Of a few documents one is for validation, and of one its end.
#[test]
fn validation_is_never_empty() {
    let place = Workplace::new();
    place.file("a.jsonl", "{\"text\": \"first\"}\n{\"text\": \"last\"}\n");
    place.file("b.txt", "0123456789".repeat(10));
    let split = |input: &str, out: &str| {
        place
            .trainer(&format!(
                "prepare {input} --out {out} --tokenizer bytes --validation 0.01"
            ))
            .succeeds();
        ["train", "validation"].map(|name| {
            let shard = place.path(&format!("{out}/{name}-00000.bin"));
            assert_eq!(index(&shard).documents, [0]);
            tokens(&shard).len()
        })
    };
    assert_eq!(split("a.jsonl", "two"), [6, 5]);
    assert_eq!(split("b.txt", "one"), [100, 1]);
}

#[test]
fn what_is_refused_leaves_nothing() {
    let place = Workplace::new();
    place.file("good.jsonl", lines(2000));
    place.file("bad.jsonl", "{\"text\": \"a\"}\n{\"txt\": \"b\"}\n");
    place.file("worse.jsonl", "{\"text\": \"a\"}\n{\"text\": \n");
    place.file("latin.txt", b"caf\xe9");
    place.file("empty.txt", "");
    place.file("not.json", "[1, 2]");
    let refused = |arguments: &str, code: i32, words: &[&str]| -> Outcome {
        let outcome = place
            .trainer(&format!("prepare {arguments}"))
            .fails(code, words);
        let left: Vec<String> = files_and_folders(&place.path("."));
        assert!(
            left.iter()
                .all(|name| !name.contains("out") && !name.starts_with('.')),
            "{left:?}"
        );
        outcome
    };
    let out = "--out out --tokenizer bytes";
    refused(
        &format!("good.jsonl bad.jsonl {out}"),
        4,
        &["bad.jsonl, line 2", "`messages`"],
    );
    refused(
        &format!("worse.jsonl {out}"),
        4,
        &["worse.jsonl, line 2", "column"],
    );
    let lists = ["not.json, line 1", "jq -c '.[]'"];
    refused(&format!("not.json {out}"), 4, &lists);
    refused(
        &format!("latin.txt {out}"),
        4,
        &["latin.txt", "UTF-8 at byte 3"],
    );
    refused(&format!("empty.txt {out}"), 4, &["no text"]);
    refused(&format!("nowhere {out}"), 4, &["nowhere does not exist"]);
    refused(
        "good.jsonl --out out --tokenizer nowhere",
        4,
        &["nowhere", "tokenizer.json"],
    );
    refused(
        "good.jsonl --out out --tokenizer not.json",
        4,
        &["not.json"],
    );
    refused(
        &format!("good.jsonl {out} --validation 1"),
        2,
        &["--validation"],
    );
    refused(
        &format!("good.jsonl {out} --shard-tokens 1"),
        2,
        &["--shard-tokens"],
    );
    place.folder("kept");
    place.file("kept/mine", "");
    refused(
        "good.jsonl --out kept --tokenizer bytes",
        2,
        &["kept", "not an empty folder"],
    );
}

/// What is given as --out stays what it is: here, as a mount point would, a folder and a link to one.
#[cfg(unix)]
#[test]
fn folders_that_are_there() {
    let place = Workplace::new();
    place.file("a.txt", "some text");
    place.folder("there");
    place.folder("behind");
    std::os::unix::fs::symlink("behind", place.path("link")).unwrap();
    for out in ["there", "link"] {
        let prepare = format!("prepare a.txt --out {out} --tokenizer bytes");
        place.trainer(&prepare).succeeds();
        let expected = ["dataset.json", "train-00000.bin", "train-00000.idx"];
        let found = files(&place.path(out));
        assert_eq!(found.keys().collect::<Vec<_>>(), expected);
        place.trainer(&prepare).fails(2, &["not an empty folder"]);
    }
    assert!(place.path("link").is_symlink());
    place.folder("in");
    std::os::unix::fs::symlink("nowhere", place.path("in/dangling.txt")).unwrap();
    place
        .trainer("prepare in --out out --tokenizer bytes")
        .fails(4, &["cannot read in/dangling.txt"]);
}

#[test]
fn messages_as_text_and_null() {
    let place = Workplace::new();
    let messages =
        r#"[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]"#;
    place.file("a.jsonl", format!("{{\"messages\": {messages}, \"tools\": null}}\n{{\"text\": \"b\", \"messages\": null}}\n"));
    let quoted = serde_json::json!({"messages": messages}).to_string();
    place.file("b.jsonl", format!("{quoted}\n{{\"text\": \"b\"}}\n"));
    let prepare = |input: &str, out: &str| {
        let rest = format!("--out {out} --tokenizer {TOKENIZER}");
        place.trainer(&format!("prepare {input} {rest}")).succeeds();
        tokens(&place.path(&format!("{out}/train-00000.bin")))
    };
    assert_eq!(prepare("a.jsonl", "a"), prepare("b.jsonl", "b"));
    place.file("c.jsonl", "{\"messages\": \"said\"}\n");
    place
        .trainer(&format!("prepare c.jsonl --out c --tokenizer {TOKENIZER}"))
        .fails(4, &["c.jsonl, line 1", "not JSON"]);
}

fn files_and_folders(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// The folder is what `--data` reads.
#[test]
fn training_on_it() {
    let place = Workplace::new();
    place.file("a.jsonl", lines(300));
    place
        .trainer("prepare a.jsonl --out out --tokenizer bytes --validation 0.1 --shard-tokens 2000")
        .succeeds();
    place
        .trainer("--config small.toml --steps 2 --data out --out run")
        .succeeds();
    assert!(place.text("run/metrics.jsonl").contains("\"step\":2"));
    fs::remove_file(place.path("out/train-00001.bin")).unwrap();
    place
        .trainer("--config small.toml --steps 2 --data out --out other")
        .fails(
            4,
            &["dataset.json lists train-00001.bin", "copy the folder"],
        );
}
