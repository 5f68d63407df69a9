//! `memory.head_chunk = "auto"`: the smallest chunk of the output head that costs a step next to nothing.
//!
//! Each chunk's product reads and writes the gradient of the whole head, and a GPU hides only half of those bytes
//! behind the product. But the logits of a large chunk take memory. The chunk decides the order of sums, so the choice
//! must not depend on settings that promise the same bits: recompute, offload, ranks. The cost of chunks is therefore
//! read from one micro-batch on paper of a single process that keeps everything on the device, at the rates that are
//! assumed of a GPU. So runs with such settings differ only if memory is too short for the chunk that is wanted.

use crate::auto::{AutoError, choose};
use crate::figures::figures;
use crate::fullest_rank::as_fullest_rank;
use crate::on_paper::Paper;
use crate::room::Room;
use kernels::Target;
use kernels::timeline::{Measured, Rates};
use memory::Rank;
use session::Result;
use settings::{AutoOr, Config, DEFAULT_HEAD_CHUNK, ParallelConfig, Release, Settings};

/// Chunks that are compared, in tokens. The first is the fallback if none fits.
const CHUNKS: [usize; 5] = [DEFAULT_HEAD_CHUNK, 1024, 2048, 4096, 8192];

/// A smaller chunk may lengthen a micro-batch by this share over the fastest chunk.
const NEXT_TO_NOTHING: f64 = 0.005;

/// The share of the gradient's bytes that takes time besides the product's operations. A tile's sums are read and
/// written at its end, where only another tile's operations can hide them. An assumption.
const EXPOSED: f64 = 0.5;

/// A chunk of the output head that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenHeadChunk {
    /// Its tokens.
    pub tokens: usize,
    /// The chunks that were compared, the smallest first; empty if there was no choice.
    compared: Vec<Chunk>,
    /// Tokens of the chunk that would be taken without a limit on memory.
    wanted: usize,
}

/// A chunk, and the time of a micro-batch with it on paper.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Chunk {
    tokens: usize,
    seconds: f64,
}

impl ChosenHeadChunk {
    /// Chooses the smallest chunk that is nearly as fast as the fastest. If its plan does not fit a device of
    /// `device_bytes`, chooses the largest below it that does. Under automatic recompute, some policy has to fit
    /// `budget` instead. All ranks choose what the first rank with the head does; where some ranks with the head need more than others, the
    /// one that needs most.
    ///
    /// # Errors
    /// As [`crate::Plan::new`], or if a file of costs cannot be used.
    pub fn new(
        config: &Config,
        target: Target,
        device_bytes: Option<u64>,
        budget: Option<u64>,
    ) -> Result<ChosenHeadChunk, AutoError> {
        let compared = match target {
            Target::Cpu => Vec::new(),
            Target::Cuda => compared(config)?,
        };
        let wanted = smallest_of_the_fast(&compared).unwrap_or(DEFAULT_HEAD_CHUNK);
        let mut tokens = wanted;
        while tokens > DEFAULT_HEAD_CHUNK {
            let of_first = of_first_rank_with_head(&with_chunk(config, tokens));
            let fits = match budget.filter(|_| config.chooses()) {
                Some(budget) => some_policy_fits(&of_first, target, budget)?,
                None => fits(&of_first, target, device_bytes)?,
            };
            if fits {
                break;
            }
            tokens /= 2;
        }
        Ok(ChosenHeadChunk {
            tokens,
            compared,
            wanted,
        })
    }

    /// The choice in a sentence; none if the smallest chunk was wanted.
    pub fn describe(&self) -> Option<String> {
        if self.wanted == DEFAULT_HEAD_CHUNK {
            return None;
        }
        let of = |tokens| self.compared.iter().find(|chunk| chunk.tokens == tokens);
        let (smallest, chosen) = (self.compared.first()?, of(self.tokens)?);
        let short = match self.tokens < self.wanted {
            true => format!("; memory is too short for {}", self.wanted),
            false => String::new(),
        };
        Some(format!(
            "head_chunk auto: {} tokens, a micro-batch on paper of {:.3} ms ({:.3} ms with {}){short}",
            self.tokens,
            1e3 * chosen.seconds,
            1e3 * smallest.seconds,
            smallest.tokens,
        ))
    }
}

