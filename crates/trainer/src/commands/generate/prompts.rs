//! Reads the texts and conversations that `generate` continues.

use crate::failure::{Failure, Result};
use clap::{ArgGroup, Args};
use serde_json::{Value, json};
use std::io::Read;
use std::path::{Path, PathBuf};
use tokenization::{ChatTemplate, Tokenizer};

/// Flags that say what to go on with.
#[derive(Debug, Args)]
#[group(skip)]
#[command(group(ArgGroup::new("prompts").required(true).multiple(true)))]
#[command(group(ArgGroup::new("conversations").multiple(true)))]
pub struct PromptArgs {
    /// What to go on with; may be given several times
    #[arg(
        long,
        value_name = "TEXT",
        allow_hyphen_values = true,
        group = "prompts"
    )]
    pub prompt: Vec<String>,
    /// Prompts from a file, one a line; `-` is standard input
    #[arg(long, value_name = "FILE", group = "prompts")]
    pub prompt_file: Option<PathBuf>,
    /// Conversations to answer: a JSON file of messages with `role` and `content`, or a JSONL file with `messages` a line
    #[arg(long, value_name = "FILE", groups = ["prompts", "conversations"])]
    pub chat_file: Option<PathBuf>,
    /// Prompts are what a user says: the model's chat template is put around them
    #[arg(long, group = "conversations")]
    pub chat: bool,
    /// System message
    #[arg(
        long,
        value_name = "TEXT",
        requires = "conversations",
        allow_hyphen_values = true
    )]
    pub system: Option<String>,
}

/// A text to continue, or a conversation to answer.
pub(crate) struct Prompt {
    /// What the user wrote: the text, or the last message.
    pub(crate) said: String,
    /// Whether it is a conversation: its answer is shown apart from it, while a text is continued where it ends.
    pub(crate) is_conversation: bool,
    /// The tokens that the model reads.
    pub(crate) tokens: Vec<u32>,
}

impl Prompt {
    /// What is shown before the model's own text.
    pub(crate) fn heading(&self) -> String {
        match self.is_conversation {
            false => self.said.clone(),
            true => self
                .said
                .lines()
                .map(|line| format!("> {line}\n"))
                .collect(),
        }
    }
}

