//! Byte-level BPE word by word, with a table of the words that were met: what `tokenizers` computes, without the
//! bookkeeping of offsets, which is most of its time.
//!
//! It takes the tokenizers whose pre-tokenizer is known ([`cuts`]), and texts without added tokens and with nothing to
//! normalise ([`is_normal`]); the library has the rest.

use crate::cuts;
use aho_corasick::AhoCorasick;
use fancy_regex::Regex;
use serde_json::Value;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use tokenizers::{Model, ModelWrapper};

/// Words that a thread remembers.
const REMEMBERED: usize = 1 << 17;

/// Longer words are rarely met again.
const LONGEST: usize = 64;

/// Splits texts into words and remembers their tokens.
#[derive(Debug)]
pub(crate) struct Words {
    /// Tells tokenizers apart in the table of a thread.
    id: u64,
    words: Regex,
    added: AhoCorasick,
    /// Whether texts are normalised (NFC).
    normalised: bool,
    /// The character that stands for each byte.
    letters: [char; 256],
}

#[derive(Default)]
struct Remembered {
    tokenizer: u64,
    tokens: HashMap<Box<str>, Box<[u32]>>,
}

thread_local! {
    static REMEMBERED_WORDS: RefCell<Remembered> = RefCell::default();
}

impl Words {
    /// None for a tokenizer that is not known well enough.
    pub(crate) fn new(tokenizer: &Value, model: &ModelWrapper) -> Option<Words> {
        static TOKENIZERS: AtomicU64 = AtomicU64::new(1);
        let pattern = cuts::pattern(tokenizer)?;
        if !matches!(model, ModelWrapper::BPE(bpe) if bpe.dropout.is_none()) {
            return None;
        }
        let normalised = !tokenizer["normalizer"].is_null();
        let added = tokenizer["added_tokens"].as_array();
        let added = added.map_or(&[][..], Vec::as_slice).iter();
        let added = added.filter_map(|token| Some((token["content"].as_str()?, token)));
        // The library looks for some in what it normalised, by their normalised form.
        let differs =
            |(content, token): (&str, &Value)| token["normalized"] != false && !is_normal(content);
        if normalised && added.clone().any(differs) {
            return None;
        }
        let added = added
            .map(|(content, _)| content)
            .filter(|content| !content.is_empty());
        Some(Words {
            id: TOKENIZERS.fetch_add(1, Ordering::Relaxed),
            words: Regex::new(pattern).ok()?,
            added: AhoCorasick::new(added).ok()?,
            normalised,
            letters: letters(),
        })
    }

    /// Appends the tokens of `text`; false, and nothing appended, where the library has to find them.
    pub(crate) fn encode(&self, model: &ModelWrapper, text: &str, tokens: &mut Vec<u32>) -> bool {
        let before = tokens.len();
        let found = (!self.normalised || is_normal(text))
            && !self.added.is_match(text)
            && self.append(model, text, tokens).is_some();
        if !found {
            tokens.truncate(before);
        }
        found
    }

    fn append(&self, model: &ModelWrapper, text: &str, tokens: &mut Vec<u32>) -> Option<()> {
        REMEMBERED_WORDS.with_borrow_mut(|remembered| {
            if remembered.tokenizer != self.id || remembered.tokens.len() >= REMEMBERED {
                remembered.tokenizer = self.id;
                remembered.tokens.clear();
            }
            let mut end = 0;
            for word in self.words.find_iter(text) {
                let word = word.ok()?;
                // What no word matches is a word, as it is there.
                if end < word.start() {
                    self.word(model, &text[end..word.start()], remembered, tokens)?;
                }
                self.word(model, word.as_str(), remembered, tokens)?;
                end = word.end();
            }
            match &text[end..] {
                "" => Some(()),
                rest => self.word(model, rest, remembered, tokens),
            }
        })
    }

    fn word(
        &self,
        model: &ModelWrapper,
        word: &str,
        remembered: &mut Remembered,
        tokens: &mut Vec<u32>,
    ) -> Option<()> {
        if let Some(known) = remembered.tokens.get(word) {
            tokens.extend_from_slice(known);
            return Some(());
        }
        let letters: String = word
            .bytes()
            .map(|byte| self.letters[usize::from(byte)])
            .collect();
        let found = model.tokenize(&letters).ok()?;
        let found: Box<[u32]> = found.into_iter().map(|token| token.id).collect();
        tokens.extend_from_slice(&found);
        if word.len() <= LONGEST {
            remembered.tokens.insert(word.into(), found);
        }
        Some(())
    }
}

/// Whether `text` is certainly its own NFC: it is of characters that are, that are no combining marks, and that compose with
/// none of each other.
fn is_normal(text: &str) -> bool {
    text.chars().all(|c| {
        matches!(
            c,
            '\0'..='\u{2ff}' // below the first combining mark
            | '\u{400}'..='\u{482}' // Cyrillic
            | '\u{2010}'..='\u{2027}' // dashes, quotation marks, an ellipsis
            | '\u{3001}'..='\u{3029}' // punctuation of Chinese and Japanese
            | '\u{3041}'..='\u{3096}' // Hiragana, and
            | '\u{309b}'..='\u{30ff}' // Katakana, without the two marks between them
            | '\u{4e00}'..='\u{9fff}' // Chinese characters
            | '\u{ac00}'..='\u{d7a3}' // Korean syllables
            | '\u{ff01}'..='\u{ff5e}' // wide forms of ASCII
        )
    })
}

