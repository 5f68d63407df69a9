//! What a step is made of: the configuration, read by those who compute.

use super::attention::attention;
use super::choices::{Graphs, KernelChoice, Objective};
use super::error::ConfigError;
use super::expert_unit;
use super::fp8;
use super::kernel_choice::{KernelFamily, PerFamily};
use super::keys::HardwareConfig;
use super::lora::check_modules;
use super::pipeline::{Pipeline, pipeline};
use super::schema::Config;
use super::sharing;
use super::unknown::nearest_containing;
use crate::Result;
use data::Packing;
use kernels::cuda::PRODUCT_ELEMENTS_MAX;
use memory::{DType, Homes, Layer, Layout, OwnParts, Rank, Role};
use model::{
    Action, Architecture, Attention, Fp8Products, Lora, ModelConfig, NamePatterns, OffloadLabels,
    Parameter, Parameters, Policy, SharingRanks, Stored,
};
use optim::{
    Adafactor, AdamW, Hyperparameters, MasterFormat, MomentFormat, Muon, SMALLEST_QUANTISED,
    Schedule, WholeTensor,
};
use units::Ranks;

/// Everything that decides the memory and the arithmetic of a step.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The shape of the model.
    pub model: ModelConfig,
    /// What makes a model of this shape, which declares its parameters among those given: [`Architecture::declared`], unless a
    /// program puts its own together.
    pub structure: fn(&ModelConfig, Attention, Parameters) -> Architecture,
    /// Name patterns (`*`, `?`) of parameters that are not trained.
    pub freeze: Vec<String>,
    /// Adapters, which alone are trained; none: the model itself is.
    pub lora: Option<Lora>,
    /// The products that blocks compute in FP8; none: all are in the compute type.
    pub fp8: Option<Fp8Products>,
    /// What is learnt.
    pub objective: StepObjective,
    /// Compute type.
    pub dtype: DType,
    /// Tokens in a sequence.
    pub seq: usize,
    /// Sequences in a micro-batch.
    pub micro_batch: usize,
    /// Micro-batches in a step.
    pub accum: usize,
    /// What is kept, what is recomputed and what waits on the host.
    pub policy: Policy,
    /// Tokens in a chunk of the output head.
    pub head_chunk: usize,
    /// Tokens in a tile of the stages that need no other token; none: whole micro-batches.
    pub tile_tokens: Option<usize>,
    /// Experts of a layer that are a unit; none: all are part of their block's.
    pub expert_unit: Option<usize>,
    /// Chunks from one kept state of the gated delta rule to the next; 1 keeps all.
    pub state_interval: usize,
    /// How documents become sequences.
    pub packing: Packing,
    /// Evaluations and samples that run between steps; planned with them.
    pub between: BetweenSteps,
    /// A copy of the state waits in host memory to be written.
    pub checkpoint_copy: bool,
    /// How attention is computed.
    pub attention: Attention,
    /// Which CUDA kernels compute what has several kinds: `sm80` where there is one. No lease depends on it.
    pub kernels: PerFamily<KernelChoice>,
    /// The optimizer and its numbers.
    pub optimizer: Hyperparameters,
    /// Which matrices an optimizer updates as a whole that does so, and at which rate.
    pub whole_matrices: WholeMatrices,
    /// How far a step moves the biases of routers' choices.
    pub router_bias_rate: f64,
    /// What training adds to the weights.
    pub states: StateFormats,
    /// Where weights, gradients and optimizer states live.
    pub homes: Homes,
    /// The ranks that train together; none: this process trains alone.
    pub ranks: Option<Ranks>,
    /// The stages that divide the model; none: this rank has all of it.
    pub pipeline: Option<Pipeline>,
    /// What the engine between ranks holds of each GPU's memory, where that was measured.
    pub engine_bytes: Option<u64>,
    /// The learning rate.
    pub schedule: Schedule,
    /// The seed of stochastic rounding.
    pub seed: u64,
    /// What estimates of time go by.
    pub hardware: HardwareConfig,
    /// Why no micro-batch is a graph, on a device that has graphs; none: those after the first of a step are.
    pub graphs_off: Option<&'static str>,
}

