//! Documents packed into one sequence are to the model what they are alone, and rows that are shorter than planned need no
//! more than the plan says.

use crate::common::elsewhere::all_pinned;
use crate::common::{
    ATTENTIONS, MODES, Random, config, offloading, plan, session, step_batch, variants,
};
use data::{MASKED, MicroBatch, Packing, StepBatch, padded_lengths};
use kernels::Target;
use kernels::meta::FlopCounter;
use memory::{DType, Memory, Rank};
use model::{Attention, ModelConfig};
use planner::{Plan, StepPeaks};
use session::{Session, StepOutcome, shape_of_micro_batches};
use settings::Settings;
use std::collections::BTreeSet;
use units::Zero;

/// Tokens of the documents of both rows.
const LENGTHS: [&[usize]; 2] = [&[20, 35, 16], &[48, 23]];

fn packed(model: &ModelConfig, mode: &str) -> Settings {
    let model = ModelConfig {
        dropout: 0.0,
        ..model.clone()
    };
    Settings {
        attention: Attention::Flash,
        packing: Packing::FirstFit,
        accum: 1,
        ..Settings::new(&config(model, DType::F32, mode)).unwrap()
    }
}

/// Every document as a row of its own: random tokens, no target after the last.
fn alone(settings: &Settings) -> StepBatch {
    let mut random = Random(1);
    let mut document = |tokens: usize| {
        let ids = (0..=tokens).map(|_| random.below(settings.model.vocab as u64) as i32);
        let ids: Vec<i32> = ids.collect();
        let mut targets = ids[1..].to_vec();
        targets[tokens - 1] = MASKED;
        MicroBatch {
            input_ids: ids[..tokens].to_vec(),
            targets,
            rows: 1,
            seq: tokens,
            part: memory::Rank::ALONE,
            documents: None,
            lengths: None,
            beside: None,
        }
    };
    let lengths = LENGTHS.into_iter().flatten();
    lengths.map(|tokens| document(*tokens)).collect()
}

/// The same documents side by side.
fn side_by_side(settings: &Settings) -> StepBatch {
    let alone = alone(settings).micro;
    let joined = |part: fn(&MicroBatch) -> &Vec<i32>| alone.iter().flat_map(part).copied();
    let starts = LENGTHS.into_iter().flat_map(|lengths| {
        let mut start = 0;
        lengths.iter().flat_map(move |tokens| {
            start += tokens;
            vec![(start - tokens) as i32; *tokens]
        })
    });
    let micro = MicroBatch {
        input_ids: joined(|micro| &micro.input_ids).collect(),
        targets: joined(|micro| &micro.targets).collect(),
        rows: LENGTHS.len(),
        seq: settings.seq,
        part: memory::Rank::ALONE,
        documents: Some(starts.collect()),
        lengths: None,
        beside: None,
    };
    StepBatch::from_iter([micro])
}

/// Loss and gradients of a step.
struct Run {
    outcome: StepOutcome,
    gradients: Vec<Vec<f32>>,
}

impl Run {
    fn new(settings: &Settings, batch: &StepBatch) -> Run {
        let mut session = session(settings);
        let outcome = session.step(batch).unwrap();
        let gradients = 0..session.model().layout().entries().len();
        let gradients = gradients.map(|index| session.gradient(index).unwrap());
        Run {
            outcome,
            gradients: gradients.collect(),
        }
    }

    /// The largest difference of losses, and of gradients as a share of their tensor's largest.
    fn distance(&self, other: &Run) -> (f32, f32) {
        let gradients = self.gradients.iter().zip(&other.gradients);
        let distances = gradients.map(|(a, b)| {
            let largest = b.iter().fold(0.0, |largest: f32, b| largest.max(b.abs()));
            let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
            differences.fold(0.0, f32::max) / largest
        });
        let loss = (self.outcome.loss - other.outcome.loss).abs();
        (loss / other.outcome.loss, distances.fold(0.0, f32::max))
    }
}

#[test]
fn packed_documents_are_what_they_are_alone() {
    for (name, model) in variants(2) {
        let settings = packed(&model, "none");
        let batch = side_by_side(&settings);
        let expected = Run::new(&settings, &alone(&settings));
        let packed = Run::new(&settings, &batch);
        assert_eq!(packed.outcome.targets, expected.outcome.targets, "{name}");
        let (loss, gradients) = packed.distance(&expected);
        assert!(
            loss < 1e-6 && gradients < 2e-6,
            "{name}: {loss}, {gradients}"
        );
        let unpacked = Settings {
            packing: Packing::Concatenate,
            ..settings.clone()
        };
        let peaks = [&settings, &unpacked].map(|settings| plan(settings).peak_bytes);
        assert!(peaks[0] > peaks[1], "{name}: documents take memory");
        // Without documents, tokens see those before their own and stand elsewhere.
        let mut unaware = batch.clone();
        unaware.micro[0].documents = None;
        let (loss, gradients) = Run::new(&settings, &unaware).distance(&expected);
        assert!(
            loss > 1e-4 && gradients > 0.01,
            "{name}: {loss}, {gradients}"
        );
    }
}

