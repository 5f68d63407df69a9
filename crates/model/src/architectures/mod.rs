//! The stages of models' blocks, with Hugging Face's names for their parameters: one file for GPT-2, and one for all other families,
//! whose blocks differ in what their [`BlockSpec`]s say.

mod decoder;
mod experts;
mod gpt2;

use crate::{
    Architecture, Attention, BlockSpec, Labels, ModelConfig, NormKind, NormPlacement, Parameters,
};
use std::rc::Rc;

impl Architecture {
    /// The structure of a model of this shape, with this kind of attention.
    pub fn of(config: &ModelConfig, attention: Attention) -> Architecture {
        Architecture::declared(config, attention, Parameters::default())
    }

    /// The same, with its parameters declared in `parameters`, which may freeze some ([`Parameters::freezing`]).
    pub fn declared(
        config: &ModelConfig,
        attention: Attention,
        parameters: Parameters,
    ) -> Architecture {
        Architecture::of_blocks(config, &config.blocks(), attention, parameters)
    }

    /// The structure of a model with these blocks, even if its configuration says another number of them.
    pub fn of_blocks(
        config: &ModelConfig,
        blocks: &[Rc<BlockSpec>],
        attention: Attention,
        parameters: Parameters,
    ) -> Architecture {
        match config.norm {
            NormKind::Layer => gpt2::architecture(config, blocks, attention, parameters),
            NormKind::Rms => decoder::architecture(config, blocks, attention, parameters),
        }
    }
}

impl ModelConfig {
    /// The labels that policies name the activations of its blocks by.
    pub fn labels(&self) -> Labels {
        let has_gates = self.attention_gate || self.delta.is_some();
        match (&self.latent, &self.experts, self.norm_placement) {
            (Some(_), _, _) => Labels::LATENT,
            (None, Some(_), _) if has_gates => Labels::DELTA_EXPERTS,
            (None, Some(_), _) => Labels::EXPERTS,
            (None, None, _) if has_gates => Labels::DELTA,
            (None, None, NormPlacement::Before) => Labels::DENSE,
            (None, None, NormPlacement::After | NormPlacement::Both) => Labels::NORMS_BEHIND,
        }
    }
}