/// The objective of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepObjective {
    /// Next tokens.
    NextTokens,
    /// Preferences: every two sequences are a pair, of which one is preferred.
    Preferences {
        /// The factor on rewards.
        beta: f32,
        /// Whether data comes with the losses of a reference; otherwise that is the model under the adapters.
        has_reference: bool,
    },
    /// A policy, by its gradient, from targets that come with their old log-probabilities and advantages.
    Policy,
}

impl StepObjective {
    fn of(config: &Config) -> StepObjective {
        match config.train.objective {
            Objective::NextToken => StepObjective::NextTokens,
            Objective::Dpo => StepObjective::Preferences {
                beta: config.dpo.beta as f32,
                has_reference: config.dpo.reference.is_some(),
            },
            Objective::Policy => StepObjective::Policy,
        }
    }

    /// Whether data comes with the losses of a reference.
    pub fn has_reference(self) -> bool {
        matches!(
            self,
            StepObjective::Preferences {
                has_reference: true,
                ..
            }
        )
    }

    /// The same where data comes with the losses of a reference, if preferences are learnt.
    #[must_use]
    pub fn with_reference(self) -> StepObjective {
        match self {
            StepObjective::Preferences { beta, .. } => StepObjective::Preferences {
                beta,
                has_reference: true,
            },
            other => other,
        }
    }
}

/// What is computed between training steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BetweenSteps {
    /// Sequences in a micro-batch of an evaluation.
    pub evaluation: Option<usize>,
    /// Samples of the model's text.
    pub sample: Option<SampledText>,
}

/// Texts that are generated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledText {
    /// Texts.
    pub sequences: usize,
    /// The most tokens of each, its prompt included.
    pub tokens: usize,
}

/// Matrices that an optimizer updates as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeMatrices {
    /// Patterns of their names; none: all matrices of the blocks.
    pub patterns: Option<Vec<String>>,
    /// Their highest learning rate; none: that of all parameters.
    pub peak: Option<f64>,
}

/// What training adds to the weights, across steps.
#[derive(Clone, Debug, PartialEq)]
pub struct StateFormats {
    /// The moments.
    pub moments: MomentFormat,
    /// What stands beside bf16 weights.
    pub master: MasterFormat,
    /// The gradients' type.
    pub gradients: DType,
    /// Name patterns (`*`, `?`) of tensors whose moments stay f32 where others are quantised.
    pub f32_patterns: Vec<String>,
}

impl Default for StateFormats {
    fn default() -> StateFormats {
        StateFormats {
            moments: MomentFormat::F32,
            master: MasterFormat::F32,
            gradients: DType::F32,
            f32_patterns: Vec::new(),
        }
    }
}

