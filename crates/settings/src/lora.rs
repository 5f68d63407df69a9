//! Adapters as a configuration describes them, and what does not go with them.

use super::choices::BaseType;
use super::error::ConfigError;
use super::keys::LoraConfig;
use super::schema::Config;
use crate::Result;
use memory::{Codes, DType};
use model::{
    AdapterConfig, AdapterTarget, Labels, LinearModule, Lora, LoraInit, LoraPatternError,
    ModulePattern, PlainModules, Quantisation,
};
use optim::{Faster, OptimizerKind};

/// The experts of a layer, as modules that [`PlainModules`] names.
const EXPERTS: &str = r".*\.experts";

/// How the model under adapters is stored.
#[derive(Clone, Debug, Default)]
pub struct BaseStorage {
    /// The type of its matrices.
    pub dtype: Option<BaseType>,
    /// Modules whose matrices are no codes all the same.
    pub skip: Vec<String>,
}

impl Default for LoraConfig {
    fn default() -> LoraConfig {
        LoraConfig {
            rank: None,
            alpha: None,
            targets: vec![AdapterTarget::ALL.into()],
            layers: None,
            rank_pattern: Default::default(),
            alpha_pattern: Default::default(),
            dropout: 0.0,
            rslora: false,
            init: LoraInit::default(),
            b_lr_ratio: 1.0,
            base_dtype: None,
            base_skip: Vec::new(),
        }
    }
}

impl LoraConfig {
    /// The adapters; none if there is no rank.
    ///
    /// # Errors
    /// A pattern that cannot be read as a regular expression.
    pub fn adapters(&self) -> Result<Option<Lora>> {
        let Some(rank) = self.rank else {
            return Ok(None);
        };
        let wrong = |error: LoraPatternError| ConfigError::Contradiction(error.to_string());
        let target = |text: &String| AdapterTarget::new(text).map_err(wrong);
        let pattern = |text: &String| ModulePattern::ending(text).map_err(wrong);
        let ranks = self.rank_pattern.iter();
        let ranks = ranks.map(|(text, rank)| Ok((pattern(text)?, *rank)));
        let alphas = self.alpha_pattern.iter();
        let alphas = alphas.map(|(text, alpha)| Ok((pattern(text)?, *alpha)));
        Ok(Some(Lora {
            rank,
            alpha: self.alpha.unwrap_or(rank as f64),
            dropout: self.dropout as f32,
            is_rank_stabilised: self.rslora,
            init: self.init,
            layers: self.layers.clone(),
            targets: self.targets.iter().map(target).collect::<Result<_, _>>()?,
            ranks: ranks.collect::<Result<_>>()?,
            alphas: alphas.collect::<Result<_>>()?,
            base: self.codes(),
            base_skip: self.plain_modules()?,
        }))
    }

    /// How the matrices of the frozen model are stored as codes; none: as plain numbers.
    fn codes(&self) -> Option<Codes> {
        match self.base_dtype? {
            BaseType::Bf16 => None,
            BaseType::EightBit => Some(Codes::EightBit),
            BaseType::Nf4 => Some(Codes::Nf4),
            BaseType::Mxfp4 => Some(Codes::Mxfp4),
        }
    }

    /// The modules of [`LoraConfig::base_skip`].
    fn plain_modules(&self) -> Result<PlainModules> {
        PlainModules::new(&self.base_skip).map_err(|pattern| {
            ConfigError::Contradiction(format!(
                "`{pattern}` in lora.base_skip is neither a name nor a regular expression; write the end of a module's name, as \
                 q_proj"
            ))
        })
    }

    /// Takes what a model's folder says of its own codes. What the user leaves out of them stays left out too. In a model with
    /// experts these are plain unless they are in MXFP4, because transformers stores linear layers alone as other codes.
    ///
    /// # Errors
    /// A key that is set here and has another value in the folder.
    pub fn adopt_codes(&mut self, folder: &Quantisation, has_experts: bool) -> Result {
        let stored = match folder.codes {
            Codes::Nf4 => BaseType::Nf4,
            Codes::EightBit => BaseType::EightBit,
            Codes::Mxfp4 => BaseType::Mxfp4,
        };
        let other = self.base_dtype.filter(|base| *base != stored);
        if let Some(other) = other {
            let instead = match folder.codes {
                Codes::Mxfp4 => {
                    "write the folder's values (trainer export DIR --out PLAIN) and give PLAIN"
                }
                _ => "give the folder with the model in bf16 or f32",
            };
            return Err(ConfigError::Contradiction(format!(
                "--base-dtype {other} is not built for a folder whose weights are {stored}; leave it out, or {instead}"
            )));
        }
        self.base_dtype = Some(stored);
        let are_plain = has_experts && folder.codes != Codes::Mxfp4;
        let experts = are_plain.then(|| EXPERTS.to_string());
        for plain in folder.plain.iter().cloned().chain(experts) {
            if !self.base_skip.contains(&plain) {
                self.base_skip.push(plain);
            }
        }
        Ok(())
    }