/// GPT-2's letters for bytes: printable ones of Latin-1 stand for themselves, the others for those from U+0100 on.
fn letters() -> [char; 256] {
    let mut others = '\u{100}'..;
    std::array::from_fn(|byte| match char::from(byte as u8) {
        letter @ ('!'..='~' | '¡'..='¬' | '®'..='ÿ') => letter,
        _ => others.next().expect("there are more than 256 characters"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;
    use std::sync::LazyLock;

    type BothTokenizers = (tokenizers::Tokenizer, Option<Words>);

    /// A fixture's tokenizer, changed.
    fn tokenizer(name: &str, change: impl FnOnce(&mut Value)) -> BothTokenizers {
        let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures");
        let file = std::fs::read(format!("{fixtures}/{name}/tokenizer.json")).unwrap();
        let mut json = serde_json::from_slice(&file).unwrap();
        change(&mut json);
        let library = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        let words = Words::new(&json, library.get_model());
        (library, words)
    }

    /// All patterns, with NFC and without.
    static KNOWN: LazyLock<Vec<BothTokenizers>> = LazyLock::new(|| {
        let normalizers = [Value::Null, json!({"type": "NFC"})];
        let with = |name: &str, pattern: Option<&str>| {
            normalizers.clone().map(|normalizer| {
                tokenizer(name, |json| {
                    json["normalizer"] = normalizer;
                    if let Some(pattern) = pattern {
                        json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] =
                            pattern.into();
                    }
                })
            })
        };
        let [_, split @ ..] = cuts::PATTERNS; // the first is what ByteLevel does by itself
        let split = split
            .into_iter()
            .flat_map(|pattern| with("qwen3", Some(pattern)));
        with("chatml", None).into_iter().chain(split).collect()
    });

    /// The tokens of all that words take are the library's; whether all took it.
    fn agree(text: &str) -> bool {
        let took = KNOWN.iter().map(|(library, words)| {
            let mut tokens = vec![7];
            let words = words.as_ref().expect("they are known");
            let took = words.encode(library.get_model(), text, &mut tokens);
            let expected = library.encode(text, false).unwrap();
            let expected = if took { expected.get_ids() } else { &[] };
            assert_eq!(tokens[1..], *expected, "{text:?}");
            took
        });
        took.collect::<Vec<_>>().iter().all(|took| *took)
    }

    proptest! {
        #[test]
        fn words_are_those_of_the_library(text in "(\\PC|[ \n\t\r/]|[A-Za-z]{1,8}|'(s|ll|RE)|[0-9]{1,5}|<\\|im_end\\|>|<think>|e\u{301}|\u{a0}|\u{85})*") {
            agree(&text);
        }

        #[test]
        fn most_scripts_are_taken(text in "([ -~]|[ \n\t\r]|'(s|ll|RE)|[ -˿]|[Ѐ-҂]{1,5}|[‐-‧]|[、-〩]|[ぁ-ゖ゛-ヿ]{1,3}|[一-鿿]{1,4}|[가-힣]{1,3}|[！-～])*") {
            let marked = text.contains("<|") || text.contains("<think>") || text.contains("</");
            prop_assert!(agree(&text) || marked);
        }
    }

    #[test]
    fn what_could_be_normalised_is_for_the_library() {
        assert!(agree(
            "“It’s a naïve — café…” 他说：「好。」 Да. 그래 カフェ"
        ));
        for text in [
            "cafe\u{301}",
            "\u{212b}",
            "\u{1100}\u{1161}",
            "か\u{3099}",
            "\u{374}",
            "\u{f900}",
        ] {
            assert!(!is_normal(text) && !agree(text), "{text:?}");
        }
    }

    #[test]
    fn added_tokens_that_are_normalised() {
        let with = |content: &str, normalized: bool| {
            tokenizer("qwen3", |json| {
                let vocab = json["model"]["vocab"].as_object().unwrap().len() as u64;
                let tokens = json["added_tokens"].as_array_mut().unwrap();
                let mut token = tokens[0].clone();
                let ids = tokens.iter().filter_map(|token| token["id"].as_u64());
                token["id"] = (ids.max().unwrap().max(vocab) + 1).into();
                token["content"] = content.into();
                token["normalized"] = normalized.into();
                token["special"] = false.into();
                tokens.push(token);
            })
        };
        let (library, words) = with("cafe\u{301}", true);
        let id = library.token_to_id("cafe\u{301}").unwrap();
        let tokens = library.encode("un caf\u{e9} noir, ", false).unwrap();
        assert!(tokens.get_ids().contains(&id), "the library takes it");
        assert!(words.is_none());
        assert!(with("cafe\u{301}", false).1.is_some());
        assert!(with("caf\u{e9}", true).1.is_some());
    }
}