impl Settings {
    /// Reads a configuration that was accepted. What it leaves open is that of the processor.
    ///
    /// # Errors
    /// A recompute specification or labels to offload that cannot be followed, sequences longer than the model has
    /// positions, more logits in a chunk of the head than a product of cuBLASLt may have, or offload of what exists in tiles
    /// alone.
    pub fn new(config: &Config) -> Result<Settings> {
        let (optim, recompute) = (&config.optim, &config.recompute);
        let seq = config.data.seq;
        // Without an automatic choice, nothing was chosen to be offloaded.
        let (labels, layers) = (config.labels(), config.model.layers);
        let offloaded = match config.chooses_offload() {
            true => Ok(OffloadLabels::default()),
            false => OffloadLabels::parse_of(labels, &config.offload.activations),
        };
        let policy = Policy::with_layers(labels, &recompute.spec, &recompute.layers, layers)?;
        // A batch file brings its own length of sequences, so this is known only now.
        if let Some(most) = config.model.max_positions.filter(|most| seq > *most) {
            return Err(ConfigError::Contradiction(format!(
                "sequences have {seq} tokens, but the model has learned only {most} positions (model.max_positions); make \
                 data.seq at most {most}"
            )));
        }
        sharing::check(config)?;
        check_logits(config)?;
        fp8::check_step(config)?;
        let attention = attention(config);
        let policy = policy.offload(&offloaded?)?;
        check_offloaded(config, attention, &policy)?;
        let settings = Settings {
            model: config.model.clone(),
            structure: Architecture::declared,
            freeze: config.train.freeze.clone(),
            lora: config.lora.adapters()?,
            fp8: config.fp8.products(),
            objective: StepObjective::of(config),
            dtype: config.dtype().into(),
            seq,
            micro_batch: config.batch.micro,
            accum: config.batch.accum,
            policy,
            head_chunk: config.memory.head_chunk.or(DEFAULT_HEAD_CHUNK),
            tile_tokens: config.memory.tile_tokens,
            expert_unit: config.memory.expert_unit,
            state_interval: recompute.state_interval.unwrap_or(1),
            packing: config.packing(),
            between: between_steps(config),
            checkpoint_copy: config.checkpoint.interval().is_some() && !config.checkpoint.blocking,
            attention,
            kernels: PerFamily::new(|family: KernelFamily| family.effective_choice(config)),
            optimizer: Hyperparameters {
                kind: optim.kind,
                adamw: AdamW {
                    beta1: optim.beta1,
                    beta2: optim.beta2,
                    eps: optim.eps,
                },
                muon: Muon {
                    momentum: optim.muon_momentum,
                    nesterov: optim.nesterov,
                    ns_steps: optim.ns_steps,
                    ns_coefficients: optim.ns_coefficients,
                    ns_eps: optim.ns_eps,
                    ns_dtype: optim.ns_dtype.into(),
                    lr_adjust: optim.lr_adjust,
                },
                adafactor: Adafactor {
                    beta2_decay: optim.beta2_decay,
                    eps: optim.adafactor_eps.0.or(Adafactor::default().eps),
                    least_rms: optim.adafactor_eps.1,
                    clip_threshold: optim.clip_threshold,
                },
                weight_decay: optim.weight_decay,
                clip_norm: optim.clip_norm,
                faster: config.lora.faster(),
            },
            states: StateFormats {
                moments: optim.state_dtype,
                master: optim.master,
                gradients: optim.grad_dtype.into(),
                f32_patterns: optim.f32_states.clone(),
            },
            router_bias_rate: optim.router_bias_rate,
            homes: config.homes()?,
            ranks: config.ranks(),
            pipeline: None,
            engine_bytes: config.engine_bytes,
            whole_matrices: WholeMatrices {
                patterns: optim.matrices.clone(),
                peak: config.lr.matrices,
            },
            schedule: Schedule {
                kind: config.lr.schedule,
                peak: config.lr.peak,
                warmup_steps: config.lr.warmup_steps,
                decay_steps: config.lr.decay_steps,
                min_ratio: config.lr.min_ratio,
                total_steps: config.train.steps,
            },
            seed: config.train.seed,
            hardware: config.hardware.clone(),
            graphs_off: graphs_off(config),
        };
        if let Some(fp8) = &settings.fp8 {
            fp8::check_exceptions(fp8, &settings.architecture().parameters)?;
        }
        let pipeline = pipeline(config, || settings.architecture())?;
        Ok(Settings {
            pipeline,
            ..settings
        })
    }

    /// What the model is made of, and how its stages run.
    pub fn architecture(&self) -> Architecture {
        let parameters = match &self.lora {
            Some(lora) => Parameters::adapted(lora.clone()),
            None => Parameters::freezing(NamePatterns::new(&self.freeze)),
        };
        let parameters = match &self.fp8 {
            Some(fp8) => parameters.multiplying_in_fp8(fp8.clone()),
            None => parameters,
        };
        (self.structure)(&self.model, self.attention, parameters)
            .keeping_states(self.state_interval)
            .of_sharing(self.sharing())
            .in_tiles(self.tile_tokens)
    }

    /// The ranks that share sequences with this one.
    pub fn sharing(&self) -> SharingRanks {
        sharing::ranks(self.ranks.as_ref())
    }

    /// The parts that this rank has of each sequence.
    pub fn own_parts(&self) -> OwnParts {
        self.sharing().own_parts()
    }

    /// Tokens of a part of a sequence.
    pub fn part_seq(&self) -> usize {
        self.seq / self.own_parts().of
    }

    /// Tokens that this rank has of each sequence.
    pub fn own_seq(&self) -> usize {
        self.part_seq() * self.own_parts().count
    }

    /// Tokens of a step of all ranks together.
    pub fn tokens_a_step(&self) -> usize {
        self.rank().of * self.accum * self.micro_batch * self.own_seq()
    }

    /// The same settings without stages: this rank computes the whole model.
    pub fn in_one_stage(&self) -> Settings {
        let of_stage = |ranks: &Ranks| Ranks {
            stage: Rank::ALONE,
            ..ranks.clone()
        };
        Settings {
            ranks: self.ranks.as_ref().map(of_stage),
            pipeline: None,
            ..self.clone()
        }
    }

