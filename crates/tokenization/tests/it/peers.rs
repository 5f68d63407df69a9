//! The same tokens, masks and texts as transformers', on fixtures that it made (`fixtures/README.md`).

use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use tokenization::{ChatError, ChatTemplate, Dialogue, Finding, Teaching, Tokenizer, Turns};

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

/// The examples of a conversation in bytes, each as its text with brackets around what is learnt, and what was found.
fn taught(
    source: &str,
    chat: &Value,
    turns: Option<Turns>,
) -> Result<(Vec<String>, Vec<Finding>), ChatError> {
    let asked = Dialogue {
        messages: chat["messages"].as_array().unwrap(),
        tools: &chat["tools"],
        given: 0,
    };
    let teaching = Teaching {
        turns,
        allow_empty: chat["allow_empty"] == true,
    };
    let made = template(source).examples(&Tokenizer::bytes(), asked, teaching)?;
    let examples = made.examples.into_iter().map(|example| {
        let mut text: Vec<u8> = example.tokens.iter().map(|token| *token as u8).collect();
        let ends = example.masked.iter().rev();
        for range in ends {
            text.splice(range.end..range.end, *b"<");
            text.splice(range.start..range.start, *b">");
        }
        String::from_utf8(text).unwrap()
    });
    Ok((examples.collect(), made.findings))
}

fn two_turns() -> Value {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let said = [
        ("user", "a"),
        ("assistant", "B"),
        ("user", "c"),
        ("assistant", "D"),
    ];
    json!({"messages": said.map(|(role, content)| message(role, content))})
}

/// Qwen3 gives the last answer a thought, and takes it away once the next message is there.
#[test]
fn turns_that_change_are_examples_of_their_own() {
    let source = "{% for m in messages %}{{ m.role[:1] }}:{% if m.role == 'assistant' and loop.last %}(){% endif %}{{ m.content }}\0\
                  {% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    let chat = two_turns();
    let each = [">u:a\0a:<()B\0", ">u:a\0a:B\0u:c\0a:<()D\0"];
    let (examples, findings) = taught(source, &chat, None).unwrap();
    assert_eq!(
        (&examples, &findings[..]),
        (
            &each.iter().map(ToString::to_string).collect(),
            &[Finding::Divided][..]
        )
    );
    assert_eq!(
        taught(source, &chat, Some(Turns::Each)).unwrap(),
        (examples, vec![])
    );
    assert_eq!(
        taught(source, &chat, Some(Turns::Last)).unwrap().0,
        each[1..]
    );
    let refused = taught(source, &chat, Some(Turns::All)).unwrap_err();
    assert!(
        matches!(refused, ChatError::NotAPrefix { message: 2 }),
        "{refused}"
    );
    // One turn alone changes nothing.
    let one = json!({"messages": chat["messages"].as_array().unwrap()[..2]});
    assert_eq!(
        taught(source, &one, None).unwrap(),
        (vec![each[0].into()], vec![])
    );
    // A template that keeps its text has all turns in one example.
    let plain = source.replace("(){% endif %}", "{% endif %}");
    let whole = vec![">u:a\0a:<B\0>u:c\0a:<D\0".to_string()];
    assert_eq!(taught(&plain, &chat, None).unwrap(), (whole, vec![]));
    assert_eq!(taught(&plain, &chat, Some(Turns::Each)).unwrap().0.len(), 2);
    let marked = "{% for m in messages %}{{ m.role[:1] }}:{% generation %}{% if m.role == 'assistant' %}{{ m.content }}\0{% endif %}\
                  {% endgeneration %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}";
    let last = vec![">u:aa:B\0u:ca:<D\0".to_string()];
    assert_eq!(
        taught(marked, &chat, Some(Turns::Last)).unwrap(),
        (last, vec![])
    );
    let twice = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% elif m.content %}{% generation %}{{ m.content }}\
                 {% endgeneration %}-{% generation %}\0{% endgeneration %}{% endif %}{% endfor %}";
    let each = [">a<B>-<\0", ">aB-\0c<D>-<\0"].map(String::from).to_vec();
    assert_eq!(taught(twice, &chat, Some(Turns::Each)).unwrap().0, each);
    let mut silent = chat.clone();
    silent["messages"][3]["content"] = "".into();
    let refused = taught(twice, &silent, Some(Turns::Last)).unwrap_err();
    assert!(matches!(refused, ChatError::NothingLearnt), "{refused}");
}

