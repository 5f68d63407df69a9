//! The families of models: which stages their blocks are made of, and what Hugging Face calls their parameters.

mod gpt2;
mod llama;

use crate::{Architecture, Attention, Family, Labels, ModelConfig};

impl Architecture {
    /// The structure of a model of this shape, with this kind of attention.
    pub fn of(config: &ModelConfig, attention: Attention) -> Architecture {
        match config.family() {
            Family::Gpt2 => gpt2::architecture(config, attention),
            Family::Llama => llama::architecture(config, attention),
        }
    }
}

impl ModelConfig {
    /// What policies call the activations of its blocks.
    pub fn labels(&self) -> Labels {
        match self.family() {
            Family::Gpt2 | Family::Llama => Labels::DENSE,
        }
    }
}
