//! Finds the assistant's turns in the text of a conversation.

use crate::error::ChatError;
use crate::{ChatTemplate, Tokenizer, assistant, messages};
use serde_json::Value;
use std::ops::Range;

/// Messages with the tools that the assistant has.
#[derive(Clone, Copy, Debug)]
pub struct Dialogue<'a> {
    /// The messages, each with a `role`.
    pub messages: &'a [Value],
    /// A list, or null.
    pub tools: &'a Value,
    /// Number of the assistant's first turns that are part of what is asked: they are not learnt.
    pub given: usize,
}

/// Which of the assistant's turns are learnt, and in how many examples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turns {
    /// All of them, in one example: the whole conversation.
    All,
    /// Each of them, in an example of its own: the conversation up to it.
    Each,
    /// The last of them, in one example: the conversation up to it.
    Last,
}

/// Something in a conversation's text that nobody may have meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// Each answer is an example of its own, since the template writes turns differently once later ones come.
    Divided,
    /// The template does not write the tools.
    ToolsLeftOut,
    /// The template does not write the tool calls.
    CallsLeftOut,
    /// An answer is empty.
    EmptyAnswer,
    /// An answer ends in no token that stops generation.
    NoStop,
    /// An answer does not follow the prompt that the template writes for generation.
    OtherPrompt,
}

/// A text, and what is learnt of it.
pub(crate) struct Taught {
    pub(crate) text: String,
    /// Bytes that are learnt.
    pub(crate) turns: Vec<Range<usize>>,
    /// Number of turns that do not follow the prompt that the template writes for generation.
    pub(crate) other_prompts: usize,
    /// Number of messages in it.
    messages: usize,
    /// Those of them that are learnt.
    answers: Vec<usize>,
}

impl Taught {
    /// Whether there is a turn for each answer. Marks of a template may divide answers otherwise.
    fn is_turn_for_answer(&self) -> bool {
        self.turns.len() == self.answers.len()
    }

    /// The learnt bytes that end answers, as far as they are known.
    pub(crate) fn ends(&self) -> &[Range<usize>] {
        match self.is_turn_for_answer() {
            true => &self.turns,
            false => &self.turns[self.turns.len().saturating_sub(1)..],
        }
    }
}

/// A conversation and what renders it.
pub(crate) struct Rendered<'a> {
    pub(crate) template: &'a ChatTemplate,
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) chat: Dialogue<'a>,
}

