//! Conversations as tokens, of which only the assistant's turns are to be learnt.

use crate::error::ChatError;
use crate::{ChatTemplate, Tokenizer, assistant};
use serde_json::Value;
use std::ops::Range;

/// A conversation, rendered and encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Ranges of tokens that are not the assistant's: never targets. In order, and apart.
    pub masked: Vec<Range<usize>>,
    /// Bytes of its text.
    pub text_bytes: usize,
}

impl ChatTemplate {
    /// Renders and encodes `messages`.
    ///
    /// A turn of the assistant is what the template puts between `{% generation %}` and `{% endgeneration %}`; in a
    /// template without these, what a message of the role `assistant` adds to the text of the messages before it,
    /// prompt for the answer included, among it whatever the template writes to end a turn. A token that is partly in a
    /// turn counts.
    ///
    /// # Errors
    /// Messages that are none, or that the template refuses; a template that goes back on what it wrote before.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
    ) -> Result<Conversation, ChatError> {
        check(messages)?;
        let (text, turns) = if self.has_blocks {
            assistant::take_marks(&self.text(messages, messages.len(), false)?)
        } else {
            self.turns_by_prefix(messages)?
        };
        let tokens = tokenizer.encode_with_offsets(&text)?;
        let learnt = |bytes: &Range<usize>| {
            turns
                .iter()
                .any(|turn| bytes.start < turn.end && turn.start < bytes.end)
        };
        let mut masked: Vec<Range<usize>> = Vec::new();
        for (at, (_, bytes)) in tokens.iter().enumerate() {
            match masked.last_mut() {
                _ if learnt(bytes) => {}
                Some(range) if range.end == at => range.end += 1,
                _ => masked.push(at..at + 1),
            }
        }
        Ok(Conversation {
            tokens: tokens.into_iter().map(|(token, _)| token).collect(),
            masked,
            text_bytes: text.len(),
        })
    }

    fn turns_by_prefix(
        &self,
        messages: &[Value],
    ) -> Result<(String, Vec<Range<usize>>), ChatError> {
        let whole = self.text(messages, messages.len(), false)?;
        let mut turns = Vec::new();
        for (at, _) in messages
            .iter()
            .enumerate()
            .filter(|(_, message)| message["role"] == "assistant")
        {
            let before = self.text(messages, at, true)?;
            let with = self.text(messages, at + 1, false)?;
            if !with.starts_with(&before) || !whole.starts_with(&with) {
                return Err(ChatError::NotAPrefix { message: at + 1 });
            }
            turns.push(before.len()..with.len());
        }
        Ok((whole, turns))
    }

    fn text(&self, messages: &[Value], count: usize, prompt: bool) -> Result<String, ChatError> {
        let rendered = self.render_marked(&messages[..count], prompt);
        rendered.map_err(|error| ChatError::Render {
            messages: count,
            reason: error.to_string(),
        })
    }
}

/// Messages have roles, one of them is the assistant's, and none has what marks turns while a template is rendered.
fn check(messages: &[Value]) -> Result<(), ChatError> {
    for (at, message) in messages.iter().enumerate() {
        if !message["role"].is_string() {
            let mut found = message.to_string();
            found.truncate(found.floor_char_boundary(80));
            return Err(ChatError::NotAMessage {
                message: at + 1,
                found,
            });
        }
    }
    if !messages
        .iter()
        .any(|message| message["role"] == "assistant")
    {
        return Err(ChatError::NoAssistant {
            messages: messages.len(),
        });
    }
    match messages.iter().any(has_marks) {
        true => Err(ChatError::Noncharacter),
        false => Ok(()),
    }
}

fn has_marks(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains(assistant::MARKS),
        Value::Array(values) => values.iter().any(has_marks),
        Value::Object(fields) => fields.values().any(has_marks),
        _ => false,
    }
}