    /// These settings with the adapters of a folder. Dropout is a setting of training, so one that is set here stays. So does a
    /// type of the frozen model, which else is that of the adapters' training.
    ///
    /// # Errors
    /// A key that is set here and has another value in the folder.
    pub fn adopted(&self, adapter: AdapterConfig, base: BaseStorage) -> Result<LoraConfig> {
        let unset = LoraConfig::default();
        let (base_dtype, base_skip) = match self.base_dtype {
            Some(_) => (self.base_dtype, self.base_skip.clone()),
            None => (base.dtype, base.skip),
        };
        let adopted = LoraConfig {
            rank: Some(adapter.rank),
            alpha: Some(adapter.alpha),
            targets: adapter.targets,
            layers: adapter.layers,
            rank_pattern: adapter.ranks,
            alpha_pattern: adapter.alphas,
            dropout: match self.dropout == unset.dropout {
                true => adapter.dropout,
                false => self.dropout,
            },
            rslora: adapter.is_rank_stabilised,
            init: adapter.init,
            b_lr_ratio: self.b_lr_ratio,
            base_dtype,
            base_skip,
        };
        macro_rules! contradicts {
            ($($field:ident),+) => {
                [$((
                    concat!("lora.", stringify!($field)),
                    self.$field != unset.$field && self.$field != adopted.$field,
                )),+]
            };
        }
        let keys = contradicts!(
            rank,
            alpha,
            targets,
            layers,
            rank_pattern,
            alpha_pattern,
            rslora,
            init
        );
        match keys.into_iter().find(|(_, differs)| *differs) {
            None => Ok(adopted),
            Some((key, _)) => Err(ConfigError::Contradiction(format!(
                "{key} is set, and the adapters of --lora-from have another value; leave it out"
            ))),
        }
    }

    /// Pairs of (key, pattern) for patterns that match no module.
    ///
    /// # Errors
    /// A pattern that cannot be read as a regular expression.
    pub fn patterns_in_vain(
        &self,
        modules: &[LinearModule],
    ) -> Result<Vec<(&'static str, String)>> {
        let Some(Lora { ranks, alphas, .. }) = self.adapters()? else {
            return Ok(Vec::new());
        };
        let mut in_vain = Vec::new();
        let is_for_none = |pattern: &ModulePattern| {
            let mut adapted = modules.iter().filter(|module| module.rank.is_some());
            !adapted.any(|module| pattern.fits(&module.name))
        };
        for (text, (pattern, _)) in self.rank_pattern.keys().zip(&ranks) {
            in_vain.extend(is_for_none(pattern).then(|| ("lora.rank_pattern", text.clone())));
        }
        for (text, (pattern, _)) in self.alpha_pattern.keys().zip(&alphas) {
            in_vain.extend(is_for_none(pattern).then(|| ("lora.alpha_pattern", text.clone())));
        }
        for text in self.base_skip.iter().filter(|_| self.codes().is_some()) {
            let one = LoraConfig {
                base_skip: vec![text.clone()],
                ..LoraConfig::default()
            };
            let plain = one.plain_modules()?;
            let is_for_none = !modules.iter().any(|module| plain.has(&module.name));
            in_vain.extend(is_for_none.then(|| ("lora.base_skip", text.clone())));
        }
        Ok(in_vain)
    }

    /// The parameters that are updated at another rate.
    pub(crate) fn faster(&self) -> Option<Faster> {
        (self.rank.is_some() && self.b_lr_ratio != 1.0).then_some(Faster {
            ending: ".lora_B.weight",
            ratio: self.b_lr_ratio,
        })
    }
}

impl Config {
    /// The labels of the model's activations.
    pub fn labels(&self) -> Labels {
        match self.lora.rank {
            Some(_) => self.model.labels().with_lora(),
            None => self.model.labels(),
        }
    }
}