/// Adds `memory.head_chunk` to settings if a run with them would choose another chunk than was planned, where memory sets no bound.
///
/// # Errors
/// As [`crate::Plan::new`].
pub fn name_head_chunks<'a>(
    config: &Config,
    target: Target,
    sets: impl IntoIterator<Item = &'a mut Vec<String>>,
) -> Result {
    // Each is found once.
    let mut wanted: Vec<(Config, usize)> = Vec::new();
    for set in sets {
        let planned = config.with(set)?;
        let is_set = set.iter().any(|one| one.starts_with("memory.head_chunk="));
        let AutoOr::Number(tokens) = planned.memory.head_chunk else {
            continue;
        };
        if is_set || target == Target::Cpu {
            continue;
        }
        let alike = everything_kept(&with_chunk(&planned, DEFAULT_HEAD_CHUNK));
        let known = wanted.iter().find(|(known, _)| *known == alike);
        let chosen = match known {
            Some((_, chosen)) => *chosen,
            None => smallest_of_the_fast(&compared(&planned)?).unwrap_or(DEFAULT_HEAD_CHUNK),
        };
        if chosen != tokens {
            set.push(format!("memory.head_chunk={tokens}"));
        }
        wanted.push((alike, chosen));
    }
    Ok(())
}

/// The chunks of at most the tokens of a micro-batch or a part of one, with the time of a micro-batch on paper; none if there is only one.
fn compared(config: &Config) -> Result<Vec<Chunk>> {
    let tokens = config.batch.micro * config.part_seq();
    let chunks = CHUNKS.into_iter().filter(|chunk| *chunk <= tokens);
    let alike = everything_kept(config);
    let settings = chunks.map(|tokens| (tokens, Settings::new(&with_chunk(&alike, tokens))));
    // A large chunk's logits may be too many for one product.
    let possible = settings.filter_map(|(tokens, settings)| Some((tokens, settings.ok()?)));
    let possible: Vec<(usize, Settings)> = possible.collect();
    if possible.len() < 2 {
        return Ok(Vec::new());
    }
    let chunk = |(tokens, settings): (usize, Settings)| {
        let mut paper = Paper::at_rates(&settings, Target::Cuda);
        paper.measured = gradient_products(&settings, tokens, paper.rates);
        let seconds = paper.another_micro_batch(&settings)?;
        Ok(Chunk { tokens, seconds })
    };
    possible.into_iter().map(chunk).collect()
}

/// The time of the product that is added to the head's gradient, by the tokens of its chunk: a whole chunk, and the
/// last one.
fn gradient_products(settings: &Settings, chunk: usize, rates: Rates) -> Measured {
    let (vocab, hidden) = (settings.model.vocab, settings.model.hidden);
    let last = settings.micro_batch * settings.part_seq() % chunk;
    let product = |tokens: usize| {
        let flops = 2.0 * (vocab * tokens * hidden) as f64;
        let gradient = 2.0 * (vocab * hidden * settings.states.gradients.size_in_bytes()) as f64;
        let operands = (tokens * (vocab + hidden) * settings.dtype.size_in_bytes()) as f64;
        let seconds = flops / rates.flops + EXPOSED * gradient / rates.memory;
        let seconds = seconds.max((gradient + operands) / rates.memory);
        (("matmul".to_string(), vec![vocab, tokens, hidden]), seconds)
    };
    [chunk, last].map(product).into()
}

/// The configuration without settings that cost time but promise the same bits, so that all such runs have the same.
fn everything_kept(config: &Config) -> Config {
    let default = Config::default();
    let mut config = config.clone();
    config.optim.release = Release::Step;
    // Kernels have bits of their own, but the same memory: a run has the same plan by either kind.
    config.attention.kernels = default.attention.kernels;
    config.experts.kernels = default.experts.kernels;
    Config {
        recompute: default.recompute,
        offload: default.offload,
        collectives: default.collectives,
        hardware: default.hardware,
        rank: None,
        parallel: ParallelConfig {
            context: config.parallel.context,
            ..default.parallel
        },
        ..config
    }
}

fn with_chunk(config: &Config, tokens: usize) -> Config {
    let mut config = config.clone();
    config.memory.head_chunk = AutoOr::Number(tokens);
    config
}

/// The configuration of the first rank of the last stage of a pipeline, which has the head; without one, of the first rank.
fn of_first_rank_with_head(config: &Config) -> Config {
    let stages = config.parallel.pipeline;
    let first = |rank: Rank| Rank {
        number: rank.of / stages * (stages - 1),
        ..rank
    };
    Config {
        rank: config.rank.map(first),
        ..config.clone()
    }
}

/// Tokens of the smallest chunk that is nearly as fast as the fastest. `chunks` are sorted, the smallest first.
fn smallest_of_the_fast(chunks: &[Chunk]) -> Option<usize> {
    let fastest = chunks.iter().map(|chunk| chunk.seconds).reduce(f64::min)?;
    let most = fastest * (1.0 + NEXT_TO_NOTHING);
    let mut fast = chunks.iter().filter(|chunk| chunk.seconds <= most);
    fast.next().map(|chunk| chunk.tokens)
}

