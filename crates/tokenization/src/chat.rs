//! Conversations as tokens, of which only the assistant's turns are to be learnt.

use crate::error::{ChatError, TokenizerError};
use crate::{ChatTemplate, Tokenizer, assistant};
use serde_json::Value;
use std::ops::Range;

/// A conversation or a completion, encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Ranges of tokens that are not the assistant's, or the prompt's: never targets. In order, and apart.
    pub masked: Vec<Range<usize>>,
    /// Bytes of its text.
    pub text_bytes: usize,
}

impl ChatTemplate {
    /// Renders and encodes `messages`, for an assistant that has `tools`: a list, or null.
    ///
    /// A turn of the assistant is what the template puts between `{% generation %}` and `{% endgeneration %}`; in a
    /// template without these, what a message of the role `assistant` adds to the text of the messages before it,
    /// prompt for the answer included, among it whatever the template writes to end a turn. A token that is partly in a
    /// turn counts.
    ///
    /// # Errors
    /// Messages that are none, that the template refuses, or of which nothing is to be learnt; a template that goes back
    /// on what it wrote before.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        tools: &Value,
    ) -> Result<Conversation, ChatError> {
        self.encode_after(tokenizer, messages, tools, 0)
    }

    /// The same, with the first `given` turns of the assistant as part of what is asked: they are not learnt.
    ///
    /// # Errors
    /// As [`ChatTemplate::encode`].
    pub fn encode_after(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        tools: &Value,
        given: usize,
    ) -> Result<Conversation, ChatError> {
        check(messages, tools)?;
        let rendered = Rendered {
            template: self.with(tools),
            messages,
            tools,
        };
        let (text, turns) = if rendered.template.has_blocks {
            assistant::take_marks(&rendered.text(messages.len(), false)?)
        } else {
            rendered.turns_by_prefix()?
        };
        let tokens = tokenizer.encode_with_offsets(&text)?;
        let masked = masked(&tokens, turns.get(given..).unwrap_or_default());
        if masked.iter().map(Range::len).sum::<usize>() == tokens.len() {
            return Err(ChatError::NothingLearnt);
        }
        Ok(Conversation {
            tokens: tokens.into_iter().map(|(token, _)| token).collect(),
            masked,
            text_bytes: text.len(),
        })
    }
}

impl Tokenizer {
    /// Encodes a prompt and how it goes on, of which the latter is learnt, with the token that ends a text. A token that is
    /// partly in the completion counts.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_completion(
        &self,
        prompt: &str,
        completion: &str,
    ) -> Result<Conversation, TokenizerError> {
        let text = format!("{prompt}{completion}");
        let tokens = self.encode_with_offsets(&text)?;
        let learnt = prompt.len()..text.len();
        Ok(Conversation {
            masked: masked(&tokens, &[learnt]),
            tokens: tokens
                .into_iter()
                .map(|(token, _)| token)
                .chain(self.end_of_text())
                .collect(),
            text_bytes: text.len(),
        })
    }
}

/// Ranges of tokens of which nothing is in the bytes that are `learnt`.
fn masked(tokens: &[(u32, Range<usize>)], learnt: &[Range<usize>]) -> Vec<Range<usize>> {
    let is_learnt = |bytes: &Range<usize>| {
        let mut learnt = learnt.iter();
        learnt.any(|turn| bytes.start < turn.end && turn.start < bytes.end)
    };
    let mut masked: Vec<Range<usize>> = Vec::new();
    for (at, (_, bytes)) in tokens.iter().enumerate() {
        match masked.last_mut() {
            _ if is_learnt(bytes) => {}
            Some(range) if range.end == at => range.end += 1,
            _ => masked.push(at..at + 1),
        }
    }
    masked
}

/// A conversation and what renders it.
struct Rendered<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Value],
    tools: &'a Value,
}

impl Rendered<'_> {
    fn turns_by_prefix(&self) -> Result<(String, Vec<Range<usize>>), ChatError> {
        let whole = self.text(self.messages.len(), false)?;
        let mut turns = Vec::new();
        for (at, message) in self.messages.iter().enumerate() {
            if message["role"] != "assistant" {
                continue;
            }
            let with = self.text(at + 1, false)?;
            let before = match self.text(at, true) {
                Ok(before) if with.starts_with(&before) => before.len(),
                _ if at == 0 => self.header(&with)?,
                Ok(_) => return Err(ChatError::NotAPrefix { message: at + 1 }),
                Err(error) => return Err(error),
            };
            if !whole.starts_with(&with) {
                return Err(ChatError::NotAPrefix { message: at + 1 });
            }
            turns.push(before..with.len());
        }
        Ok((whole, turns))
    }

    /// Bytes that the template writes before what the first message says: nothing can be rendered without that message by
    /// a template that looks at it, so they are those that stay when it says something else.
    fn header(&self, with: &str) -> Result<usize, ChatError> {
        let mut other = self.messages[0].clone();
        other["content"] = assistant::MARKS[0].to_string().into();
        let other = self.render(&[other], false)?;
        let same = with
            .char_indices()
            .zip(other.chars())
            .find(|((_, a), b)| a != b);
        Ok(same.map_or(with.len(), |((at, _), _)| at))
    }

    fn text(&self, count: usize, prompt: bool) -> Result<String, ChatError> {
        self.render(&self.messages[..count], prompt)
    }

    fn render(&self, messages: &[Value], prompt: bool) -> Result<String, ChatError> {
        let rendered = self.template.render_marked(messages, self.tools, prompt);
        rendered.map_err(|error| ChatError::Render {
            messages: messages.len(),
            reason: error.to_string(),
        })
    }
}

/// Messages have roles, one of them is the assistant's, and none has what marks turns while a template is rendered.
fn check(messages: &[Value], tools: &Value) -> Result<(), ChatError> {
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
    match messages.iter().any(has_marks) || has_marks(tools) {
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
