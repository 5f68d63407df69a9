//! Tokenizers and chat templates beside their peers, and hostile texts.

mod hostile;
mod peers;
