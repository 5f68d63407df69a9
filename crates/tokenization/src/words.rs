//! Byte-level BPE word by word, with a table of the words that were met: what `tokenizers` computes, without the
//! bookkeeping of offsets, which is most of its time.
//!
//! It takes the tokenizers whose pre-tokenizer is known ([`cuts`]), and texts without added tokens and with nothing to
//! normalise; the library has the rest.

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
        let added = tokenizer["added_tokens"]
            .as_array()
            .map_or(&[][..], Vec::as_slice);
        let added = added
            .iter()
            .filter_map(|token| token["content"].as_str())
            .filter(|content| !content.is_empty());
        Some(Words {
            id: TOKENIZERS.fetch_add(1, Ordering::Relaxed),
            words: Regex::new(pattern).ok()?,
            added: AhoCorasick::new(added).ok()?,
            normalised: !tokenizer["normalizer"].is_null(),
            letters: letters(),
        })
    }

    /// Appends the tokens of `text`; false, and nothing appended, where the library has to find them.
    pub(crate) fn encode(&self, model: &ModelWrapper, text: &str, tokens: &mut Vec<u32>) -> bool {
        // Below the first combining mark, a text is its own NFC.
        let is_normal = !self.normalised || text.chars().all(|c| c < '\u{300}');
        let before = tokens.len();
        let found =
            is_normal && !self.added.is_match(text) && self.append(model, text, tokens).is_some();
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

/// GPT-2's letters for bytes: printable ones of Latin-1 stand for themselves, the others for those from U+0100 on.
fn letters() -> [char; 256] {
    let mut others = '\u{100}'..;
    std::array::from_fn(|byte| match char::from(byte as u8) {
        letter @ ('!'..='~' | '¡'..='¬' | '®'..='ÿ') => letter,
        _ => others.next().expect("there are more than 256 characters"),
    })
}
