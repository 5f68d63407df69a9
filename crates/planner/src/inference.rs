//! The memory of evaluation and generation, to the byte.

use kernels::Target;
use memory::{ByCategory, Memory, format_bytes};
use model::{Architecture, KvCache, loading_bytes};
use serde::Serialize;
use session::{
    Generation, Inference, Result, SessionError, WhichModel, longest_and_shortest,
    shape_of_a_micro_batch,
};
use settings::{Settings, StepObjective};
use std::fmt::{Display, Formatter};

/// The memory of a model without gradients and optimizer states.
#[derive(Clone, Debug, Serialize)]
pub struct InferencePlan {
    /// `cpu` or `cuda`.
    pub device: &'static str,
    /// Compute type.
    pub dtype: &'static str,
    /// Number of parameters.
    pub parameters: usize,
    /// Bytes of the weights.
    pub weights_bytes: u64,
    /// Keys and values of the sequences, if they are cached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<PlannedCache>,
    /// Most live device bytes.
    pub peak_bytes: u64,
    /// Live at the peak; sums to `peak_bytes`.
    pub peak_by_category: ByCategory,
    /// Bytes of the slab.
    pub slab_bytes: u64,
    /// Slab, weights and everything else that stays, as the driver sees them.
    pub reserved_bytes: u64,
    /// The most host memory besides this while the weights are loaded.
    #[serde(skip)]
    pub loading_bytes: u64,
}

/// The keys and values of all sequences.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedCache {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each, prompt included.
    pub tokens: usize,
    /// Bytes of all of it.
    pub bytes: u64,
    /// How `bytes` is computed, with numbers.
    pub formula: String,
}

impl InferencePlan {
    /// Plans an evaluation in micro-batches of `rows` sequences.
    ///
    /// # Errors
    /// Only on a defect: shapes need no memory.
    pub fn of_evaluation(
        settings: &Settings,
        target: Target,
        rows: usize,
    ) -> Result<InferencePlan> {
        plan(settings, target, None, |inference| {
            let micro = shape_of_a_micro_batch(settings, rows, settings.seq);
            let micro = std::iter::once(Ok::<_, SessionError>(micro));
            let mut forward = inference.forward();
            match settings.objective {
                StepObjective::NextTokens => forward.evaluate(micro).map(|_| ()),
                StepObjective::Preferences { .. } => forward.sequence_losses(micro).map(|_| ()),
                StepObjective::Policy => {
                    let losses = forward.token_losses(WhichModel::Trained, micro);
                    losses.map(|_| ())
                }
            }
        })
    }

    /// Plans a generation from prompts of these numbers of tokens.
    ///
    /// # Errors
    /// As [`InferencePlan::of_evaluation`].
    pub fn of_generation(
        settings: &Settings,
        target: Target,
        prompts: &[usize],
        wanted: &Generation,
    ) -> Result<InferencePlan> {
        let cache = wanted.uses_cache.then_some((prompts.len(), wanted.window));
        plan(settings, target, cache, |inference| {
            inference.forward().rehearse(prompts, wanted)
        })
    }

    /// Plans `batch` sequences that grow to `tokens`, for prompts of any length.
    ///
    /// # Errors
    /// As [`InferencePlan::of_evaluation`].
    pub fn of_sequences(
        settings: &Settings,
        target: Target,
        (batch, tokens): (usize, usize),
    ) -> Result<InferencePlan> {
        plan(settings, target, Some((batch, tokens)), |inference| {
            for (prompts, wanted) in longest_and_shortest(batch, tokens) {
                inference.forward().generate(&prompts, &wanted, |_, _| ())?;
            }
            Ok(())
        })
    }
}

fn plan(
    settings: &Settings,
    target: Target,
    cache: Option<(usize, usize)>,
    compute: impl FnOnce(&mut Inference) -> Result,
) -> Result<InferencePlan> {
    let memory = Memory::shapes();
    let mut inference = Inference::on_shapes(settings, &memory, target)?;
    let persistent_bytes = memory.live_bytes();
    let architecture = inference.model().architecture();
    let kv_cache = cache.map(|cache| PlannedCache::new(settings, architecture, cache));
    let parameters = inference.model().layout().parameters();
    let weights_bytes = inference.weights_bytes();
    let loading_bytes = loading_bytes(&architecture.parameters);
    compute(&mut inference)?;
    let used = memory.step_memory();
    Ok(InferencePlan {
        device: target.name(),
        dtype: settings.dtype.as_str(),
        parameters,
        weights_bytes,
        kv_cache,
        peak_bytes: used.peak.bytes,
        peak_by_category: used.peak.by_category,
        slab_bytes: used.slab_bytes,
        reserved_bytes: persistent_bytes + used.slab_bytes,
        loading_bytes,
    })
}

impl PlannedCache {
    fn new(
        settings: &Settings,
        architecture: &Architecture,
        (batch, tokens): (usize, usize),
    ) -> PlannedCache {
        let (model, dtype) = (&settings.model, settings.dtype);
        let shape = architecture.cache_shape();
        let (layers, kv_heads) = (shape.of_tokens().0, model.kv_heads);
        let of_token = match &model.latent {
            None => format!(
                "2 x {layers} layers x {kv_heads} KV heads x {} wide",
                model.head_dim
            ),
            Some(latent) => format!(
                "{layers} layers x ({} of a latent + {} of all heads)",
                latent.kv, latent.rotary_dim
            ),
        };
        let mut formula = format!(
            "{of_token} x {} tokens in blocks of 16 x {batch} sequences x {} bytes",
            tokens.next_multiple_of(16),
            dtype.size_in_bytes(),
        );
        if let (layers, Some(state)) = shape.of_states() {
            let of_sequence = state.bytes(dtype);
            formula += &format!(
                " + {layers} layers with states x {batch} sequences x {of_sequence} bytes"
            );
        }
        PlannedCache {
            batch,
            tokens,
            bytes: KvCache::bytes(&shape, dtype, &vec![tokens; batch]),
            formula,
        }
    }
}

impl Display for InferencePlan {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let mut line = |name: &str, bytes: u64, why: &str| {
            let bytes = format!("{} ({bytes} bytes)", format_bytes(bytes));
            let line = format!("{name:<10} {bytes:<34} {why}");
            writeln!(f, "{}", line.trim_end())
        };
        let weights = format!("{} parameters in {}", self.parameters, self.dtype);
        line("weights", self.weights_bytes, &weights)?;
        if let Some(cache) = &self.kv_cache {
            line("KV cache", cache.bytes, &cache.formula)?;
        }
        line("peak", self.peak_bytes, &format!("on {}", self.device))?;
        line("reserved", self.reserved_bytes, "")
    }
}
