//! Tokenizers and templates from anywhere: an error or a tokenizer, and no panic.

use proptest::prelude::*;
use std::path::Path;
use tokenization::{ChatTemplate, Tokenizer, TokenizerError};

proptest! {
    #[test]
    fn bytes_round_trip(text in "\\PC*") {
        let bytes = Tokenizer::bytes();
        let tokens = bytes.encode(&text).unwrap();
        prop_assert_eq!(bytes.decode(&tokens), text.clone());
        let mut stream = bytes.stream_after(&[]);
        let streamed: String = tokens.iter().map(|token| stream.push(*token)).collect();
        prop_assert_eq!(streamed + &stream.finish(), text);
    }

    #[test]
    fn byte_level_round_trips(text in "\\PC*") {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chatml");
        let tokenizer = Tokenizer::open(&folder).unwrap();
        let tokens = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&tokens), text);
    }

    #[test]
    fn files_of_any_bytes(family in "mistral|chatml", at in any::<prop::sample::Index>(), len in 0usize..40, bytes in prop::collection::vec(any::<u8>(), 0..40)) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(&family);
        let workplace = tempfile::tempdir().unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
            let Ok(mut contents) = std::fs::read(folder.join(name)) else { continue };
            let start = at.index(contents.len());
            let end = contents.len().min(start + len);
            contents.splice(start..end, bytes.iter().copied());
            std::fs::write(workplace.path().join(name), contents).unwrap();
        }
        if let Ok(tokenizer) = Tokenizer::open(workplace.path()) {
            let _ = tokenizer.encode("some text").map(|tokens| tokenizer.decode(&tokens));
        }
        let message = serde_json::json!({"role": "assistant", "content": "x"});
        if let Ok(Some(template)) = ChatTemplate::open(workplace.path()) {
            let _ = template.encode(&Tokenizer::bytes(), &[message], &serde_json::Value::Null);
        }
    }

    #[test]
    fn templates_of_any_text(template in "(\\{%|%\\}|\\{\\{|\\}\\}|-|generation|endgeneration|messages| |\\PC)*") {
        let workplace = tempfile::tempdir().unwrap();
        std::fs::write(workplace.path().join("chat_template.jinja"), template).unwrap();
        if let Ok(Some(template)) = ChatTemplate::open(workplace.path()) {
            let message = serde_json::json!({"role": "assistant", "content": "x"});
            let _ = template.encode(&Tokenizer::bytes(), &[message], &serde_json::Value::Null);
        }
    }
}

#[test]
fn what_is_not_there() {
    let error = Tokenizer::open(Path::new("nowhere/tokenizer.json")).unwrap_err();
    assert!(matches!(error, TokenizerError::Missing { .. }), "{error}");
    assert!(error.to_string().contains("the word `bytes`"));
    let workplace = tempfile::tempdir().unwrap();
    assert!(ChatTemplate::open(workplace.path()).unwrap().is_none());
}