/// Refuses what does not go with adapters, whatever the model.
pub(crate) fn check(config: &Config) -> Result {
    let lora = &config.lora;
    let refused = |sentence: &str| Err(ConfigError::Contradiction(sentence.into()));
    match lora.base_dtype {
        None | Some(BaseType::EightBit | BaseType::Nf4 | BaseType::Mxfp4) => {}
        Some(BaseType::Bf16) if DType::from(config.dtype()) == DType::BF16 => {}
        Some(BaseType::Bf16) => {
            return refused(
                "--base-dtype bf16 under --dtype f32 is not built: a bf16 model computes in bf16; add --dtype bf16, or leave \
                 --base-dtype out",
            );
        }
    }
    if lora.rank.is_none() {
        return Ok(());
    }
    if !config.train.freeze.is_empty() {
        return refused(
            "train.freeze says which parameters are not trained, and with --lora adapters alone are; leave one of the two out",
        );
    }
    if config.optim.router_bias_rate > 0.0 {
        return refused(
            "optim.router_bias_rate moves biases of the frozen model, and adapters are saved without it; set \
             optim.router_bias_rate=0",
        );
    }
    if lora.b_lr_ratio != 1.0 && config.optim.kind != OptimizerKind::AdamW {
        return refused(
            "lora.b_lr_ratio is for adamw, which is not the optimizer; leave it out, or take --optimizer adamw",
        );
    }
    Ok(())
}

/// Refuses MXFP4 for a model without experts, or whose rows are no whole blocks.
fn check_mxfp4(modules: &[LinearModule]) -> Result {
    let of_experts = || modules.iter().filter(|module| module.experts.is_some());
    if of_experts().next().is_none() {
        return Err(ConfigError::Contradiction(
            "weights in mxfp4 (--base-dtype, or the folder's quantization_config) are those of experts, and the model has none; take --base-dtype nf4 or 8bit".into(),
        ));
    }
    let is_uneven = |module: &&LinearModule| !module.shape[1].is_multiple_of(Codes::MXFP4_BLOCK);
    match of_experts().find(is_uneven) {
        None => Ok(()),
        Some(module) => Err(ConfigError::Contradiction(format!(
            "--base-dtype mxfp4 has blocks of {} inputs, and the experts of `{}` have {} inputs, which is no multiple; take \
             --base-dtype nf4 or 8bit",
            Codes::MXFP4_BLOCK,
            module.name,
            module.shape[1]
        ))),
    }
}

/// Refuses targets that are no linear layer, and ranks that a layer cannot have.
pub(crate) fn check_modules(lora: &Lora, modules: &[LinearModule]) -> Result {
    let blocks = modules.iter().map(|module| module.layer + 1).max();
    let blocks = blocks.unwrap_or(0);
    let beyond = lora.layers.iter().flatten().find(|layer| **layer >= blocks);
    if let Some(layer) = beyond {
        return Err(ConfigError::Contradiction(format!(
            "lora.layers names block {layer}, and the model has blocks 0 to {}; leave it out",
            blocks.saturating_sub(1)
        )));
    }
    let fits_nothing =
        |target: &&AdapterTarget| !modules.iter().any(|module| target.fits(&module.name));
    if let Some(target) = lora.targets.iter().find(fits_nothing) {
        let mut ends: Vec<&str> = modules.iter().map(LinearModule::end).collect();
        ends.sort_unstable();
        ends.dedup();
        return Err(ConfigError::Contradiction(format!(
            "`{}` in lora.targets fits no linear layer that can have an adapter; there are {}",
            target.text,
            ends.join(", ")
        )));
    }
    if lora.base == Some(Codes::Mxfp4) {
        check_mxfp4(modules)?;
    }
    let adapted = || {
        modules
            .iter()
            .filter_map(|module| Some((module, module.rank?)))
    };
    if adapted().next().is_none() {
        return Err(ConfigError::Contradiction(
            "lora.targets or lora.layers is empty, so that nothing is left to train; name some, or leave the key out".into(),
        ));
    }
    let of_experts = adapted().find(|(module, _)| module.experts.is_some());
    if let (Some((module, _)), true) = (of_experts, lora.dropout > 0.0) {
        return Err(ConfigError::Contradiction(format!(
            "lora.dropout is not built for adapters on experts, nor does PEFT have it, and `{}` has one; leave out lora.dropout, \
             or the experts in lora.targets",
            module.name
        )));
    }
    let above =
        |(module, rank): &(&LinearModule, usize)| *rank > module.shape[0].min(module.shape[1]);
    match adapted().find(above) {
        None => Ok(()),
        Some((module, rank)) => Err(ConfigError::Contradiction(format!(
            "an adapter of rank {rank} on `{}`, which is {} by {}, has a higher rank than the matrix itself can have; take at \
             most {}, for this layer alone by lora.rank_pattern",
            module.name,
            module.shape[0],
            module.shape[1],
            module.shape[0].min(module.shape[1])
        ))),
    }
}
