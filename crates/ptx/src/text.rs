//! PTX text as tokens, each with its line.

use crate::ParseError;

/// A piece of PTX text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Token<'t> {
    /// A name, a directive, a register or an opcode with its modifiers: `add.s64`, `.reg`, `%tid.x`, `$L__BB0_1`.
    Word(&'t str),
    /// An integer.
    Integer(u64),
    /// `0f3F800000`.
    Float(u32),
    /// `0d3FF0000000000000`.
    Double(u64),
    /// The text between quotes.
    Quoted,
    /// One character of punctuation.
    Mark(u8),
}

/// The tokens of a text, and the line of each, from 1.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, ParseError> {
    let bytes = text.as_bytes();
    let (mut tokens, mut at, mut line) = (Vec::new(), 0, 1);
    while let Some(&byte) = bytes.get(at) {
        let start = at;
        let rest = &bytes[at..];
        match byte {
            b'\n' => {
                line += 1;
                at += 1;
            }
            // The embedded image ends in a zero.
            b' ' | b'\t' | b'\r' | 0 => at += 1,
            b'/' if rest.starts_with(b"//") => at += length(rest, |byte| byte != b'\n'),
            b'"' => {
                at += 2 + length(&rest[1..], |byte| byte != b'"');
                tokens.push((Token::Quoted, line));
            }
            b'0'..=b'9' => {
                at += length(rest, |byte| byte.is_ascii_alphanumeric());
                let token = number(&text[start..at]).ok_or_else(|| ParseError {
                    line,
                    message: format!("`{}` is no number", &text[start..at]),
                })?;
                tokens.push((token, line));
            }
            byte if is_of_word(byte) => {
                at += word_length(rest);
                tokens.push((Token::Word(&text[start..at]), line));
            }
            byte => {
                at += 1;
                tokens.push((Token::Mark(byte), line));
            }
        }
    }
    Ok(tokens)
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Two colons are within a word (`shared::cta`), one is behind a label.
fn word_length(bytes: &[u8]) -> usize {
    let end = length(bytes, is_of_word);
    match &bytes[end..] {
        [b':', b':', rest @ ..] => end + 2 + word_length(rest),
        _ => end,
    }
}

fn length(bytes: &[u8], belongs: impl Fn(u8) -> bool) -> usize {
    let end = bytes.iter().position(|byte| !belongs(*byte));
    end.unwrap_or(bytes.len())
}

fn number(text: &str) -> Option<Token<'_>> {
    let digits = |prefix: usize| u64::from_str_radix(text[prefix..].trim_end_matches('U'), 16).ok();
    match text.get(..2) {
        Some("0f" | "0F") if text.len() == 10 => digits(2).map(|bits| Token::Float(bits as u32)),
        Some("0d" | "0D") if text.len() == 18 => digits(2).map(Token::Double),
        Some("0x" | "0X") => digits(2).map(Token::Integer),
        _ => text.trim_end_matches('U').parse().ok().map(Token::Integer),
    }
}
