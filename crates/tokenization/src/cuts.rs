//! Where a text may be cut so that its pieces have the tokens of the whole.
//!
//! A newline between two letters or digits of ASCII is such a place for byte-level BPE with the pre-tokenizers below: all
//! of them make the newline a word of its own there, whether or not the text goes on. A newline beside other characters is
//! none: `.\n` and `\n\n` are words of some. Whatever is not known here is never cut.

use serde_json::{Value, json};

/// The patterns of GPT-2, Llama 3, Qwen2 and GPT-4o.
pub(crate) const PATTERNS: [&str; 4] = [
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
];

/// The pattern of the words of the tokenizer whose `tokenizer.json` this is, if its texts may be cut.
pub(crate) fn pattern(tokenizer: &Value) -> Option<&'static str> {
    let normalizer = &tokenizer["normalizer"];
    // A mark after the newline would belong to it; an ASCII letter never changes what precedes it.
    let normalizer = normalizer.is_null() || normalizer["type"] == "NFC";
    let added = tokenizer["added_tokens"].as_array();
    let added = added.is_none_or(|tokens| tokens.iter().all(keeps_to_its_side));
    words(&tokenizer["pre_tokenizer"]).filter(|_| normalizer && added)
}

/// The last place within `text` where it may be cut.
pub(crate) fn last(text: &str) -> Option<usize> {
    let mut around = text.as_bytes().windows(3);
    let at = around.rposition(|three| {
        three[0].is_ascii_alphanumeric() && three[1] == b'\n' && three[2].is_ascii_alphanumeric()
    })?;
    Some(at + 2)
}

/// An added token that contains the newline, or takes the one before it, would be torn.
fn keeps_to_its_side(token: &Value) -> bool {
    let content = token["content"].as_str().unwrap_or("\n");
    let begins_a_word = content.starts_with(|c: char| c.is_ascii_alphanumeric());
    let reaches_back = begins_a_word && token["lstrip"] == true;
    !content.contains('\n') && !reaches_back
}

fn words(pre_tokenizer: &Value) -> Option<&'static str> {
    let byte_level = |step: &Value, splits: bool| {
        let regex = step["use_regex"].as_bool().unwrap_or(true);
        step["type"] == "ByteLevel" && step["add_prefix_space"] == false && regex == splits
    };
    let known = |step: &Value| {
        let pattern = &step["pattern"]["Regex"];
        let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        PATTERNS
            .into_iter()
            .find(|known| pattern == known && *step == split)
    };
    match pre_tokenizer["pretokenizers"].as_array().map(Vec::as_slice) {
        Some([split, bytes]) => known(split).filter(|_| byte_level(bytes, false)),
        Some([bytes]) => byte_level(bytes, true).then_some(PATTERNS[0]),
        Some(_) => None,
        None => byte_level(pre_tokenizer, true).then_some(PATTERNS[0]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_between_letters_and_digits() {
        assert_eq!(last("a\nb"), Some(2));
        assert_eq!(last("a\nb\n\nc.\nd \ne\n"), Some(2));
        for text in ["", "a", "a\n", "\na", "a\n b", "a.\nb", "a\r\nb", "a\né"] {
            assert_eq!(last(text), None, "{text:?}");
        }
    }

    #[test]
    fn what_is_not_known_is_never_cut() {
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true});
        let with = |key: &str, value: Value| {
            let mut tokenizer = json!({"pre_tokenizer": byte_level});
            tokenizer[key] = value;
            pattern(&tokenizer).is_some()
        };
        assert!(with("normalizer", json!({"type": "NFC"})));
        assert!(!with("normalizer", json!({"type": "Lowercase"})));
        assert!(with(
            "added_tokens",
            json!([{"content": "<s>", "lstrip": true}])
        ));
        assert!(!with(
            "added_tokens",
            json!([{"content": "s", "lstrip": true}])
        ));
        assert!(!with("added_tokens", json!([{"content": "a\nb"}])));
        assert!(!with("pre_tokenizer", json!({"type": "Metaspace"})));
        assert!(!with("pre_tokenizer", Value::Null));
        assert!(pattern(&Value::Null).is_none());
    }
}
