//! Tokens to text, one token at a time.

use crate::Tokenizer;

/// More tokens than any character is made of; bytes that never become text are shown by then.
const LONGEST_CHARACTER: usize = 16;

/// Tokens of a prompt that are decoded with what follows it.
const CONTEXT: usize = 32;

/// Decodes tokens as they come, and holds back what is not a whole character yet.
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// Tokens whose text is out, as context (some decoders drop the space before a first word), then those held back.
    tokens: Vec<u32>,
    /// How many of them are context.
    shown: usize,
}

impl Tokenizer {
    /// The text that `tokens` add to that of `prompt`. Decoded alone they may lack the space before their first word: some
    /// decoders drop it at the beginning of a text.
    pub fn decode_after(&self, prompt: &[u32], tokens: &[u32]) -> String {
        let mut stream = self.stream_after(prompt);
        let text: String = tokens.iter().map(|token| stream.push(*token)).collect();
        text + &stream.finish()
    }

    /// Decodes token by token what follows `prompt`, which may be empty.
    pub fn stream_after(&self, prompt: &[u32]) -> TextStream<'_> {
        TextStream::new(self, prompt)
    }
}

impl<'a> TextStream<'a> {
    fn new(tokenizer: &'a Tokenizer, prompt: &[u32]) -> TextStream<'a> {
        // The end of a long prompt says as much as the whole, and is decoded again for every token.
        let context = &prompt[prompt.len().saturating_sub(CONTEXT)..];
        TextStream {
            tokenizer,
            tokens: context.into(),
            shown: context.len(),
        }
    }

    /// The text that `token` completes; empty within a character and for special tokens.
    pub fn push(&mut self, token: u32) -> String {
        self.tokens.push(token);
        let whole = self.tokenizer.decode(&self.tokens);
        let held = self.tokens.len() - self.shown;
        if whole.ends_with(char::REPLACEMENT_CHARACTER) && held < LONGEST_CHARACTER {
            return String::new();
        }
        self.show(&whole)
    }

    /// What is still held back, with U+FFFD for the bytes that are no character.
    pub fn finish(mut self) -> String {
        let whole = self.tokenizer.decode(&self.tokens);
        self.show(&whole)
    }

    fn show(&mut self, whole: &str) -> String {
        let before = self.tokenizer.decode(&self.tokens[..self.shown]);
        let Some(new) = whole.get(before.len()..).filter(|new| !new.is_empty()) else {
            return String::new();
        };
        self.tokens.drain(..self.shown);
        self.shown = self.tokens.len();
        new.into()
    }
}

#[cfg(test)]
mod tests {
    use crate::Tokenizer;

    #[test]
    fn characters_come_whole_and_broken_ones_in_the_end() {
        let bytes = Tokenizer::bytes();
        let mut stream = bytes.stream_after(&[]);
        let text: Vec<String> = "aé🦀".bytes().map(|b| stream.push(b.into())).collect();
        assert_eq!(text, ["a", "", "é", "", "", "", "🦀"]);
        assert_eq!(stream.push(0xf0), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn bytes_that_are_no_text_do_not_hold_the_rest_back() {
        let bytes = Tokenizer::bytes();
        let mut stream = bytes.stream_after(&[]);
        let text: String = (0..40).map(|_| stream.push(0xff)).collect();
        assert_eq!(text.chars().count(), 32);
        assert_eq!(stream.push(u32::from(b'a')), "\u{fffd}".repeat(8) + "a");
    }
}