/// Micro-batches of padded documents are as long as their longest. What is live is never more than planned; placement may
/// lose a little more, so a slab for them is as large as the largest of all lengths.
#[test]
fn shorter_rows_need_no_more_than_planned() {
    let mut loses_more = false;
    for (name, model) in variants(3) {
        for (attention, mode) in ATTENTIONS
            .into_iter()
            .flat_map(|of| MODES.map(|mode| (of, mode)))
        {
            let settings = Settings {
                attention,
                packing: Packing::Pad,
                ..packed(&model, mode)
            };
            let planned = plan(&settings);
            let offloaded = offloading(&settings, "block_input,core_attn");
            for settings in [Some(settings), offloaded].into_iter().flatten() {
                let memory = Memory::shapes();
                let flops = FlopCounter::default();
                let mut session =
                    Session::on_shapes(settings.clone(), &memory, Target::Cpu, flops).unwrap();
                for seq in 1..settings.seq {
                    let shorter = Settings {
                        seq,
                        ..settings.clone()
                    };
                    let used = session.step(&step_batch(&shorter, 0)).unwrap().memory;
                    let name = format!("{name}, {attention:?}, {mode}, {seq}");
                    assert!(used.peak.bytes <= planned.peak_bytes, "{name}");
                    assert!(used.slab_bytes <= planned.slab_bytes * 26 / 25, "{name}");
                    loses_more |= used.slab_bytes > planned.slab_bytes;
                }
            }
        }
    }
    assert!(loses_more, "then the plan's slab would do");
}

/// Settings of padded rows of up to 200 tokens, with everything on the device, on the host, and divided among ranks.
fn padded(model: &ModelConfig, mode: &str, accum: usize) -> Vec<Settings> {
    let longer = ModelConfig {
        max_positions: model.max_positions.map(|_| 200),
        ..model.clone()
    };
    let with = |settings: Settings| Settings {
        seq: 200,
        head_chunk: 150,
        accum,
        packing: Packing::Pad,
        ..settings
    };
    let resident = config(longer, DType::F32, mode);
    let mut of_ranks = resident.clone();
    of_ranks.collectives.zero = Some(Zero::Weights);
    of_ranks.join(Rank { number: 1, of: 3 }).unwrap();
    let resident = with(Settings::new(&resident).unwrap());
    let pinned = Settings {
        homes: all_pinned(),
        ..resident.clone()
    };
    let offloaded = offloading(&resident, "block_input,core_attn");
    let of_ranks = with(Settings::new(&of_ranks).unwrap());
    let all = [Some(resident), Some(pinned), offloaded, Some(of_ranks)];
    all.into_iter().flatten().collect()
}

/// The plan of a step whose micro-batches have any lengths is what such a step uses, whatever steps went before.
#[test]
fn steps_of_any_lengths_are_planned_to_the_byte() {
    let lengths: Vec<usize> = padded_lengths(200).collect();
    let mut random = Random(9);
    let (mut all, mut differing) = (0, 0);
    for (name, model) in variants(3) {
        for (mode, accum) in [
            ("none", 1),
            ("core_attn", 2),
            ("mlp", 4),
            ("full:uniform:2", 3),
        ] {
            for settings in padded(&model, mode, accum) {
                for target in [Target::Cpu, Target::Cuda] {
                    let planned = Plan::new(&settings, target).unwrap();
                    let mut peaks = StepPeaks::new(&settings, target, &planned);
                    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
                    let session = Session::on_shapes(settings.clone(), &memory, target, flops);
                    let mut session = session.unwrap();
                    let mut seen = BTreeSet::new();
                    for _ in 0..8 {
                        let mut below = |count: usize| random.below(count as u64) as usize;
                        // Short ones more often: the longest of a step is to differ from step to step.
                        let any = |_| lengths[below(lengths.len()).min(below(lengths.len()))];
                        let step: Vec<usize> = (0..accum).map(any).collect();
                        let batch = shape_of_micro_batches(&settings, &step);
                        let used = session.step(&batch).unwrap().memory.peak.bytes;
                        let name = format!("{name}, {mode}, {target:?}, {step:?}");
                        assert_eq!(peaks.of_step(&step).unwrap(), used, "{name}");
                        seen.insert(used);
                    }
                    all += 1;
                    differing += usize::from(seen.len() > 1);
                }
            }
        }
    }
    assert!(
        4 * differing > 3 * all,
        "lengths make a difference: {differing} of {all}"
    );
}
