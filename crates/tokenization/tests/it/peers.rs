//! The same tokens, masks and texts as transformers', on fixtures that it made (`fixtures/README.md`).

use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tokenization::{ChatError, ChatTemplate, Tokenizer};

#[derive(Deserialize)]
struct Case {
    vocab: usize,
    end: u32,
    texts: Vec<Text>,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    /// As a prompt.
    prompt: Vec<u32>,
    decoded: String,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<Value>,
    #[serde(default)]
    tools: Value,
    text: String,
    ids: Vec<u32>,
    mask: Vec<u8>,
}

fn folder(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

fn cases() -> BTreeMap<String, Case> {
    let cases = std::fs::read(folder("cases.json")).unwrap();
    let cases: BTreeMap<String, Case> = serde_json::from_slice(&cases).unwrap();
    assert_eq!(cases.len(), 5);
    cases
}

#[test]
fn texts() {
    for (name, case) in cases() {
        let tokenizer = Tokenizer::open(&folder(&name)).unwrap();
        assert_eq!(
            (tokenizer.vocab_size(), tokenizer.end_of_text()),
            (case.vocab, Some(case.end)),
            "{name}"
        );
        for text in &case.texts {
            let tokens = tokenizer.encode(&text.text).unwrap();
            assert_eq!(tokens, text.ids, "{name}: {:?}", text.text);
            let prompt = tokenizer.encode_prompt(&text.text).unwrap();
            assert_eq!(prompt, text.prompt, "{name}: {:?}", text.text);
            assert_eq!(tokenizer.decode(&tokens), text.decoded, "{name}");
            assert_eq!(tokenizer.decode_after(&[], &tokens), text.decoded, "{name}");
        }
    }
}

/// Wherever a text is cut, what follows has its text in the whole, the space before its first word included: this decoder
/// drops one at the beginning of a text.
#[test]
fn texts_after_a_prompt_keep_their_first_space() {
    let tokenizer = Tokenizer::open(&folder("mistral")).unwrap();
    let said = "it is what the step loads, and for it is the one step of the run: with what it waits for, at the end";
    let text = [said; 3].join(" ");
    let tokens = tokenizer.encode_prompt(&text).unwrap();
    assert!(tokens.len() > 40, "longer than the context that is decoded");
    let mut lost = 0;
    for cut in 1..tokens.len() {
        let (prompt, rest) = tokens.split_at(cut);
        let after = tokenizer.decode_after(prompt, rest);
        assert_eq!(tokenizer.decode(prompt) + &after, text, "cut at {cut}");
        lost += usize::from(tokenizer.decode(rest) != after);
    }
    assert!(lost > 0, "alone, some would lose their space");
}

#[test]
fn conversations() {
    for (name, case) in cases() {
        let tokenizer = Tokenizer::open(&folder(&name)).unwrap();
        let template = ChatTemplate::open(&folder(&name)).unwrap().unwrap();
        for chat in &case.chats {
            if chat.tools.is_null() {
                let text = template.render(&chat.messages, false).unwrap();
                assert_eq!(text, chat.text, "{name}");
            }
            let encoded = template
                .encode(&tokenizer, &chat.messages, &chat.tools)
                .unwrap();
            assert_eq!(encoded.tokens, chat.ids, "{name}");
            let mut mask = vec![1; chat.ids.len()];
            for range in encoded.masked {
                mask[range].fill(0);
            }
            assert_eq!(mask, chat.mask, "{name}: {:?}", chat.text);
        }
    }
}

/// A text of many lines is encoded in pieces, with the tokens of the whole.
#[test]
fn pieces() {
    let line = "def f(x): it's 12 + 345\n  \nnaïve e\u{301}\nend\nnext. \n1\n\n";
    for (name, cut) in [
        ("chatml", true),
        ("llama3", true),
        ("qwen3", true),
        ("mistral", false),
    ] {
        let tokenizer = Tokenizer::open(&folder(name)).unwrap();
        assert_eq!(tokenizer.safe_cut(line).is_some(), cut, "{name}");
        let file = folder(name).join("tokenizer.json");
        let whole = tokenizers::Tokenizer::from_file(file).unwrap();
        let text = line.repeat(3000);
        assert!(text.len() > 128 << 10);
        let expected = whole.encode(text.as_str(), false).unwrap();
        assert_eq!(
            tokenizer.encode(&text).unwrap(),
            expected.get_ids(),
            "{name}"
        );
    }
}

#[test]
fn bad_conversations() {
    let messages = |json: &str| -> Vec<Value> { serde_json::from_str(json).unwrap() };
    let refused = |name: &str, json: &str| {
        let tokenizer = Tokenizer::open(&folder(name)).unwrap();
        let template = ChatTemplate::open(&folder(name)).unwrap().unwrap();
        template
            .encode(&tokenizer, &messages(json), &Value::Null)
            .unwrap_err()
    };
    let twice = r#"[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]"#;
    let error = refused("mistral", twice).to_string();
    assert!(error.contains("take turns"), "{error}");
    assert!(matches!(
        refused("chatml", "[]"),
        ChatError::NoAssistant { .. }
    ));
    assert!(matches!(
        refused("chatml", "[3]"),
        ChatError::NotAMessage { message: 1, .. }
    ));
    let marks = r#"[{"role": "assistant", "content": "\ufdd0"}]"#;
    assert!(matches!(refused("chatml", marks), ChatError::Noncharacter));
}

/// Qwen3's template leaves thoughts out once they are answered: without blocks, its turns are no prefixes.
#[test]
fn a_template_that_goes_back_on_what_it_wrote() {
    let workplace = tempfile::tempdir().unwrap();
    let template = std::fs::read_to_string(folder("qwen3").join("chat_template.jinja")).unwrap();
    let template = template
        .replace("{% generation %}", "")
        .replace("{% endgeneration %}", "");
    std::fs::write(workplace.path().join("chat_template.jinja"), template).unwrap();
    let template = ChatTemplate::open(workplace.path()).unwrap().unwrap();
    let chats = &cases()["qwen3"].chats;
    let encode = |chat: &Chat| template.encode(&Tokenizer::bytes(), &chat.messages, &Value::Null);
    assert!(encode(&chats[0]).is_ok());
    let error = encode(&chats[4]).unwrap_err();
    assert!(
        matches!(error, ChatError::NotAPrefix { message: 2 }),
        "{error}"
    );
}

fn template(source: &str) -> ChatTemplate {
    let workplace = tempfile::tempdir().unwrap();
    std::fs::write(workplace.path().join("chat_template.jinja"), source).unwrap();
    ChatTemplate::open(workplace.path()).unwrap().unwrap()
}

/// What is not the assistant's, of a conversation in bytes.
fn masked(source: &str, messages: &Value) -> Result<Vec<std::ops::Range<usize>>, ChatError> {
    let messages = messages.as_array().unwrap();
    let encoded = template(source).encode(&Tokenizer::bytes(), messages, &Value::Null);
    Ok(encoded?.masked)
}

#[test]
fn blocks_in_comments_and_turns_without_any() {
    let said = json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": "as"}]);
    let plain = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let comment = format!("{{# {{% generation %}} #}}{plain}");
    assert_eq!(
        masked(&comment, &said).unwrap(),
        std::slice::from_ref(&(0..1))
    );
    let elsewhere = format!("{plain}{{% generation %}}{{% endgeneration %}}");
    let error = masked(&elsewhere, &said).unwrap_err();
    assert!(matches!(error, ChatError::NothingLearnt), "{error}");
}

/// Nothing can be rendered of no message.
#[test]
fn the_assistant_begins() {
    let source =
        "<{{ messages[0].role }}>{% for m in messages %}{{ m.content | trim }}.{% endfor %}";
    let said = json!([{"role": "assistant", "content": " é"}, {"role": "user", "content": "u"}]);
    assert_eq!(masked(source, &said).unwrap(), [0..11, 14..16]);
}
