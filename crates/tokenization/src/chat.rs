//! Conversations as tokens, of which only the assistant's turns are to be learnt.

use crate::error::{ChatError, TokenizerError};
use crate::turns::{Dialogue, Finding, Rendered, Taught, Turns};
use crate::{ChatTemplate, Tokenizer, assistant, messages};
use serde_json::Value;
use std::ops::Range;

/// What is learnt of conversations.
#[derive(Clone, Copy, Debug, Default)]
pub struct Teaching {
    /// Which of the assistant's turns; none: all in one example, or each in an example of its own where the template writes turns
    /// differently once later ones come.
    pub turns: Option<Turns>,
    /// Whether an answer may be empty.
    pub allow_empty: bool,
}

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

/// The examples that are made of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Examples {
    /// At least one.
    pub examples: Vec<Conversation>,
    /// What nobody may have meant. Those about answers are there once for each.
    pub findings: Vec<Finding>,
}

impl ChatTemplate {
    /// Renders and encodes `messages`, for an assistant that has `tools`: a list, or null. All turns of the assistant are learnt,
    /// in one example.
    ///
    /// # Errors
    /// As [`ChatTemplate::examples`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Value],
        tools: &Value,
    ) -> Result<Conversation, ChatError> {
        let chat = Dialogue {
            messages,
            tools,
            given: 0,
        };
        let teaching = Teaching {
            turns: Some(Turns::All),
            allow_empty: true,
        };
        let mut examples = self.examples(tokenizer, chat, teaching)?.examples;
        Ok(examples.remove(0))
    }

    /// Renders and encodes a conversation: one example, or one for each answer.
    ///
    /// A turn of the assistant is what the template puts between `{% generation %}` and `{% endgeneration %}`; in a
    /// template without these, what a message of the role `assistant` adds to the text of the messages before it,
    /// prompt for the answer included, among it whatever the template writes to end a turn. A token that is partly in a
    /// turn counts.
    ///
    /// # Errors
    /// Messages that are none, that the template refuses, or of which nothing is to be learnt; an empty answer, unless it is
    /// allowed; for [`Turns::All`] a template that goes back on what it wrote before.
    pub fn examples(
        &self,
        tokenizer: &Tokenizer,
        chat: Dialogue,
        teaching: Teaching,
    ) -> Result<Examples, ChatError> {
        check(chat.messages, chat.tools)?;
        let with = |messages| self.examples_of(tokenizer, Dialogue { messages, ..chat }, teaching);
        let Some(parsed) = messages::with_arguments(chat.messages) else {
            return with(chat.messages);
        };
        // Some templates append arguments to a text, and refuse objects.
        match with(&parsed) {
            Err(refused @ ChatError::Render { .. }) => with(chat.messages).map_err(|_| refused),
            examples => examples,
        }
    }

    fn examples_of(
        &self,
        tokenizer: &Tokenizer,
        chat: Dialogue,
        teaching: Teaching,
    ) -> Result<Examples, ChatError> {
        let rendered = Rendered {
            template: self.with(chat.tools),
            tokenizer,
            chat,
        };
        let mut findings = rendered.left_out()?;
        let taught = match teaching.turns {
            Some(Turns::All) => vec![rendered.all()?],
            Some(Turns::Each) => rendered.each()?,
            Some(Turns::Last) => rendered.last()?,
            None => match rendered.all() {
                Err(ChatError::NotAPrefix { .. }) => {
                    findings.push(Finding::Divided);
                    rendered.each()?
                }
                all => vec![all?],
            },
        };
        let mut examples = Vec::with_capacity(taught.len());
        for taught in taught {
            let empty = rendered.empty_answers(&taught)?;
            if let (Some(&message), false) = (empty.first(), teaching.allow_empty) {
                return Err(ChatError::EmptyAnswer {
                    message: message + 1,
                });
            }
            findings.extend(empty.iter().map(|_| Finding::EmptyAnswer));
            findings.extend((0..taught.other_prompts).map(|_| Finding::OtherPrompt));
            examples.push(taught.encode(tokenizer, &mut findings)?);
        }
        match examples.is_empty() {
            true => Err(ChatError::NothingLearnt),
            false => Ok(Examples { examples, findings }),
        }
    }
}

impl Taught {
    fn encode(
        self,
        tokenizer: &Tokenizer,
        findings: &mut Vec<Finding>,
    ) -> Result<Conversation, ChatError> {
        let tokens = tokenizer.encode_with_offsets(&self.text)?;
        let masked = masked(&tokens, &self.turns);
        if masked.iter().map(Range::len).sum::<usize>() == tokens.len() {
            return Err(ChatError::NothingLearnt);
        }
        for turn in self.ends() {
            let learnt = tokens.iter().filter(|(_, bytes)| is_within(bytes, turn));
            if !tokenizer.ends_in_stop(&self.text, learnt) {
                findings.push(Finding::NoStop);
            }
        }
        Ok(Conversation {
            tokens: tokens.into_iter().map(|(token, _)| token).collect(),
            masked,
            text_bytes: self.text.len(),
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
    let is_learnt = |bytes: &Range<usize>| learnt.iter().any(|turn| is_within(bytes, turn));
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

/// Whether some of a token's bytes are in a turn.
fn is_within(bytes: &Range<usize>, turn: &Range<usize>) -> bool {
    bytes.start < turn.end && turn.start < bytes.end
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
