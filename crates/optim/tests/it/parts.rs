//! States that are divided among ranks. Whichever ranks saved them, in any pieces, they equal the states of one
//! process.

use crate::common::{Formats, Saved, Training, homes, layout_for, trained};
use files::Parts;
use kernels::Kernels;
use kernels::cpu::Cpu;
use memory::{Cover, DType, Home, Homes, Layout, Memory};
use optim::{
    Hyperparameters, MasterFormat, MomentFormat, Optimizer, OptimizerKind, Recipe, SavedState,
};
use std::collections::BTreeMap;
use std::rc::Rc;
use units::{Ranks, Reduce, Weights, Zero};

/// Pieces of states by name: first element, number of elements of the whole, type, and bytes.
type Pieces = BTreeMap<String, Vec<(usize, usize, DType, Vec<u8>)>>;

/// An optimizer, and formats of its states.
type Case = (OptimizerKind, Formats);

fn by(kind: OptimizerKind) -> Hyperparameters {
    Hyperparameters {
        kind,
        ..Hyperparameters::default()
    }
}

/// A rank with all weights, and the states of its own pieces.
struct Rank {
    kernels: Kernels<Cpu>,
    layout: Rc<Layout>,
    own: Cover,
    weights: Weights,
    optimizer: Optimizer,
}

impl Rank {
    fn new((kind, (dtype, moments, master)): Case, states: &Home, rank: memory::Rank) -> Rank {
        let memory = Memory::host();
        let layout = layout_for(Some(rank.of));
        let own = layout.own(rank);
        let ranks = Ranks {
            rank,
            stage: memory::Rank::ALONE,
            sharing: 1,
            parts_each: 1,
            zero: Zero::States,
            bucket_bytes: 1 << 20,
            reduce: Reduce::MicroBatch,
            overlap_grad_reduce: true,
            overlap_param_gather: true,
            reshard_after_forward: true,
            shard_group: None,
        };
        let optimizer = Optimizer::lease(
            &memory,
            &layout,
            &Recipe {
                hyperparameters: by(kind),
                matrices: Vec::new(),
                formats: (moments, master),
                weights: dtype,
                gradients: DType::F32,
            },
            &homes(states.clone()),
            Some(&ranks),
        );
        let weights = Weights::lease(&memory, &layout, dtype, &Homes::default(), None);
        Rank {
            kernels: Cpu::new(&memory, DType::F32).unwrap(),
            weights: weights.unwrap(),
            optimizer: optimizer.unwrap(),
            layout,
            own,
        }
    }

    fn restore(&mut self, from: &Training, saved: &Pieces) {
        let find = |name: &str| {
            let pieces = saved.get(name)?;
            Some(SavedState {
                dtype: pieces[0].2,
                // Cut once more, wherever that is.
                bytes: Parts::new(pieces.iter().flat_map(|piece| piece.3.chunks(1001))),
            })
        };
        let values: Vec<f32> = from.weights().into_iter().map(f32::from_bits).collect();
        let (kernels, weights) = (&self.kernels, &mut self.weights);
        for (index, entry) in self.layout.entries().iter().enumerate() {
            let values = &values[from.layout.entries()[index].range()];
            let set = self
                .optimizer
                .set_weights(kernels, weights, entry.offset, values);
            set.unwrap();
            let restored = self.optimizer.restore(kernels, weights, index, &find);
            restored.unwrap();
        }
    }

    /// Adds the rank's own pieces.
    fn save(&self, pieces: &mut Pieces) {
        for (index, entry) in self.layout.entries().iter().enumerate() {
            for range in self.own.within(&entry.range()).ranges() {
                for state in self.optimizer.named_states(index, range) {
                    let mut bytes = vec![0; state.bytes()];
                    state.read(&self.kernels, &mut bytes).unwrap();
                    let piece = (state.elements.start, state.whole, state.dtype, bytes);
                    pieces.entry(state.name).or_default().push(piece);
                }
            }
        }
    }

    fn weights(&self) -> Vec<Vec<u8>> {
        let size = self.weights.dtype().size_in_bytes();
        let read = |range: std::ops::Range<usize>| {
            let mut bytes = vec![0; range.len() * size];
            let kernels: &Kernels = &self.kernels;
            self.weights.read(kernels, range, &mut bytes).unwrap();
            bytes
        };
        let entries = self.layout.entries().iter();
        entries.map(|entry| read(entry.range())).collect()
    }
}