    /// The same settings with `layers` layers, in one stage. Name patterns that fit only removed layers are removed too.
    pub fn of_layers(&self, layers: usize) -> Settings {
        let mut small = self.in_one_stage();
        small.model.layers = layers;
        let architecture = small.architecture();
        let parameters = || architecture.parameters.in_layout();
        let fits = |pattern: &String| {
            let pattern = NamePatterns::new(std::slice::from_ref(pattern));
            parameters().any(|parameter| pattern.fit(&parameter.name))
        };
        small.freeze.retain(fits);
        let lora = small.lora.as_mut();
        if let Some(of_layers) = lora.and_then(|lora| lora.layers.as_mut()) {
            of_layers.retain(|layer| *layer < layers);
        }
        small.states.f32_patterns.retain(fits);
        if let Some(fp8) = &mut small.fp8 {
            fp8.except = fp8.except.some(fits);
        }
        let patterns = small.whole_matrices.patterns.take();
        let patterns = patterns.map(|all| all.into_iter().filter(fits).collect::<Vec<String>>());
        small.whole_matrices.patterns = patterns.filter(|left| !left.is_empty());
        small
    }

    /// This rank among those that have other micro-batches, or other parts of them: all, or those of its stage of a pipeline. One
    /// alone where there is no group.
    pub fn rank(&self) -> Rank {
        let ranks = self.ranks.as_ref();
        ranks.map_or(Rank::ALONE, |ranks| ranks.rank)
    }

    /// This rank among all; one alone where there is no group.
    pub fn rank_of_all(&self) -> Rank {
        let ranks = self.ranks.as_ref();
        ranks.map_or(Rank::ALONE, Ranks::of_all)
    }

    /// The narrowest type that a matrix product reads or writes: bf16 if gradients, the optimizer's products or everything is.
    pub fn narrowest_dtype(&self) -> DType {
        let types = [self.dtype, self.states.gradients];
        let mut all = types.into_iter().chain(self.optimizer.product_dtype());
        match all.all(|dtype| dtype == DType::F32) {
            true => DType::F32,
            false => DType::BF16,
        }
    }

    /// The learning rate of matrices that the optimizer updates as a whole, at a step; none if it updates none so.
    pub fn matrix_rate(&self, step: usize) -> Option<f64> {
        let peak = self.whole_matrices.peak.unwrap_or(self.schedule.peak);
        let schedule = Schedule {
            peak,
            ..self.schedule
        };
        let has_matrices = self.optimizer.product_dtype().is_some();
        has_matrices.then(|| schedule.rate(step))
    }

    /// The trained matrices of a layout that an optimizer may update as a whole: those of the blocks, or those that patterns name.
    ///
    /// # Errors
    /// A pattern of names that fits no matrix, no matrix at all, or one that is too large for a product.
    pub fn matrices(
        &self,
        architecture: &Architecture,
        layout: &Layout,
    ) -> Result<Vec<WholeTensor>> {
        if self.optimizer.product_dtype().is_none() {
            return Ok(Vec::new());
        }
        let entry = |matrix: &WholeTensor| &layout.entries()[matrix.entry];
        let all = architecture.parameters.in_layout().enumerate();
        let all = all.filter_map(|(index, one)| Some((one.part, matrix_of(index, one)?)));
        let all = all.filter(|(_, one)| entry(one).role != Role::Buffer);
        let chosen: Vec<WholeTensor> = match &self.whole_matrices.patterns {
            None => {
                let of_blocks = all.filter(|(part, _)| matches!(part, Layer::Block(_)));
                of_blocks.map(|(_, one)| one).collect()
            }
            Some(patterns) => {
                let all: Vec<WholeTensor> = all.map(|(_, one)| one).collect();
                let name = |one: &WholeTensor| &entry(one).name[..];
                let patterns = NamePatterns::new(patterns);
                check_patterns(all.iter().map(name), "optim.matrices", &patterns)?;
                let fitting = all.into_iter();
                fitting.filter(|one| patterns.fit(name(one))).collect()
            }
        };
        let trained = chosen
            .into_iter()
            .filter(|one| entry(one).role.is_trained());
        let trained: Vec<WholeTensor> = trained.collect();
        let elements = |one: &WholeTensor| one.shape[0].saturating_mul(one.shape[1]);
        if let Some(large) = trained
            .iter()
            .find(|one| elements(one) > PRODUCT_ELEMENTS_MAX)
        {
            return Err(ConfigError::Contradiction(format!(
                "`{}` has {} elements, and one matrix product has at most {PRODUCT_ELEMENTS_MAX}; leave it out of optim.matrices",
                entry(large).name,
                elements(large)
            )));
        }
        if trained.is_empty() {
            return Err(ConfigError::Contradiction(
                "--optimizer muon has no matrix to update: those of the blocks, or those that optim.matrices names, are frozen \
                 (train.freeze); name others, or use --optimizer adamw"
                    .into(),
            ));
        }
        Ok(trained)
    }

