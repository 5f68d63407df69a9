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
        let mut stream = bytes.stream();
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

    /// Tokens are found by words, or by the library: the same.
    #[test]
    fn words_are_those_of_the_library(text in "(\\PC|[ \n\t\r]|[a-z]{1,8}|'(s|ll|RE)|[0-9]{1,5}|<\\|im_end\\|>|<think>|e\u{301}|\u{a0}|\u{85})*") {
        for name in ["chatml", "llama3", "qwen3"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name);
            let expected = tokenizers::Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
            let expected = expected.encode(text.as_str(), false).unwrap();
            let found = Tokenizer::open(&folder).unwrap().encode(&text).unwrap();
            prop_assert_eq!(&found[..], expected.get_ids(), "{}", name);
        }
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
            let _ = template.encode(&Tokenizer::bytes(), &[message]);
        }
    }

    #[test]
    fn templates_of_any_text(template in "(\\{%|%\\}|\\{\\{|\\}\\}|-|generation|endgeneration|messages| |\\PC)*") {
        let workplace = tempfile::tempdir().unwrap();
        std::fs::write(workplace.path().join("chat_template.jinja"), template).unwrap();
        if let Ok(Some(template)) = ChatTemplate::open(workplace.path()) {
            let message = serde_json::json!({"role": "assistant", "content": "x"});
            let _ = template.encode(&Tokenizer::bytes(), &[message]);
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
