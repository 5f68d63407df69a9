//! Text to tokens and back: Hugging Face tokenizers, or bytes; conversations by the chat template of their model.
//!
//! This crate never reads data sets and never names a model. The same text gives the same tokens as Hugging Face's own
//! `tokenizers` and `transformers` do, and is cut into pieces only where that changes nothing ([`Tokenizer::safe_cut`]).
//!
//! ```
//! use tokenization::Tokenizer;
//!
//! let bytes = Tokenizer::bytes();
//! assert_eq!(bytes.encode("hé")?, [104, 195, 169]);
//! let mut stream = bytes.stream_after(&[]);
//! let text: Vec<String> = [104, 195, 169].map(|token| stream.push(token)).into();
//! assert_eq!(text, ["h", "", "é"]);
//! # Ok::<(), tokenization::TokenizerError>(())
//! ```

mod assistant;
mod chat;
mod cuts;
mod error;
mod messages;
mod percent;
mod python_json;
mod special_tokens;
mod stream;
mod template;
mod tokenizer;
mod words;

pub use chat::Conversation;
pub use error::{ChatError, TokenizerError};
pub use stream::TextStream;
pub use template::ChatTemplate;
pub use tokenizer::{TOKENIZER_FILES, Tokenizer};