    /// Where each parameter of a model lies in the arenas.
    ///
    /// # Errors
    /// A pattern of names that fits no parameter, or patterns that freeze all.
    pub fn layout(&self, architecture: &Architecture) -> Result<Layout> {
        let parameters = &architecture.parameters;
        if let Some(lora) = &self.lora {
            check_modules(lora, &parameters.modules)?;
        }
        let ranks = self.ranks.as_ref().map(|ranks| ranks.rank.of);
        let is_quantised = self.states.moments == MomentFormat::Quantised;
        let patterns = NamePatterns::new(&self.states.f32_patterns);
        let layout = parameters.layout_for(ranks, self.expert_unit, |name, elements| {
            is_quantised && (elements < SMALLEST_QUANTISED || patterns.fit(name))
        });
        let experts = self
            .model
            .experts
            .as_ref()
            .map_or(0, |experts| experts.count);
        expert_unit::check_layout(&layout, self.expert_unit, (experts, ranks.unwrap_or(1)))?;
        // The defaults name the norms and embeddings of all families.
        let defaults = Config::default().optim.f32_states;
        let f32_states = self.states.f32_patterns.iter();
        let own: Vec<String> = f32_states
            .filter(|text| is_quantised && !defaults.contains(text))
            .cloned()
            .collect();
        let entries = layout.entries().iter();
        let weights = entries.filter(|entry| entry.role != Role::Buffer);
        let names = weights.clone().map(|entry| &entry.name[..]);
        check_patterns(names.clone(), "optim.f32_states", &NamePatterns::new(&own))?;
        check_patterns(names, "train.freeze", &NamePatterns::new(&self.freeze))?;
        if !layout.entries().iter().any(|entry| entry.role.is_trained()) {
            return Err(ConfigError::Contradiction(format!(
                "train.freeze fits all {} parameters, so that nothing is left to train; leave out a pattern, or make one \
                 narrower",
                weights.count()
            )));
        }
        let shard_group = self.ranks.as_ref().and_then(|ranks| ranks.shard_group);
        let layout = match shard_group {
            None => layout,
            Some(ranks) => layout.in_shard_groups(ranks),
        };
        Ok(match &self.pipeline {
            None => layout,
            Some(pipeline) => layout.of_stage(self.stage(), |part| pipeline.virtual_stage_of(part)),
        })
    }
}

/// A parameter that is a matrix, or the matrices of experts or their adapters' factors, by its index in the layout. An expert's
/// gate and up count as two where files and dense layers have them so.
fn matrix_of(entry: usize, parameter: &Parameter) -> Option<WholeTensor> {
    let (count, shape, is_transposed) = match (parameter.stored, &parameter.shape[..]) {
        (Stored::ByExpert(files), &[experts, outputs, inputs]) => {
            let parts = files.parts.len();
            (experts * parts, [outputs / parts, inputs], false)
        }
        (Stored::ExpertsTransposed { .. }, &[experts, rows, columns]) => {
            (experts, [rows, columns], true)
        }
        (Stored::ExpertsInRows | Stored::ExpertsInColumns { .. }, &[experts, rows, columns]) => {
            (experts, [rows, columns], false)
        }
        (Stored::Convolution, _) => return None,
        (stored, &[rows, columns]) => (1, [rows, columns], stored == Stored::Transposed),
        _ => return None,
    };
    let [rows, columns] = shape;
    Some(WholeTensor {
        entry,
        count,
        shape,
        stored: if is_transposed {
            [columns, rows]
        } else {
            shape
        },
    })
}

