//! Stand-ins for Hugging Face's tokenizers and chat templates in a build without them: opening either is refused.

use crate::TokenizerError;
use serde_json::Value;
use std::convert::Infallible;
use std::path::Path;

/// A tokenizer that no build without the feature has.
#[derive(Debug)]
pub(crate) enum HuggingFace {}

impl HuggingFace {
    pub(crate) fn open(file: &Path) -> Result<HuggingFace, TokenizerError> {
        Err(TokenizerError::NotBuilt { path: file.into() })
    }

    pub(crate) fn encode(&self, _text: &str) -> Result<Vec<u32>, TokenizerError> {
        match *self {}
    }

    pub(crate) fn encode_prompt(&self, _text: &str) -> Result<Vec<u32>, TokenizerError> {
        match *self {}
    }

    pub(crate) fn safe_cut(&self, _text: &str) -> Option<usize> {
        match *self {}
    }

    pub(crate) fn decode(&self, _tokens: &[u32]) -> String {
        match *self {}
    }

    pub(crate) fn vocab_size(&self) -> usize {
        match *self {}
    }

    pub(crate) fn end_of_text(&self) -> Option<u32> {
        match *self {}
    }
}

/// A chat template that no build without the feature has.
#[derive(Debug)]
pub enum ChatTemplate {}

impl ChatTemplate {
    /// None: a model with a template has a tokenizer, which this build has refused before.
    ///
    /// # Errors
    /// None.
    pub fn open(_folder: &Path) -> Result<Option<ChatTemplate>, TokenizerError> {
        Ok(None)
    }

    /// The text of a conversation.
    ///
    /// # Errors
    /// None: there is no template to call this on.
    pub fn render(
        &self,
        _messages: &[Value],
        _add_generation_prompt: bool,
    ) -> Result<String, Infallible> {
        match *self {}
    }
}
