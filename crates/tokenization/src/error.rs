//! Everything that can be wrong with a tokenizer or a conversation.

use std::io;
use std::path::PathBuf;

/// Why there is no tokenizer, or no tokens.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum TokenizerError {
    /// There is nothing of that name.
    #[error(
        "there is no tokenizer at {path}: give a tokenizer.json, a folder that has one, or the word `bytes`"
    )]
    Missing { path: PathBuf },
    /// The operating system would not read a file.
    #[error("cannot read {path}: {reason}")]
    Unreadable { path: PathBuf, reason: io::Error },
    /// A file is not what its name says.
    #[error("{path} cannot be used: {reason}; copy it again from where the model came from")]
    Malformed { path: PathBuf, reason: String },
    /// The tokenizer has no token for the text.
    #[error("the tokenizer cannot encode the text: {reason}")]
    Encode { reason: String },
    /// This build has no library for it.
    #[error("{path} needs Hugging Face's tokenizers, and this trainer was built without them")]
    NotBuilt { path: PathBuf },
}

/// Why a conversation has no tokens.
#[cfg(feature = "hugging-face")]
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum ChatError {
    /// There is no template to render it with.
    #[error(
        "conversations need a chat template: chat_template.jinja, or `chat_template` in tokenizer_config.json, beside \
         the tokenizer.json"
    )]
    NoTemplate,
    /// It is not a list of messages.
    #[error("message {message} is not an object with a `role` (text): {found}")]
    NotAMessage { message: usize, found: String },
    /// Nothing in it is to be learnt.
    #[error("none of the {messages} messages is an assistant's, so there is nothing to learn")]
    NoAssistant { messages: usize },
    /// The template writes nothing as the assistant's.
    #[error(
        "the chat template writes none of the assistant's messages as its turn, so there is nothing to learn: see what \
         {{% generation %}} is around in it"
    )]
    NothingLearnt,
    /// A character that marks the assistant's turns while a template is rendered.
    #[error("the messages contain the noncharacters U+FDD0 or U+FDD1; remove them")]
    Noncharacter,
    /// The template fails, or refuses.
    #[error("the chat template refuses the first {messages} messages: {reason}")]
    Render { messages: usize, reason: String },
    /// What the template writes of the first messages changes with those that follow.
    #[error(
        "the chat template writes what precedes message {message} differently once that message is there, so the \
         assistant's turn does not stand in the whole text; learn each turn in an example of its own (--turns each) or the last alone \
         (--turns last), or put {{% generation %}} and {{% endgeneration %}} around turns in the template"
    )]
    NotAPrefix { message: usize },
    /// An answer of which nothing is in the text.
    #[error(
        "message {message} is the assistant's, and the chat template writes nothing of what it says, so an empty answer would be \
         learnt; correct the message, take a chat template that writes it (`tool_calls` are often left out), or let empty answers \
         pass with --allow-empty-answers"
    )]
    EmptyAnswer { message: usize },
    /// The tokenizer fails.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}