/// Refuses a pattern that fits none of some parameters.
fn check_patterns<'a>(
    names: impl Iterator<Item = &'a str> + Clone,
    key: &'static str,
    patterns: &NamePatterns,
) -> Result {
    let unfit = patterns.unfit(names.clone()).next();
    unfit.map_or(Ok(()), |pattern| {
        Err(ConfigError::NoSuchParameter {
            key,
            pattern: pattern.into(),
            nearest: nearest_containing(pattern, names)
                .unwrap_or_default()
                .into(),
        })
    })
}

/// The chunk of `memory.head_chunk = "auto"` on the processor, and wherever no chunk is known to fit.
pub const DEFAULT_HEAD_CHUNK: usize = 512;

/// Fewest micro-batches of a step of which some become graphs: the first is none, and one that is captured is worth it when
/// it comes again.
pub const GRAPHS_FROM_ACCUM: usize = 3;

/// Why no micro-batch is a graph, if none is.
fn graphs_off(config: &Config) -> Option<&'static str> {
    let reasons = [
        (config.train.graphs == Graphs::Off, "train.graphs is off"),
        (
            config.ranks().is_some(),
            "there are ranks, and no graph holds what they exchange",
        ),
        (
            config.batch.accum < GRAPHS_FROM_ACCUM,
            "a step has fewer than 3 micro-batches (batch.accum)",
        ),
        (
            config.log.trace,
            "log.trace waits for every operation by itself",
        ),
        (
            config.log.nvtx,
            "log.nvtx shows phases, which a graph does not tell",
        ),
        (
            config.has_policy(),
            "each step of a policy may have other numbers of its loss, which a graph would keep",
        ),
    ];
    let mut reasons = reasons.into_iter();
    reasons.find_map(|(is_so, reason)| is_so.then_some(reason))
}

fn between_steps(config: &Config) -> BetweenSteps {
    let (eval, log) = (&config.eval, &config.log);
    let samples = log.sample_prompt.len() + log.sample_tokens;
    BetweenSteps {
        // A policy's log-probabilities are asked for between steps.
        evaluation: (eval.every.is_some() || config.has_policy())
            .then(|| eval.micro_batch.unwrap_or(config.batch.micro)),
        sample: log.sample_every.map(|_| SampledText {
            sequences: 1,
            tokens: samples.min(config.data.seq),
        }),
    }
}

/// Refuses a chunk of the output head whose logits are too many for one product.
fn check_logits(config: &Config) -> Result {
    let (vocab, tokens) = (config.model.vocab, config.batch.micro * config.part_seq());
    let chunk = config.memory.head_chunk.or(DEFAULT_HEAD_CHUNK).min(tokens);
    let most = PRODUCT_ELEMENTS_MAX / vocab;
    if chunk <= most {
        return Ok(());
    }
    if most == 0 {
        return Err(ConfigError::Contradiction(format!(
            "model.vocab is {vocab}, and one matrix product has at most {PRODUCT_ELEMENTS_MAX} logits, so that not one token's fit; \
             a smaller model.vocab is needed"
        )));
    }
    Err(ConfigError::Contradiction(format!(
        "a chunk of the output head has {chunk} tokens of {vocab} logits, more than the 2^31 of one matrix product; make \
         memory.head_chunk at most {most}"
    )))
}

/// Refuses to offload what exists for a tile of tokens alone.
fn check_offloaded(config: &Config, attention: Attention, policy: &Policy) -> Result {
    let Some(tiles) = config.memory.tile_tokens else {
        return Ok(());
    };
    let architecture = Architecture::of(&config.model, attention).in_tiles(Some(tiles));
    let has = |layer: usize, label| {
        let mut activations = architecture.blocks[layer].activations();
        activations.any(|(one, _)| one.label() == label)
    };
    let away = |layer: usize| {
        let actions = policy.actions(layer);
        let mut labels = policy.labels.iter();
        labels.find(|label| actions.of(*label) == Action::Offload && !has(layer, *label))
    };
    let found = (0..policy.layers()).find_map(away);
    match found {
        None => Ok(()),
        Some(label) => Err(ConfigError::Contradiction(format!(
            "`{}` cannot be offloaded: under memory.tile_tokens it exists for a tile of tokens alone, and is made again; \
             leave it out of what is offloaded, or memory.tile_tokens out of the configuration",
            label.name()
        ))),
    }
}
