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

/// A chat template like Qwen3's: the last answer has a thought, and no earlier one.
const CHANGING: &str = "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' and loop.last %}(){% endif %}{{ m.content or '' }}\
                        <|im_end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";

/// A tokenizer's folder, `NAME`, with this template.
fn tokenizer_with(place: &Workplace, name: &str, template: &str) {
    place.folder(name);
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(
            format!("{TOKENIZER}/{file}"),
            place.path(&format!("{name}/{file}")),
        )
        .unwrap();
    }
    place.file(&format!("{name}/chat_template.jinja"), template);
}

fn warnings(outcome: &Outcome) -> Vec<&str> {
    let lines = outcome.stderr.lines();
    lines.filter(|line| line.contains("first: ")).collect()
}

#[test]
fn turns_say_which_answers_are_learnt_and_an_example_a_turn_is_said_once() {
    let place = Workplace::new();
    tokenizer_with(&place, "changing", CHANGING);
    let chat = |turns: usize| {
        let turn = r#"{"role": "user", "content": "a"}, {"role": "assistant", "content": "B"}"#;
        format!("{{\"messages\": [{}]}}\n", vec![turn; turns].join(", "))
    };
    let chats: String = (0..40).map(|at| chat(1 + at % 3)).collect();
    place.file("chats.jsonl", chats);
    let prepare = |flags: &str, out: &str| {
        place.trainer(&format!(
            "prepare chats.jsonl --tokenizer changing --out {out} {flags}"
        ))
    };
    let open = prepare("--validation 0.3", "open").succeeds();
    let said = warnings(&open);
    assert_eq!(said.len(), 1, "{open:?}");
    for word in ["26 (first: chats.jsonl, line 2)", "--turns each"] {
        assert!(said[0].contains(word), "{}", said[0]);
    }
    // 14 x 1, 13 x 2 and 13 x 3 answers.
    assert!(open.stdout.starts_with("79 documents, "), "{open:?}");
    let each = prepare("--turns each --validation 0.3", "each").succeeds();
    assert_eq!(warnings(&each), [""; 0]);
    let [mut open, mut each] = ["open", "each"].map(|out| files(&place.path(out)));
    assert_eq!(open.remove("dataset.json"), each.remove("dataset.json"));
    assert!(open == each);
    // The examples of a conversation stay together: those of three turns begin alike, and are whole in a split.
    let sizes = |split: &str| {
        let shard = place.path(&format!("each/{split}-00000.bin"));
        let index = index(&shard);
        let ends = index.documents[1..].iter().chain([&index.tokens]);
        let sizes = index
            .documents
            .iter()
            .zip(ends)
            .map(|(start, end)| end - start);
        sizes.collect::<Vec<u64>>()
    };
    let all = [sizes("train"), sizes("validation")];
    let shortest = *all[0].iter().min().unwrap();
    for sizes in all {
        let firsts = sizes.iter().filter(|size| **size == shortest).count();
        assert_eq!(sizes[0], shortest, "a split begins with a conversation");
        assert!(firsts > 5 && sizes.len() > firsts, "{sizes:?}");
    }
    let last = prepare("--turns last", "last").succeeds();
    assert!(last.stdout.starts_with("40 documents, "), "{last:?}");
    prepare("--turns all", "all").fails(4, &["chats.jsonl, line 2", "message 2", "--turns each"]);
    let pair = r#"{"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "B"}], "rejected": [{"role": "assistant", "content": "C"}]}"#;
    place.file("chats.jsonl", pair);
    prepare("", "pairs").succeeds();
    prepare("--turns each", "no-pairs").fails(2, &["pair", "--turns all or last"]);
    prepare("--turns some", "no").fails(2, &["all, each, last"]);
}

