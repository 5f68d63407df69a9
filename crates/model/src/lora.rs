//! Which linear layers have low-rank adapters: LoRA (Hu et al. 2021), by the rules of Hugging Face's PEFT.

use crate::PlainModules;
use fancy_regex::Regex;
use memory::Codes;
use serde::{Deserialize, Serialize};

/// The values that a fresh `lora_A` has; a fresh `lora_B` is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoraInit {
    /// Uniform within 1 / sqrt(inputs): what PyTorch's `kaiming_uniform_` gives with a = sqrt(5).
    #[default]
    Kaiming,
    /// Normal with a standard deviation of 1 / rank.
    Gaussian,
}

impl LoraInit {
    /// The names in settings.
    pub const NAMES: &'static [&'static str] = &["kaiming", "gaussian"];
}

/// Low-rank adapters of a model. A layer that is a target computes `x W' + scale (x A') B'`, with `A [rank, inputs]` and
/// `B [outputs, rank]`, and only these are trained.
#[derive(Clone, Debug, Default)]
pub struct Lora {
    /// The rank of layers that no pattern names.
    pub rank: usize,
    /// The scale is alpha / rank, or alpha / sqrt(rank).
    pub alpha: f64,
    /// The share of an adapter's inputs that is dropped.
    pub dropout: f32,
    /// Divide by the root of the rank (Kalajdzievski 2023).
    pub is_rank_stabilised: bool,
    /// The values of fresh factors.
    pub init: LoraInit,
    /// The blocks that have adapters; none: all.
    pub layers: Option<Vec<usize>>,
    /// The modules that are targets.
    pub targets: Vec<AdapterTarget>,
    /// Ranks of modules whose names end in what a pattern fits.
    pub ranks: Vec<(ModulePattern, usize)>,
    /// Alphas, likewise.
    pub alphas: Vec<(ModulePattern, f64)>,
    /// How the frozen matrices of the blocks' linear layers are stored, whether they are targets or not; none: as the
    /// rest of the model is.
    pub base: Option<Codes>,
    /// Modules whose matrices are stored as the rest of the model all the same.
    pub base_skip: PlainModules,
}

/// A name, or a pattern of names, of modules that get adapters.
#[derive(Clone, Debug)]
pub struct AdapterTarget {
    /// As it was written.
    pub text: String,
    /// None: all linear layers of the blocks.
    pattern: Option<ModulePattern>,
    /// Whether it is the name of a parameter of experts.
    names_experts: bool,
}

/// A regular expression for the names of modules.
#[derive(Clone, Debug)]
pub struct ModulePattern {
    /// As it was written.
    pub text: String,
    regex: Regex,
}

/// A pattern of modules that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("`{pattern}` cannot be read as a regular expression: {reason}")]
pub struct LoraPatternError {
    /// As it was written.
    pub pattern: String,
    /// What is wrong.
    pub reason: String,
}

/// The rank of a layer's adapter, and the factor on what it adds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LoraSize {
    pub(crate) rank: usize,
    pub(crate) scale: f32,
}

/// A linear layer that may have an adapter, or the same one of several experts.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearModule {
    /// Its name in Hugging Face's models; of experts, the name of their parameter.
    pub name: String,
    /// How many experts have it; none: it is no layer of experts.
    pub experts: Option<usize>,
    /// Outputs and inputs, of an expert.
    pub shape: [usize; 2],
    /// The rank of its adapter, if it has one.
    pub rank: Option<usize>,
    /// The factor on what its adapter adds.
    pub scale: f32,
    /// The block that it is in.
    pub layer: usize,
}

/// Stands in the name of a parameter of experts between the module's name and its own.
pub(crate) const OF_EXPERTS: &str = ".experts.";

impl LinearModule {
    /// The end of its name that is the same in every block.
    pub fn end(&self) -> &str {
        let parts = self.name.rsplitn(3, '.');
        let parts = parts.take(1 + usize::from(self.experts.is_some()));
        let width: usize = parts.map(|part| part.len() + 1).sum();
        &self.name[self.name.len() + 1 - width..]
    }
}

impl AdapterTarget {
    /// All linear layers of the blocks, without routers and experts.
    pub const ALL: &'static str = "all-linear";

    /// A plain name fits a module of that name, or one whose name ends in a dot and that name. Any other text is a regular
    /// expression for the whole name. Experts are parameters and no modules: only a plain name with `experts.` in it, such as
    /// `mlp.experts.down_proj`, fits them.
    ///
    /// # Errors
    /// A text that cannot be read as a regular expression.
    pub fn new(text: &str) -> Result<AdapterTarget, LoraPatternError> {
        let is_name =
            |character: char| character.is_ascii_alphanumeric() || "_.-".contains(character);
        let is_plain = text.chars().all(is_name);
        let pattern = match text {
            AdapterTarget::ALL => None,
            _ if is_plain => Some(ModulePattern::ending(&text.replace('.', r"\."))?),
            _ => Some(ModulePattern::compiled(text, &format!("^(?:{text})$"))?),
        };
        Ok(AdapterTarget {
            text: text.into(),
            pattern,
            names_experts: is_plain && text.contains("experts."),
        })
    }

    /// Whether it is the name of a parameter of experts.
    pub(crate) fn names_experts(&self) -> bool {
        self.names_experts
    }

    /// Whether it names a module, or a parameter of experts.
    pub fn fits(&self, module: &str) -> bool {
        if module.contains(OF_EXPERTS) && !self.names_experts {
            return false;
        }
        let pattern = self.pattern.as_ref();
        pattern.is_none_or(|pattern| pattern.fits(module))
    }
}