impl PromptArgs {
    /// Reads all prompts, in the order --prompt, --prompt-file, --chat-file.
    ///
    /// # Errors
    /// Files that cannot be read or have no prompts; conversations that are invalid or end with an answer; a model
    /// without a chat template; prompts without tokens, or with tokens that are not in the model's `vocab`.
    pub(crate) fn read(
        &self,
        (model, vocab): (&Path, usize),
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Prompt>> {
        let mut texts = self.prompt.clone();
        if let Some(path) = &self.prompt_file {
            texts.extend(lines(path)?);
        }
        let encode = |text: &String| Ok((text.clone(), tokenizer.encode_prompt(text)?));
        let mut prompts: Vec<(String, Vec<u32>)> = Vec::new();
        let mut conversations = match &self.chat_file {
            Some(path) => read_conversations(path)?,
            None => Vec::new(),
        };
        if self.chat {
            let said = |text: &String| vec![json!({"role": "user", "content": text})];
            conversations.splice(..0, texts.iter().map(said));
        } else {
            prompts = texts.iter().map(encode).collect::<Result<_>>()?;
        }
        let first_conversation = prompts.len();
        if !conversations.is_empty() {
            let template = chat_template(model, "give the text as --prompt, without --chat")?;
            for messages in conversations {
                let messages = self.with_system(messages)?;
                let tokens = conversation(&template, tokenizer, &messages)?;
                prompts.push((last_said(&messages), tokens));
            }
        }
        let prompts = prompts.into_iter().enumerate().map(|(at, (said, tokens))| {
            check(&tokens, vocab)?;
            Ok(Prompt {
                said,
                is_conversation: at >= first_conversation,
                tokens,
            })
        });
        prompts.collect()
    }

    fn with_system(&self, mut messages: Vec<Value>) -> Result<Vec<Value>> {
        if let Some(system) = &self.system {
            if messages[0]["role"] == "system" {
                return Err(Failure::Usage(
                    "a conversation of --chat-file has a message of the system already; leave --system out".into(),
                ));
            }
            messages.insert(0, json!({"role": "system", "content": system}));
        }
        Ok(messages)
    }
}

/// The lines of a file that are not blank.
fn lines(path: &Path) -> Result<Vec<String>> {
    let text = read_text(path)?;
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let lines: Vec<String> = lines.map(String::from).collect();
    match lines.is_empty() {
        true => Err(malformed(path, "it has no line with a prompt")),
        false => Ok(lines),
    }
}

/// The conversations of a file: a list of messages, an object with `messages`, or one such object on each line.
fn read_conversations(path: &Path) -> Result<Vec<Vec<Value>>> {
    let text = read_text(path)?;
    let found: Result<Vec<Value>, _> = serde_json::Deserializer::from_str(&text)
        .into_iter()
        .collect();
    let found = found.map_err(|error| malformed(path, &format!("it is not JSON: {error}")))?;
    if found.is_empty() {
        return Err(malformed(path, "it has no conversation"));
    }
    let messages = |(at, value): (usize, Value)| {
        let wrong = |what: &str| malformed(path, &format!("conversation {}: {what}", at + 1));
        let messages = match value {
            Value::Array(messages) => Some(messages),
            Value::Object(mut fields) => match fields.remove("messages") {
                Some(Value::Array(messages)) => Some(messages),
                _ => None,
            },
            _ => None,
        };
        let messages = messages.filter(|messages| {
            !messages.is_empty() && messages.iter().all(|message| message["role"].is_string())
        });
        let messages = messages
            .ok_or_else(|| wrong("it is neither a list of messages with `role` and `content`, nor an object with such `messages`"))?;
        match messages
            .last()
            .is_some_and(|last| last["role"] == "assistant")
        {
            true => Err(wrong(
                "it ends with an answer of the assistant's; leave that message out",
            )),
            false => Ok(messages),
        }
    };
    found.into_iter().enumerate().map(messages).collect()
}

fn read_text(path: &Path) -> Result<String> {
    let text = match path == Path::new("-") {
        true => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).map(|_| text)
        }
        false => files::read_small_text(path),
    };
    text.map_err(|error| malformed(path, &format!("it cannot be read: {error}")))
}

fn malformed(path: &Path, reason: &str) -> Failure {
    Failure::Malformed {
        path: path.into(),
        reason: reason.into(),
    }
}

/// The model's chat template; `instead` is what to do where it has none.
pub(crate) fn chat_template(model: &Path, instead: &str) -> Result<ChatTemplate> {
    ChatTemplate::open(model)?.ok_or_else(|| {
        Failure::Usage(format!(
            "{} has no chat template; {instead}",
            model.display()
        ))
    })
}

/// The tokens of a conversation, up to where the answer begins. The template writes the special tokens.
pub(crate) fn conversation(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    messages: &[Value],
) -> Result<Vec<u32>> {
    let text = template.render(messages, true);
    let text = text.map_err(|error| {
        Failure::Usage(format!("the chat template refuses the prompt: {error}"))
    })?;
    Ok(tokenizer.encode(&text)?)
}

/// The text of the last message.
fn last_said(messages: &[Value]) -> String {
    match messages.last().map(|last| &last["content"]) {
        Some(Value::String(said)) => said.clone(),
        said => said.map(ToString::to_string).unwrap_or_default(),
    }
}

/// Every token of a prompt is one of the model's, and there is one.
pub(crate) fn check(tokens: &[u32], vocab: usize) -> Result {
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
        return Err(Failure::Usage(format!(
            "the tokenizer makes token {token} of the prompt, and the model knows {vocab}; its folder has another model's \
             tokenizer"
        )));
    }
    match tokens.is_empty() {
        true => Err(Failure::Usage("a prompt has at least one token".into())),
        false => Ok(()),
    }
}
