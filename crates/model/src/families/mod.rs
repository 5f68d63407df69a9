//! The families of models: which stages their blocks are made of, and what Hugging Face calls their parameters.

mod gpt2;
mod llama;

use crate::{Architecture, Attention, BlockSpec, Family, Labels, ModelConfig, Parameters};
use std::rc::Rc;

impl Architecture {
    /// The structure of a model of this shape, with this kind of attention.
    pub fn of(config: &ModelConfig, attention: Attention) -> Architecture {
        Architecture::declared(config, attention, Parameters::default())
    }

    /// The same, whose parameters are declared among these: [`Parameters::freezing`] some.
    pub fn declared(
        config: &ModelConfig,
        attention: Attention,
        parameters: Parameters,
    ) -> Architecture {
        Architecture::of_blocks(config, &config.blocks(), attention, parameters)
    }

    /// The structure of a model that has these blocks, whatever its configuration says of their number.
    pub fn of_blocks(
        config: &ModelConfig,
        blocks: &[Rc<BlockSpec>],
        attention: Attention,
        parameters: Parameters,
    ) -> Architecture {
        match config.family() {
            Family::Gpt2 => gpt2::architecture(config, blocks, attention, parameters),
            Family::Llama => llama::architecture(config, blocks, attention, parameters),
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