impl ModulePattern {
    /// A regular expression that fits the whole name of a module, or what follows a dot in it.
    ///
    /// # Errors
    /// A text that cannot be read as a regular expression.
    pub fn ending(text: &str) -> Result<ModulePattern, LoraPatternError> {
        ModulePattern::compiled(text, &format!(r"^(?:.*\.)?(?:{text})$"))
    }

    fn compiled(text: &str, regex: &str) -> Result<ModulePattern, LoraPatternError> {
        let regex = Regex::new(regex).map_err(|error| LoraPatternError {
            pattern: text.into(),
            reason: error.to_string(),
        })?;
        Ok(ModulePattern {
            text: text.into(),
            regex,
        })
    }

    /// Whether it fits a module's name.
    pub fn fits(&self, module: &str) -> bool {
        // A search fails only if it takes too many steps, for a pattern that nobody writes by accident.
        self.regex.is_match(module).unwrap_or(false)
    }
}

impl Lora {
    /// How the matrix of a module is stored as codes; none: as the rest of the model is. MXFP4 is for experts.
    pub(crate) fn codes_of(&self, module: &str) -> Option<Codes> {
        let is_for = |codes| codes != Codes::Mxfp4 || module.contains(OF_EXPERTS);
        let codes = self.base.filter(|codes| is_for(*codes));
        codes.filter(|_| !self.base_skip.has(module))
    }

    /// The size of a module's adapter; none if it has none.
    pub(crate) fn of(&self, module: &str, layer: usize) -> Option<LoraSize> {
        let has_layer = |layers: &Vec<usize>| layers.contains(&layer);
        let is_target = self.layers.as_ref().is_none_or(has_layer)
            && self.targets.iter().any(|target| target.fits(module));
        if !is_target {
            return None;
        }
        let rank = first(&self.ranks, module).unwrap_or(self.rank);
        let alpha = first(&self.alphas, module).unwrap_or(self.alpha);
        let divisor = match self.is_rank_stabilised {
            true => (rank as f64).sqrt(),
            false => rank as f64,
        };
        Some(LoraSize {
            rank,
            scale: (alpha / divisor) as f32,
        })
    }
}

/// The value of the first pattern that fits a module.
fn first<T: Copy>(patterns: &[(ModulePattern, T)], module: &str) -> Option<T> {
    let mut patterns = patterns.iter();
    let found = patterns.find(|(pattern, _)| pattern.fits(module));
    found.map(|(_, value)| *value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: &str = "model.layers.3.self_attn.q_proj";

    #[test]
    fn names_are_ends_and_expressions_whole() {
        for (text, fits) in [
            ("q_proj", true),
            ("self_attn.q_proj", true),
            (Q, true),
            ("proj", false),
            ("all-linear", true),
            (r".*\.(q|v)_proj", true),
            (r"model\.layers\.3\..*", true),
            (r"(q|v)_proj", false),
            (r".*layers\.(?!3).*", false),
        ] {
            assert_eq!(AdapterTarget::new(text).unwrap().fits(Q), fits, "{text}");
        }
        assert!(AdapterTarget::new("(q_proj").is_err());
    }

    #[test]
    fn experts_are_named_as_such() {
        let experts = "model.layers.3.mlp.experts.down_proj";
        let shared = "model.layers.3.mlp.shared_experts.down_proj";
        for (text, fits, fits_shared) in [
            ("mlp.experts.down_proj", true, false),
            ("experts.down_proj", true, false),
            (experts, true, false),
            ("experts.gate_up_proj", false, false),
            ("down_proj", false, true),
            ("all-linear", false, true),
            (".*down_proj", false, true),
            ("shared_experts.down_proj", false, true),
        ] {
            let target = AdapterTarget::new(text).unwrap();
            let found = [experts, shared].map(|name| target.fits(name));
            assert_eq!(found, [fits, fits_shared], "{text}");
        }
    }

    #[test]
    fn patterns_change_rank_and_alpha() {
        let lora = |is_rank_stabilised| Lora {
            rank: 8,
            alpha: 16.0,
            is_rank_stabilised,
            layers: Some(vec![3]),
            targets: vec![
                AdapterTarget::new("q_proj").unwrap(),
                AdapterTarget::new("v_proj").unwrap(),
            ],
            ranks: vec![(ModulePattern::ending(r"3\.self_attn\.v_proj").unwrap(), 4)],
            alphas: vec![(ModulePattern::ending("v_proj").unwrap(), 2.0)],
            ..Lora::default()
        };
        let of = |is_rank_stabilised, module: &str, layer| {
            let size = lora(is_rank_stabilised).of(module, layer)?;
            Some((size.rank, size.scale))
        };
        let v = "model.layers.3.self_attn.v_proj";
        assert_eq!(of(false, Q, 3), Some((8, 2.0)));
        assert_eq!(of(false, v, 3), Some((4, 0.5)));
        assert_eq!(of(true, v, 3), Some((4, 1.0)));
        assert_eq!(of(false, Q, 2), None);
        assert_eq!(of(false, "model.layers.3.mlp.up_proj", 3), None);
    }

    /// As in PEFT, which goes through the table in its order.
    #[test]
    fn of_patterns_that_overlap_the_first_counts() {
        let rank = |patterns: [(&str, usize); 2]| {
            let ranks = patterns.map(|(text, rank)| (ModulePattern::ending(text).unwrap(), rank));
            first(&ranks, "model.layers.3.self_attn.v_proj")
        };
        let (short, long) = (("v_proj", 2), ("3.self_attn.v_proj", 4));
        assert_eq!(
            [rank([short, long]), rank([long, short])],
            [Some(2), Some(4)]
        );
    }
}
