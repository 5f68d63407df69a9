//! Encodes documents as tokens.

use crate::PrepareError;
use crate::Result;
use crate::item::{Content, Item};
use crate::json_lines;
use crate::records::{Chat, Completion, Document};
use std::ops::Range;
use std::path::Path;
use tokenization::{
    ChatError, ChatTemplate, Conversation, Examples, Finding, Teaching, Tokenizer, TokenizerError,
    Turns,
};

/// The tokens of a record, or of a piece of one: a document, or several.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    /// Tokens that are never targets, as ranges in order, without overlaps.
    pub(crate) masked: Vec<Range<u64>>,
    pub(crate) text_bytes: u64,
    pub(crate) starts: bool,
    /// Where further documents of the same record begin.
    pub(crate) further: Vec<u64>,
    /// Whether it is a pair: the further document is the rejected text.
    pub(crate) is_pair: bool,
    /// What was found in conversations.
    pub(crate) findings: Vec<Finding>,
    /// Where the record is, if something was found.
    pub(crate) place: String,
}

/// The tokenizer and chat template that documents are encoded with.
pub(crate) struct Encoder {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
    teaching: Teaching,
}

impl Encoder {
    pub(crate) fn open(tokenizer: &Path, teaching: Teaching) -> Result<Encoder> {
        let tokenizer = Tokenizer::open(tokenizer)?;
        let template = tokenizer.folder().map_or(Ok(None), ChatTemplate::open)?;
        Ok(Encoder {
            tokenizer,
            template,
            teaching,
        })
    }

    /// The tokens of an item; none for an empty document. A text ends with the end-of-text token, a conversation as its
    /// template ends it.
    pub(crate) fn encode(&self, item: Item) -> Result<Option<Encoded>> {
        let (starts, ends) = (item.starts, item.ends);
        let (place, document) = match item.content {
            Content::Text(text) => (None, Document::Text(text)),
            Content::Json { place, json } => (Some(place), json_lines::parse(&json)),
            Content::Row { number, document } => (Some(("row", number)), document),
        };
        let place = || {
            place.map_or("its text".into(), |(what, number)| {
                format!("{what} {number}")
            })
        };
        let encoded = match document {
            Document::Text(text) if text.is_empty() && starts && ends => return Ok(None),
            Document::Preference(_) if self.teaching.turns == Some(Turns::Each) => {
                return Err(PrepareError::EachOfPairs);
            }
            document => self.document(document, ends, self.teaching),
        };
        let mut encoded = encoded.map_err(|reason| PrepareError::BadDocument {
            file: item.file.to_string(),
            place: place(),
            reason,
        })?;
        if !encoded.findings.is_empty() {
            encoded.place = format!("{}, {}", item.file, place());
        }
        Ok(Some(Encoded { starts, ..encoded }))
    }

    fn document(
        &self,
        document: Document,
        ends: bool,
        teaching: Teaching,
    ) -> Result<Encoded, String> {
        match document {
            Document::Text(text) => self.text(&text, ends).map_err(|error| error.to_string()),
            Document::Chat(chat) => self.chat(&chat, teaching),
            Document::Completion(completion) => self.completion(&completion),
            Document::Instruction(instruction) => match self.template {
                Some(_) => self.chat(&instruction.into_chat(), teaching),
                None => self.completion(&instruction.into_completion()),
            },
            Document::Preference(answers) => self.preference(*answers),
            Document::Neither(reason) => Err(reason),
        }
    }

    /// A pair's texts, one after the other.
    fn preference(&self, answers: [Document; 2]) -> Result<Encoded, String> {
        // A text of a pair is one example.
        let teaching = Teaching {
            turns: self.teaching.turns.or(Some(Turns::All)),
            ..self.teaching
        };
        let [chosen, rejected] = answers.map(|answer| self.document(answer, true, teaching));
        let (mut pair, rejected) = (chosen?, rejected?);
        if pair.tokens.len().min(rejected.tokens.len()) < 2 {
            return Err("one of its texts is a single token, which no token predicts".into());
        }
        pair.append(rejected);
        pair.is_pair = true;
        Ok(pair)
    }

    fn text(&self, text: &str, ends: bool) -> Result<Encoded, TokenizerError> {
        let mut tokens = self.tokenizer.encode(text)?;
        tokens.extend(self.tokenizer.end_of_text().filter(|_| ends));
        Ok(Encoded {
            tokens,
            text_bytes: text.len() as u64,
            ..Encoded::default()
        })
    }

    fn chat(&self, chat: &Chat, teaching: Teaching) -> Result<Encoded, String> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate);
        let chat = tokenization::Dialogue {
            messages: &chat.messages,
            tools: &chat.tools,
            given: chat.given,
        };
        let examples =
            template.and_then(|template| template.examples(&self.tokenizer, chat, teaching));
        let Examples { examples, findings } = examples.map_err(|error| error.to_string())?;
        let mut all = examples.into_iter().map(Encoded::from);
        let mut encoded = all.next().expect("a conversation has an example");
        all.for_each(|example| encoded.append(example));
        Ok(Encoded {
            findings,
            ..encoded
        })
    }

    /// Encodes a prompt and a completion as text. The completion, with the end-of-text token, is learnt.
    fn completion(&self, of: &Completion) -> Result<Encoded, String> {
        let is_empty = of.completion.is_empty();
        if is_empty && !self.teaching.allow_empty {
            return Err(
                "its completion is empty, so there is nothing to learn but its end; leave it out, or let empty answers pass with \
                 --allow-empty-answers"
                    .into(),
            );
        }
        let encoded = self.tokenizer.encode_completion(&of.prompt, &of.completion);
        let encoded = encoded.map_err(|error| error.to_string())?;
        Ok(Encoded {
            findings: vec![Finding::EmptyAnswer; usize::from(is_empty)],
            ..encoded.into()
        })
    }
}

impl Encoded {
    /// Adds a further document.
    fn append(&mut self, other: Encoded) {
        let begins = self.tokens.len() as u64;
        self.further.push(begins);
        let masked = other.masked.into_iter();
        self.masked
            .extend(masked.map(|range| begins + range.start..begins + range.end));
        self.tokens.extend(other.tokens);
        self.text_bytes += other.text_bytes;
        self.findings.extend(other.findings);
    }
}

impl From<Conversation> for Encoded {
    fn from(conversation: Conversation) -> Encoded {
        let masked = conversation.masked.iter();
        Encoded {
            masked: masked
                .map(|range| range.start as u64..range.end as u64)
                .collect(),
            text_bytes: conversation.text_bytes as u64,
            tokens: conversation.tokens,
            starts: true,
            ..Encoded::default()
        }
    }
}