/// Whether a plan fits a device. Without a known size, everything fits.
fn fits(config: &Config, target: Target, device_bytes: Option<u64>) -> Result<bool> {
    let Some(device_bytes) = device_bytes else {
        return Ok(true);
    };
    let (_, settings) = as_fullest_rank(config.clone())?;
    let needs = figures(&settings, target)?.needs();
    Ok(needs.fit(Room::Device(device_bytes)))
}

/// Whether automatic recompute finds a policy within a budget.
fn some_policy_fits(config: &Config, target: Target, budget: u64) -> Result<bool, AutoError> {
    match choose(config, target, budget) {
        Ok(_) => Ok(true),
        Err(AutoError::Infeasible { .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chunk that is taken if the chunks, in their order, take `seconds`.
    fn taken(seconds: &[f64]) -> Option<usize> {
        let chunks = CHUNKS.into_iter().zip(seconds);
        let chunks = chunks.map(|(tokens, seconds)| Chunk {
            tokens,
            seconds: *seconds,
        });
        smallest_of_the_fast(&chunks.collect::<Vec<_>>())
    }

    #[test]
    fn the_smallest_that_costs_next_to_nothing_is_taken() {
        assert_eq!(taken(&[]), None);
        assert_eq!(taken(&[3.0]), Some(512));
        assert_eq!(taken(&[1.005, 1.0]), Some(512));
        assert_eq!(taken(&[1.0051, 1.004, 1.0]), Some(1024));
        assert_eq!(taken(&[1.1, 1.05, 1.0, 0.999, 0.998]), Some(2048));
        assert_eq!(taken(&[1.0, 1.2, 1.3]), Some(512));
    }

    /// A model whose head is wide and that has few layers: small chunks are bound by the bytes of the head's gradient.
    fn config(set: &[&str]) -> Config {
        let wide = [
            "model.hidden=1024",
            "model.heads=8",
            "model.kv_heads=8",
            "model.head_dim=128",
            "model.ffn=2048",
            "model.layers=2",
            "model.vocab=150000",
            "train.device=cuda",
            "batch.micro=8",
        ];
        let set = wide.iter().chain(set).map(ToString::to_string);
        Config::default().with(&set.collect::<Vec<_>>()).unwrap()
    }

    fn chosen(config: &Config, device_bytes: Option<u64>, budget: Option<u64>) -> usize {
        let chosen = ChosenHeadChunk::new(config, Target::Cuda, device_bytes, budget);
        chosen.unwrap().tokens
    }

    #[test]
    fn a_chunk_is_larger_where_that_is_faster_and_fits() {
        let config = config(&[]);
        let free = chosen(&config, None, None);
        assert!(free > DEFAULT_HEAD_CHUNK, "{free}");
        // Exact to the byte: the device has to hold the reserved bytes and the overhead.
        let settings = Settings::new(&with_chunk(&config, free)).unwrap();
        let planned = figures(&settings, Target::Cuda).unwrap();
        let device = planned.reserved_bytes + crate::gpus::overhead_bytes(Target::Cuda, &settings);
        assert_eq!(chosen(&config, Some(device), None), free);
        let less = ChosenHeadChunk::new(&config, Target::Cuda, Some(device - 1), None).unwrap();
        assert_eq!(less.tokens, free / 2);
        let said = less.describe().unwrap();
        let short = format!("; memory is too short for {free}");
        assert!(said.ends_with(&short), "{said}");
        assert_eq!(chosen(&config, Some(1), None), 512);
    }

    #[test]
    fn there_is_nothing_to_choose_on_the_processor_or_of_few_tokens() {
        let on_cpu = ChosenHeadChunk::new(&config(&[]), Target::Cpu, None, None).unwrap();
        let few = config(&["batch.micro=1", "data.seq=1000"]);
        let few = ChosenHeadChunk::new(&few, Target::Cuda, None, None).unwrap();
        for chosen in [on_cpu, few] {
            assert_eq!((chosen.tokens, chosen.describe()), (512, None));
        }
    }

    /// 2,000 tokens are two whole chunks of 900, and one of 200.
    #[test]
    fn every_chunk_pays_for_half_of_the_gradient_that_it_is_added_to() {
        for (dtype, bytes) in [("bf16", 2.0), ("f32", 4.0)] {
            let grad_dtype = format!("optim.grad_dtype={dtype}");
            let set = [
                "batch.micro=2",
                "data.seq=1000",
                &grad_dtype,
                "train.dtype=bf16",
            ];
            let config = with_chunk(&everything_kept(&config(&set)), 900);
            let settings = Settings::new(&config).unwrap();
            let plain = Paper::at_rates(&settings, Target::Cuda);
            let rates = plain.rates;
            let measured = gradient_products(&settings, 900, rates);
            let dearer = Paper::new(&settings, Target::Cuda, measured);
            let [plain, dearer] =
                [plain, dearer].map(|paper| paper.another_micro_batch(&settings).unwrap());
            let weights = 150_000.0 * 1024.0;
            let more = |tokens: f64| {
                let flops = 2.0 * weights * tokens / rates.flops;
                let gradient = 2.0 * bytes * weights;
                let operands = 2.0 * tokens * (150_000.0 + 1024.0);
                let bytes = (gradient + operands) / rates.memory;
                (flops + 0.5 * gradient / rates.memory).max(bytes) - flops.max(bytes)
            };
            let expected = 2.0 * more(900.0) + more(200.0);
            assert!(expected > 1e-4, "{dtype}: {expected}");
            assert!(
                (dearer - plain - expected).abs() < 1e-9,
                "{dtype}: {expected}"
            );
        }
    }

    /// Settings that save memory and promise the same bits do not change the chunk, if memory has no limit.
    #[test]
    fn what_changes_no_bits_does_not_change_the_chunk() {
        let kept = ChosenHeadChunk::new(&config(&[]), Target::Cuda, None, None).unwrap();
        for set in [
            ["recompute.spec=full", "offload.activations=block_input"],
            ["offload.optimizer=pinned", "offload.gradients=pinned"],
            ["offload.parameters=pinned", "hardware.peak_tflops=10"],
            ["batch.accum=5", "hardware.h2d_gbps=0.1"],
            ["optim.release=backward", "optim.clip_norm=inf"],
        ] {
            let other = ChosenHeadChunk::new(&config(&set), Target::Cuda, None, None).unwrap();
            assert_eq!(kept, other, "{set:?}");
        }
        let mut of_rank = config(&["collectives.zero=3"]);
        of_rank.join(Rank { number: 2, of: 3 }).unwrap();
        let of_rank = ChosenHeadChunk::new(&of_rank, Target::Cuda, None, None);
        assert_eq!(kept, of_rank.unwrap());
    }

    /// Ranks have different leases, but what the first rank needs decides for all.
    #[test]
    fn every_rank_chooses_what_the_first_does() {
        let mut config = config(&[]);
        let mut chosen = |number, bytes| {
            config.join(Rank { number, of: 3 }).unwrap();
            chosen(&config, Some(bytes), None)
        };
        for bytes in (2..8).map(|gib| gib << 30) {
            assert_eq!(chosen(0, bytes), chosen(2, bytes), "{bytes}");
        }
    }

    /// Attention in bf16 comes first in a block, so the last rank keeps most codes of weights, and the first one least.
    #[test]
    fn every_rank_chooses_what_the_one_with_most_codes_does() {
        let mut config = config(&[
            "train.dtype=bf16",
            "collectives.zero=3",
            "fp8.recipe=tensor",
            "fp8.weights=step",
            "fp8.except=[\"*self_attn*\"]",
        ]);
        let mut free = None;
        let needed = [0, 3].map(|number| {
            config.join(Rank { number, of: 4 }).unwrap();
            let free = *free.get_or_insert_with(|| chosen(&config, None, None));
            let settings = Settings::new(&with_chunk(&config, free)).unwrap();
            figures(&settings, Target::Cuda).unwrap().needs()
        });
        let [least, most] = needed.map(|needs| needs.device_bytes);
        assert!(least < most, "{least} {most}");
        let free = free.unwrap();
        for number in 0..4 {
            config.join(Rank { number, of: 4 }).unwrap();
            assert_eq!(chosen(&config, Some(most), None), free);
            assert_eq!(chosen(&config, Some(most - 1), None), free / 2);
            assert_eq!(chosen(&config, Some(least), None), free / 2);
        }
    }

    #[test]
    fn under_automatic_recompute_some_policy_has_to_fit() {
        let config = config(&["recompute.spec=auto", "memory.budget=1TiB"]);
        let free = chosen(&config, None, Some(1 << 40));
        assert!(free > DEFAULT_HEAD_CHUNK, "{free}");
        let least = match choose(&with_chunk(&config, free), Target::Cuda, 1) {
            Err(AutoError::Infeasible { smallest, .. }) => smallest,
            other => panic!("{other:?}"),
        };
        assert_eq!(chosen(&config, None, Some(least)), free);
        assert_eq!(chosen(&config, None, Some(least - 1)), free / 2);
    }
}