/// Phi-3 ends a conversation, not an answer, with an end-of-text token.
#[test]
fn what_stands_behind_the_last_answer_alone_moves_to_the_end() {
    let source = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}\0{% endfor %}{% if add_generation_prompt %}a:{% else %}e\0{% endif %}";
    let whole = ">u:a\0a:<B\0>u:c\0a:<D\0e\0".to_string();
    assert_eq!(
        taught(source, &two_turns(), None).unwrap(),
        (vec![whole], vec![])
    );
    // gpt-oss ends the last answer by another token: without it, an earlier one would not end. Here the prompt ends by it too, which the
    // text before an answer never does.
    let source = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}{% if loop.last %}\0{% else %};{% endif %}{% endfor %}\
                  {% if add_generation_prompt %}a:{% endif %}";
    let each = [">u:a;a:<B\0", ">u:a;a:B;u:c;a:<D\0"].map(String::from);
    assert_eq!(
        taught(source, &two_turns(), None).unwrap(),
        (
            each.to_vec(),
            vec![Finding::Divided, Finding::OtherPrompt, Finding::OtherPrompt]
        )
    );
    // The second answer is the first one, and follows what the first one has only while it is the last.
    let source = "{% for m in messages %}{{ m.role[:1] }}:{% if m.role == 'assistant' and loop.last %}(){% endif %}{{ m.content }}.{% endfor %}\
                  {% if add_generation_prompt %}a:{% endif %}";
    let mut same = two_turns();
    same["messages"][3]["content"] = "B".into();
    let refused = taught(source, &same, Some(Turns::All)).unwrap_err();
    assert!(
        matches!(refused, ChatError::NotAPrefix { message: 2 }),
        "{refused}"
    );
}

/// DeepSeek-R1 opens a thought in the prompt for an answer, and writes none in the answer.
#[test]
fn a_prompt_that_no_answer_follows_is_found() {
    let source = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}\0{% endfor %}{% if add_generation_prompt %}a:(\n{% endif %}";
    let whole = ">u:a\0a:<B\0>u:c\0a:<D\0".to_string();
    let found = vec![Finding::OtherPrompt; 2];
    assert_eq!(
        taught(source, &two_turns(), None).unwrap(),
        (vec![whole], found)
    );
}

#[test]
fn what_a_template_leaves_out_is_found() {
    let call =
        json!({"type": "function", "function": {"name": "tides", "arguments": {"port": "Brest"}}});
    let messages = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [call]}]);
    let tools = json!([{"type": "function", "function": {"name": "tides"}}]);
    let chat = json!({"messages": messages, "tools": tools});
    let source = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content or '' }}\0{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    let refused = taught(source, &chat, None).unwrap_err();
    assert!(
        matches!(refused, ChatError::EmptyAnswer { message: 2 }),
        "{refused}"
    );
    let mut allowed = chat.clone();
    allowed["allow_empty"] = true.into();
    let found = vec![
        Finding::ToolsLeftOut,
        Finding::CallsLeftOut,
        Finding::EmptyAnswer,
    ];
    assert_eq!(
        taught(source, &allowed, None).unwrap(),
        (vec![">u:a\0a:<\0".into()], found)
    );
    let whole = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}".to_owned()
        + &source.replace(
            "or '' }}",
            "or '' }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.port }}{% endfor %}",
        );
    let expected = vec![">tides;u:a\0a:<Brest\0".to_string()];
    assert_eq!(taught(&whole, &chat, None).unwrap(), (expected, vec![]));
    for blank in ["", "  \n"] {
        let mut empty = two_turns();
        empty["messages"][1]["content"] = blank.into();
        let trims = source.replace("m.content or ''", "m.content | trim");
        let refused = taught(&trims, &empty, None).unwrap_err();
        assert!(
            matches!(refused, ChatError::EmptyAnswer { message: 2 }),
            "{refused}"
        );
    }
    let endless = source.replace("\0", "\n");
    let found = vec![Finding::NoStop; 2];
    assert_eq!(taught(&endless, &two_turns(), None).unwrap().1, found);
}

/// OpenAI's own form has arguments as a text with JSON in it.
#[test]
fn arguments_that_are_a_text_become_an_object() {
    let calls = |arguments: Value| {
        let call =
            json!({"type": "function", "function": {"name": "tides", "arguments": arguments}});
        json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [call]}]})
    };
    let source = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}\
                  {{ c.function.arguments | tojson }}{% endfor %}\0{% endfor %}{% if add_generation_prompt %}a:{% endif %}";
    let learnt = |source: &str, arguments: Value| {
        let (examples, found) = taught(source, &calls(arguments), None).unwrap();
        assert!(found.is_empty(), "{found:?}");
        examples[0].strip_prefix(">u:a\0a:<").unwrap().to_owned()
    };
    let object = json!({"port": "Brest"});
    for arguments in [object, json!("{\"port\":\"Brest\"}")] {
        assert_eq!(learnt(source, arguments), "{\"port\": \"Brest\"}\0");
    }
    assert_eq!(learnt(source, json!("Brest")), "\"Brest\"\0");
    // Reading these would lose digits or a name.
    for kept in [r#"{"a":18446744073709551616}"#, r#"{"a":1,"a":2}"#] {
        let expected = format!("{}\0", json!(kept));
        assert_eq!(learnt(source, json!(kept)), expected);
    }
    let read = r#"{"\"": "99999999999999999999", "a": [18446744073709551615, 1e20]}"#;
    let expected = r#"{"\"": "99999999999999999999", "a": [18446744073709551615, 1e+20]}"#;
    assert_eq!(learnt(source, json!(read)), format!("{expected}\0"));
    // DeepSeek-V3 appends them to a text, which no object allows.
    let appends = source.replace(
        "c.function.arguments | tojson",
        "'=' + c.function.arguments",
    );
    let text = "{\"port\":\"Brest\"}";
    assert_eq!(learnt(&appends, json!(text)), format!("={text}\0"));
}