/// Whole states, as the only piece of each.
fn in_one_piece(saved: Saved) -> Pieces {
    let whole = |(dtype, bytes): (DType, Vec<u8>)| {
        vec![(0, bytes.len() / dtype.size_in_bytes(), dtype, bytes)]
    };
    saved
        .into_iter()
        .map(|(name, state)| (name, whole(state)))
        .collect()
}

/// Joins pieces that leave no gap.
fn whole(pieces: &Pieces) -> Saved {
    let join = |pieces: &Vec<(usize, usize, DType, Vec<u8>)>| {
        let (_, elements, dtype, _) = pieces[0];
        let (mut joined, mut end) = (Vec::new(), 0);
        for (first, of, own, bytes) in pieces {
            assert_eq!((*first, *of, *own), (end, elements, dtype));
            end += bytes.len() / dtype.size_in_bytes();
            joined.extend_from_slice(bytes);
        }
        assert_eq!(end, elements);
        (dtype, joined)
    };
    pieces
        .iter()
        .map(|(name, pieces)| (name.clone(), join(pieces)))
        .collect()
}

/// The states that ranks keep after they were restored; and that all have these weights.
fn through(
    case: Case,
    states: &Home,
    ranks: usize,
    from: &Training,
    saved: &Pieces,
) -> (Pieces, Vec<Vec<u8>>) {
    let (mut pieces, mut weights) = (Pieces::new(), None);
    for rank in memory::Rank::all(ranks) {
        let name = format!("{rank:?}");
        let mut rank = Rank::new(case, states, rank);
        rank.restore(from, saved);
        rank.save(&mut pieces);
        let own = rank.weights();
        assert!(*weights.get_or_insert(own.clone()) == own, "{name}");
    }
    pieces
        .values_mut()
        .for_each(|pieces| pieces.sort_by_key(|piece| piece.0));
    (pieces, weights.unwrap())
}

const FORMATS: [Formats; 5] = [
    (DType::F32, MomentFormat::F32, MasterFormat::None),
    (
        DType::BF16,
        MomentFormat::Quantised,
        MasterFormat::Remainder,
    ),
    (DType::BF16, MomentFormat::Bf16, MasterFormat::F32),
    (DType::F32, MomentFormat::Quantised, MasterFormat::None),
    (DType::BF16, MomentFormat::F32, MasterFormat::RemainderByte),
];

#[test]
fn from_any_number_of_ranks_to_any_other() {
    let of_adamw = FORMATS.map(|formats| (OptimizerKind::AdamW, formats));
    let of_adafactor = (OptimizerKind::Adafactor, FORMATS[0]);
    for case in of_adamw.into_iter().chain([of_adafactor]) {
        for states in [&Home::Device, &Home::Pinned] {
            let mut first = Training::by(by(case.0), case.1, &Homes::default());
            first.steps(1..=3);
            let saved = first.save();
            let name = format!("{case:?} {states:?}");
            let (by_three, weights) =
                through(case, states, 3, &first, &in_one_piece(saved.clone()));
            assert!(
                by_three.values().any(|pieces| pieces.len() > 1),
                "{name}: nothing is cut"
            );
            assert!(whole(&by_three) == saved, "{name}: three ranks");
            let (by_two, same) = through(case, states, 2, &first, &by_three);
            assert!(
                whole(&by_two) == saved && same == weights,
                "{name}: two ranks"
            );
        }
    }
}

/// All ranks have the weights that follow from a master, of which each keeps a part.
#[test]
fn converted_by_ranks_as_by_one_process() {
    for from in FORMATS {
        for to in FORMATS {
            let first = trained(from);
            let saved = first.save();
            let mut alone = Training::new(to);
            alone.restore(&first, &saved).unwrap();
            let (by_ranks, weights) = through(
                (OptimizerKind::AdamW, to),
                &Home::Device,
                3,
                &first,
                &in_one_piece(saved),
            );
            assert!(whole(&by_ranks) == alone.save(), "{from:?} to {to:?}");
            let size = alone.weights.dtype().size_in_bytes();
            for (index, entry) in alone.layout.entries().iter().enumerate() {
                let mut expected = vec![0; entry.elements() * size];
                let read = alone
                    .weights
                    .read(&*alone.kernels, entry.range(), &mut expected);
                read.unwrap();
                assert!(
                    weights[index] == expected,
                    "{from:?} to {to:?}: {}",
                    entry.name
                );
            }
        }
    }
}