impl Rendered<'_> {
    /// All answers in the whole text.
    pub(crate) fn all(&self) -> Result<Taught, ChatError> {
        let (count, answers) = (self.chat.messages.len(), self.answers());
        let (text, mut turns) = assistant::take_marks(&self.text(count, false)?);
        let mut other_prompts = 0;
        match self.template.has_blocks {
            true => {
                let given = match answers.first() {
                    Some(&first) if self.chat.given > 0 => self.blocks(first)?,
                    _ => 0,
                };
                turns = turns.split_off(given.min(turns.len()));
            }
            false => {
                for &at in &answers {
                    let with = match at + 1 == count {
                        true => text.clone(),
                        false => self.text(at + 1, false)?,
                    };
                    let (start, is_prompted) = self.start(at, &with)?;
                    other_prompts += usize::from(!is_prompted);
                    let end = self.end(at, &with, &text)?.filter(|end| *end > start);
                    let end = end.ok_or(ChatError::NotAPrefix { message: at + 1 })?;
                    turns.push(start..end);
                }
            }
        }
        Ok(Taught {
            text,
            turns,
            other_prompts,
            messages: count,
            answers,
        })
    }

    /// Each answer in the text of the messages up to it.
    pub(crate) fn each(&self) -> Result<Vec<Taught>, ChatError> {
        let answers = self.answers().into_iter();
        answers.map(|at| self.up_to(at)).collect()
    }

    /// The last answer in the text of the messages up to it.
    pub(crate) fn last(&self) -> Result<Vec<Taught>, ChatError> {
        let last = self.answers().pop();
        last.into_iter().map(|at| self.up_to(at)).collect()
    }

    fn up_to(&self, at: usize) -> Result<Taught, ChatError> {
        let (text, mut turns) = assistant::take_marks(&self.text(at + 1, false)?);
        let mut other_prompts = 0;
        match self.template.has_blocks {
            true => turns = turns.split_off(self.blocks(at)?.min(turns.len())),
            false => {
                let (start, is_prompted) = self.start(at, &text)?;
                other_prompts = usize::from(!is_prompted);
                turns.push(start..text.len());
            }
        }
        if turns.is_empty() {
            return Err(ChatError::NothingLearnt);
        }
        Ok(Taught {
            text,
            turns,
            other_prompts,
            messages: at + 1,
            answers: vec![at],
        })
    }

    /// Number of the template's blocks in the text of the messages before `at`.
    fn blocks(&self, at: usize) -> Result<usize, ChatError> {
        match at {
            0 => Ok(0),
            at => Ok(assistant::take_marks(&self.text(at, false)?).1.len()),
        }
    }

    /// The messages that are learnt.
    fn answers(&self) -> Vec<usize> {
        let messages = self.chat.messages.iter().enumerate();
        let answers = messages.filter(|(_, message)| message["role"] == "assistant");
        answers.map(|(at, _)| at).skip(self.chat.given).collect()
    }

    /// Where answer `at` begins in `with`, a text that ends with it, and whether the generation prompt precedes it. If the template
    /// writes another prompt, the answer begins where texts with different answers first differ.
    fn start(&self, at: usize, with: &str) -> Result<(usize, bool), ChatError> {
        if let Ok(prompt) = self.text(at, true)
            && with.starts_with(&prompt)
        {
            return Ok((prompt.len(), true));
        }
        let other = self.with_mark(at)?;
        // Nothing precedes a first message, so there is no prompt to compare with.
        Ok((shared(with, &other), at == 0))
    }

    /// End of answer `at` in `whole`. `with` is the text that ends with this answer. None if `whole` does not contain it unchanged.
    fn end(&self, at: usize, with: &str, whole: &str) -> Result<Option<usize>, ChatError> {
        if whole.starts_with(with) {
            return Ok(Some(with.len()));
        }
        // What a template writes after the last message alone, such as an end-of-text token, moves to the end of the whole.
        let [own, all] = [with, whole].map(|text| self.tokenizer.encode_with_offsets(text));
        let (own, all) = (own?, all?);
        let same = own.iter().zip(&all).take_while(|(own, all)| own == all);
        let kept = &own[..same.count()];
        let end = kept.last().map_or(0, |(_, bytes)| bytes.end);
        let moved = &with[end..];
        let other = self.with_mark(at)?;
        let answer = other.rfind(assistant::MARKS[0]);
        let follows = answer.map_or(0, |mark| {
            other.len() - mark - assistant::MARKS[0].len_utf8()
        });
        let is_moved = whole.ends_with(moved) && moved.len() <= follows;
        // Another token in its place, as gpt-oss has, would leave the answer without its end.
        let stops =
            |tokens: &[(u32, Range<usize>)]| self.tokenizer.ends_in_stop(with, tokens.iter());
        Ok((is_moved && (stops(kept) || !stops(&own))).then_some(end))
    }

    /// The text of the messages up to `at`, with a mark in place of what the last of them says.
    fn with_mark(&self, at: usize) -> Result<String, ChatError> {
        let mut messages = self.chat.messages[..=at].to_vec();
        let mark = assistant::MARKS[0].to_string();
        messages[at] = messages::saying(&messages[at], &mark);
        self.render(&messages, self.chat.tools, false)
    }

    /// Learnt messages that leave no trace in the text: it is the same if they are empty.
    pub(crate) fn empty_answers(&self, taught: &Taught) -> Result<Vec<usize>, ChatError> {
        let mut empty = Vec::new();
        for (number, &at) in taught.answers.iter().enumerate() {
            let learnt = match taught.turns.get(number) {
                Some(turn) if taught.is_turn_for_answer() => &taught.text[turn.clone()],
                _ => &taught.text,
            };
            let said = self.chat.messages[at]["content"]
                .as_str()
                .unwrap_or_default()
                .trim();
            let is_empty = if learnt.trim().is_empty() {
                true
            } else if !said.is_empty() && learnt.contains(said) {
                false
            } else {
                let mut messages = self.chat.messages[..taught.messages].to_vec();
                messages[at] = messages::saying(&messages[at], "");
                let other = self.render(&messages, self.chat.tools, false);
                other.is_ok_and(|other| assistant::take_marks(&other).0 == taught.text)
            };
            if is_empty {
                empty.push(at);
            }
        }
        Ok(empty)
    }

    /// Tools and tool calls that the template does not write.
    pub(crate) fn left_out(&self) -> Result<Vec<Finding>, ChatError> {
        let Dialogue {
            messages, tools, ..
        } = self.chat;
        let has_tools = tools.as_array().is_some_and(|tools| !tools.is_empty());
        let without_calls = messages::without_calls(messages);
        let mut found = Vec::new();
        if !has_tools && without_calls.is_none() {
            return Ok(found);
        }
        let whole = self.render(messages, tools, false)?;
        let is_same = |messages: &[Value], tools: &Value| {
            let other = self.render(messages, tools, false);
            other.is_ok_and(|other| other == whole)
        };
        if has_tools && is_same(messages, &Value::Null) {
            found.push(Finding::ToolsLeftOut);
        }
        if without_calls.is_some_and(|without| is_same(&without, tools)) {
            found.push(Finding::CallsLeftOut);
        }
        Ok(found)
    }

    fn text(&self, count: usize, prompt: bool) -> Result<String, ChatError> {
        self.render(&self.chat.messages[..count], self.chat.tools, prompt)
    }

    fn render(&self, messages: &[Value], tools: &Value, prompt: bool) -> Result<String, ChatError> {
        let rendered = self.template.render_marked(messages, tools, prompt);
        rendered.map_err(|error| ChatError::Render {
            messages: messages.len(),
            reason: error.to_string(),
        })
    }
}

/// Bytes that two texts begin with alike.
fn shared(one: &str, other: &str) -> usize {
    let mut both = one.char_indices().zip(other.chars());
    let different = both.find(|((_, a), b)| a != b);
    different.map_or(one.len().min(other.len()), |((at, _), _)| at)
}
