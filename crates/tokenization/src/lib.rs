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

mod error;
mod stream;
mod tokenizer;

#[cfg(feature = "hugging-face")]
mod assistant;
#[cfg(feature = "hugging-face")]
mod chat;
#[cfg(feature = "hugging-face")]
mod cuts;
#[cfg(feature = "hugging-face")]
mod hugging_face;
#[cfg(not(feature = "hugging-face"))]
#[path = "not_built.rs"]
mod hugging_face;
#[cfg(feature = "hugging-face")]
mod jinja;
#[cfg(feature = "hugging-face")]
mod messages;
#[cfg(feature = "hugging-face")]
mod python_json;
#[cfg(feature = "hugging-face")]
mod special_tokens;
#[cfg(feature = "hugging-face")]
mod template;
#[cfg(feature = "hugging-face")]
mod turns;
#[cfg(feature = "hugging-face")]
mod words;

#[cfg(feature = "hugging-face")]
pub use chat::{Conversation, Examples, Teaching};
#[cfg(feature = "hugging-face")]
pub use error::ChatError;
pub use error::TokenizerError;
#[cfg(not(feature = "hugging-face"))]
pub use hugging_face::ChatTemplate;
pub use stream::TextStream;
#[cfg(feature = "hugging-face")]
pub use template::ChatTemplate;
pub use tokenizer::{TOKENIZER_FILES, Tokenizer};
#[cfg(feature = "hugging-face")]
pub use turns::{Dialogue, Finding, Turns};
