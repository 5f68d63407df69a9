//! Encodes documents as tokens.

use crate::PrepareError;
use crate::item::{Content, Item};
use crate::json_lines;
use crate::records::{Chat, Completion, Document, Instruction};
use std::ops::Range;
use std::path::Path;
use tokenization::{ChatError, ChatTemplate, Conversation, Tokenizer, TokenizerError};

/// The tokens of a document, or of a piece of one.
#[derive(Debug, Default)]
pub(crate) struct Encoded {
    pub(crate) tokens: Vec<u32>,
    /// Tokens that are never targets, as ranges in order, without overlaps.
    pub(crate) masked: Vec<Range<u64>>,
    pub(crate) text_bytes: u64,
    pub(crate) starts: bool,
    /// Where the rejected text of a pair begins, if it does here.
    pub(crate) rejected: Option<usize>,
}

/// The tokenizer and chat template that documents are encoded with.
pub(crate) struct Encoder {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: Option<ChatTemplate>,
}

impl Encoder {
    pub(crate) fn open(tokenizer: &Path) -> Result<Encoder, PrepareError> {
        let tokenizer = Tokenizer::open(tokenizer)?;
        let template = tokenizer.folder().map_or(Ok(None), ChatTemplate::open)?;
        Ok(Encoder {
            tokenizer,
            template,
        })
    }

    /// The tokens of an item; none for an empty document. A text ends with the end-of-text token, a conversation as its
    /// template ends it.
    pub(crate) fn encode(&self, item: Item) -> Result<Option<Encoded>, PrepareError> {
        let (starts, ends) = (item.starts, item.ends);
        let (place, document) = match item.content {
            Content::Text(text) => (None, Document::Text(text)),
            Content::Json { place, json } => (Some(place), json_lines::parse(&json)),
            Content::Row { number, document } => (Some(("row", number)), document),
        };
        let encoded = match document {
            Document::Text(text) if text.is_empty() && starts && ends => return Ok(None),
            document => self.document(document, ends),
        };
        let encoded = encoded.map_err(|reason| PrepareError::BadDocument {
            file: item.file.to_string(),
            place: place.map_or("its text".into(), |(what, number)| {
                format!("{what} {number}")
            }),
            reason,
        })?;
        Ok(Some(Encoded { starts, ..encoded }))
    }

    fn document(&self, document: Document, ends: bool) -> Result<Encoded, String> {
        match document {
            Document::Text(text) => self.text(&text, ends).map_err(|error| error.to_string()),
            Document::Chat(chat) => self.chat(&chat).map_err(|error| error.to_string()),
            Document::Completion(completion) => self.completion(&completion),
            Document::Instruction(instruction) => self.instruction(instruction),
            Document::Preference(answers) => self.preference(*answers),
            Document::Neither(reason) => Err(reason),
        }
    }

    /// A pair's texts, one after the other.
    fn preference(&self, answers: [Document; 2]) -> Result<Encoded, String> {
        let [chosen, rejected] = answers.map(|answer| self.document(answer, true));
        let (mut pair, rejected) = (chosen?, rejected?);
        let begins = pair.tokens.len();
        if begins.min(rejected.tokens.len()) < 2 {
            return Err("one of its texts is a single token, which no token predicts".into());
        }
        let masked = rejected.masked.into_iter();
        let after = |range: Range<u64>| begins as u64 + range.start..begins as u64 + range.end;
        pair.masked.extend(masked.map(after));
        pair.tokens.extend(rejected.tokens);
        pair.text_bytes += rejected.text_bytes;
        pair.rejected = Some(begins);
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

    fn chat(&self, chat: &Chat) -> Result<Encoded, ChatError> {
        let template = self.template.as_ref().ok_or(ChatError::NoTemplate)?;
        let Chat {
            messages,
            tools,
            given,
        } = chat;
        let conversation = template.encode_after(&self.tokenizer, messages, tools, *given)?;
        Ok(conversation.into())
    }

    /// Encodes a prompt and a completion as text. The completion, with the end-of-text token, is learnt.
    fn completion(&self, of: &Completion) -> Result<Encoded, String> {
        if of.completion.is_empty() {
            return Err("its completion is empty, so there is nothing to learn".into());
        }
        let encoded = self.tokenizer.encode_completion(&of.prompt, &of.completion);
        encoded
            .map(Encoded::from)
            .map_err(|error| error.to_string())
    }

    fn instruction(&self, instruction: Instruction) -> Result<Encoded, String> {
        match self.template {
            Some(_) => self
                .chat(&instruction.into_chat())
                .map_err(|error| error.to_string()),
            None => self.completion(&instruction.into_completion()),
        }
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
            rejected: None,
        }
    }
}