#[test]
fn what_nobody_meant_is_said_once_with_a_count() {
    let place = Workplace::new();
    let ends = CHANGING.replace("<|im_end|>", "\n").replace("()", "");
    tokenizer_with(&place, "endless", &ends);
    let call = r#"{"type": "function", "function": {"name": "tides", "arguments": "{\"port\": \"Brest\"}"}}"#;
    let user = r#"{"role": "user", "content": "Tides?"}"#;
    let said = r#"{"role": "assistant", "content": "High."}"#;
    let called = format!(r#"{{"role": "assistant", "content": null, "tool_calls": [{call}]}}"#);
    let tools = r#""tools": [{"type": "function", "function": {"name": "tides"}}]"#;
    let chats = [
        format!("{{\"messages\": [{user}, {said}]}}"),
        format!("{{\"messages\": [{user}, {said}], {tools}}}"),
        format!("{{\"messages\": [{user}, {called}], {tools}}}"),
    ];
    place.file("chats.jsonl", chats.join("\n"));
    let prepare = |tokenizer: &str, flags: &str, out: &str| {
        place.trainer(&format!(
            "prepare chats.jsonl --tokenizer {tokenizer} --out {out} {flags}"
        ))
    };
    prepare("endless", "", "refused").fails(
        4,
        &[
            "chats.jsonl, line 3",
            "message 2",
            "tool_calls",
            "--allow-empty-answers",
        ],
    );
    let outcome = prepare("endless", "--allow-empty-answers", "out").succeeds();
    let found = warnings(&outcome);
    let expected = [
        "`tools`: 2 (first: chats.jsonl, line 2)",
        "`tool_calls`: 1 (first: chats.jsonl, line 3)",
        "empty answers, of which only the end is learnt: 1 (first: chats.jsonl, line 3)",
        "no token that stops generation: 3 (first: chats.jsonl, line 1)",
    ];
    assert_eq!(found.len(), expected.len(), "{outcome:?}");
    for (line, words) in found.iter().zip(expected) {
        assert!(line.contains(words), "{line}");
    }
    // A template that writes all of it: arguments as an object, quoted once.
    let calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}";
    let whole = format!("{{% if tools %}}{{{{ tools | tojson }}}}{{% endif %}}{CHANGING}")
        .replace("()", "")
        .replace("<|im_end|>", &format!("{calls}<|im_end|>"));
    tokenizer_with(&place, "whole", &whole);
    let outcome = prepare("whole", "", "meant").succeeds();
    assert_eq!(warnings(&outcome), [""; 0], "{outcome:?}");
    let held = tokens(&place.path("meant/train-00000.bin"));
    let tokenizer = tokenization::Tokenizer::open(&place.path("whole")).unwrap();
    let text = tokenizer.decode(&held);
    assert!(text.ends_with(r#"assistant:{"port": "Brest"}"#), "{text}");
    place.file("empty.jsonl", r#"{"prompt": "a", "completion": ""}"#);
    let empty = "prepare empty.jsonl --tokenizer bytes --out empty";
    place
        .trainer(empty)
        .fails(4, &["completion is empty", "--allow-empty-answers"]);
    let outcome = place
        .trainer(&format!("{empty} --allow-empty-answers"))
        .succeeds();
    assert_eq!(learnt(&place.path("empty/train-00000.bin")), "\0");
    assert_eq!(warnings(&outcome).len(), 1, "{outcome:?}");
}

/// Chats, of which every second prompt is longer than a row of 32.
fn with_answers() -> Workplace {
    let place = Workplace::new();
    let record = |at: usize| {
        let prompt = "p".repeat(if at.is_multiple_of(2) { 5 } else { 40 });
        format!("{{\"prompt\": \"{prompt}: \", \"completion\": \"answer {at}\"}}\n")
    };
    place.file("answers.jsonl", (0..64).map(record).collect::<String>());
    let prepare = "prepare answers.jsonl --tokenizer bytes --out answers --validation 0.1";
    place.trainer(prepare).succeeds();
    place
}

#[test]
fn answers_that_are_cut_away_are_counted_at_the_start() {
    let place = with_answers();
    let run = "--config small.toml --data answers --steps 3";
    let pad = place
        .trainer(&format!(
            "{run} --packing pad --no-shuffle --seq 32 --out pad"
        ))
        .succeeds();
    let summary: serde_json::Value =
        serde_json::from_str(&place.text("answers/dataset.json")).unwrap();
    let documents = summary["train"]["documents"].as_u64().unwrap();
    let words =
        format!("of {documents} documents are longer than --seq 32 and lose their ends, and ");
    let line: Vec<&str> = pad
        .stderr
        .lines()
        .filter(|line| line.contains(&words))
        .collect();
    assert!(
        matches!(line[..], [line] if line.contains("keep no token that is learnt") && line.contains("raise --seq")),
        "{pad:?}"
    );
    // With 8 tokens no document keeps a target, and the run is refused before it has a folder.
    place
        .trainer(&format!("{run} --packing pad --seq 6 --out none"))
        .fails(
            4,
            &[
                "raise --seq",
                &format!("{documents} of {documents} documents"),
            ],
        );
    assert!(!place.path("none").exists());
    let fits = place
        .trainer(&format!("{run} --packing pad --seq 64 --out fits"))
        .succeeds();
    assert!(!fits.stderr.contains("longer than"), "{fits:?}");
}

/// What `auto` stands for is said with its reason and written down, and a run that goes on keeps its own.
#[test]
fn auto_packs_documents_with_masks_and_a_resumed_run_keeps_its_own() {
    let place = with_answers();
    place.file("plain.txt", "a text without documents. ".repeat(100));
    let run = "--config small.toml --seq 64 --steps 4 --save-every 2 --eval-every 2";
    let auto = place
        .trainer(&format!("{run} --data answers --out auto"))
        .succeeds();
    let line = "data.packing is first-fit: only some tokens of the documents are learnt";
    assert_eq!(auto.stderr.matches(line).count(), 1, "{auto:?}");
    place
        .trainer(&format!(
            "{run} --data answers --packing first-fit --out told"
        ))
        .succeeds();
    let config = place.text("auto/config.toml");
    assert!(config.contains("packing = \"first-fit\""), "{config}");
    let steps = |out: &str| crate::metrics::Metrics::read(&place, out).untimed_steps();
    let whole = steps("auto");
    assert_eq!(whole, steps("told"));
    let together = "--packing concatenate --out together";
    place
        .trainer(&format!("{run} --data answers {together}"))
        .succeeds();
    assert_ne!(steps("together"), whole);
    // By a configuration that leaves it open, too.
    for (of, packing) in [("auto", "first-fit"), ("together", "concatenate")] {
        let out = format!("{of}-on");
        let resume = format!("{run} --data answers --resume {of}/checkpoints/step-2 --out {out}");
        let outcome = place.trainer(&resume).succeeds();
        assert!(
            !outcome.stderr.contains(&format!("packing is {packing}:")),
            "{outcome:?}"
        );
        assert_eq!(steps(&out), steps(of)[2..]);
    }
    for (flags, line) in [
        (
            "--data answers --attention eager",
            "eager attention cannot keep documents from seeing",
        ),
        (
            "--data answers --eval-data plain.txt",
            "the data of --eval-data does not say",
        ),
        (
            "--data plain.txt --eval-data plain.txt",
            "plain.txt does not say where",
        ),
    ] {
        let out = format!("of-{}", line.split(' ').next().unwrap());
        let outcome = place
            .trainer(&format!("{run} {flags} --out {out}"))
            .succeeds();
        for said in ["data.packing is concatenate: ", line] {
            assert!(outcome.stderr.contains(said), "{outcome:?}");
        }
    }
    let plan = |flags: &str| {
        place
            .trainer(&format!("plan {run} {flags} --json"))
            .succeeds()
            .stdout
    };
    assert_eq!(
        plan("--data answers"),
        plan("--data answers --packing first-fit")
    );
    assert_ne!(
        plan("--data answers"),
        plan("--data answers --packing concatenate")
    );
    let losses = ["", "--set data.packing=first-fit"].map(|set| {
        let eval = format!("eval auto/checkpoints/step-4 --data answers {set}");
        place.trainer(&eval).succeeds().stdout
    });
    assert_eq!(losses[0], losses[1]);
}
