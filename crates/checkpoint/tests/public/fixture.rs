//! A small run to save.

use checkpoint::{Checkpoint, CheckpointError, Contents, OptimizerForm, TrainerState, save};
use files::{Dtype, FileSystem, PieceSource, PieceSpec, TensorSource, TensorSpec};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Three tensors whose bytes follow from a seed.
pub struct Tensors {
    specs: Vec<TensorSpec>,
    seed: u8,
}

impl Tensors {
    fn new(prefix: &str, seed: u8, elements: usize) -> Self {
        let specs = ["a", "b", "c"].map(|name| TensorSpec {
            name: format!("{prefix}.{name}"),
            dtype: Dtype::F32,
            shape: vec![elements, 2],
        });
        Self {
            specs: specs.into(),
            seed,
        }
    }

    fn bytes(&self, index: usize) -> Vec<u8> {
        let bytes = 0..self.specs[index].bytes();
        bytes
            .map(|byte| (byte as u8).wrapping_mul(3) ^ self.seed ^ (index as u8) << 6)
            .collect()
    }

    fn assert_same(&self, found: &files::Tensors) {
        assert_eq!(found.names().len(), self.specs.len());
        for (index, spec) in self.specs.iter().enumerate() {
            let tensor = found.get(&spec.name).unwrap();
            let bytes = tensor.bytes.get(0..spec.bytes() as usize).unwrap();
            assert_eq!(bytes, self.bytes(index), "{}", spec.name);
        }
    }
}

impl TensorSource for Tensors {
    fn tensors(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&self.bytes(index))
    }
}

/// What a rank has of tensors.
#[derive(Default)]
pub struct Pieces {
    specs: Vec<PieceSpec>,
    bytes: Vec<Vec<u8>>,
}

impl PieceSource for Pieces {
    fn pieces(&self) -> &[PieceSpec] {
        &self.specs
    }

    fn write_to(&self, index: usize, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&self.bytes[index])
    }
}

/// All that a checkpoint of a step holds; another seed is another content of the same step.
pub struct Moment {
    pub state: TrainerState,
    model: Tensors,
    optimizer: Tensors,
    pub files: Vec<(String, Vec<u8>)>,
}

impl Moment {
    pub fn new(step: u64, seed: u8) -> Self {
        Self::sized(step, seed, 3)
    }

    /// To be saved by so many ranks.
    pub fn of_ranks(step: u64, seed: u8, ranks: usize) -> Self {
        let mut moment = Self::sized(step, seed, 5);
        moment.state.ranks = Some(ranks as u64);
        moment.state.format_version = checkpoint::FORMAT_VERSION_OF_RANKS;
        moment
    }

    /// What a rank has of it: every tensor is cut elsewhere, and not all ranks have some of all.
    pub fn pieces(&self, rank: usize, size: usize) -> Pieces {
        let mut pieces = Pieces::default();
        for (stem, tensors) in [("model", &self.model), ("optimizer", &self.optimizer)] {
            for (index, spec) in tensors.specs.iter().enumerate() {
                let all: usize = spec.shape.iter().product();
                let cut = |rank: usize| match rank {
                    0 => 0,
                    _ if rank == size => all,
                    _ => (rank * all / size + index).min(all),
                };
                let elements = cut(rank)..cut(rank + 1);
                if elements.is_empty() || index == 2 && rank == 1 {
                    continue;
                }
                // What the second rank has not of the last tensor, the first one has.
                let elements = match (index, rank) {
                    (2, 0) => 0..cut(2.min(size)),
                    _ => elements,
                };
                let bytes = &tensors.bytes(index)[elements.start * 4..elements.end * 4];
                pieces.bytes.push(bytes.to_vec());
                pieces.specs.push(PieceSpec {
                    stem: stem.into(),
                    name: spec.name.clone(),
                    dtype: spec.dtype,
                    shape: spec.shape.clone(),
                    elements,
                });
            }
        }
        pieces
    }

    /// With so many elements a tensor.
    pub fn sized(step: u64, seed: u8, elements: usize) -> Self {
        let state = TrainerState {
            format_version: checkpoint::FORMAT_VERSION,
            trainer_version: "0.1.0".into(),
            name: "tiny".into(),
            step,
            updates: step,
            skipped_in_a_row: 0,
            skipped: 0,
            position: data::Position {
                epoch: 1,
                index: u64::from(seed),
            },
            data: "a fingerprint".into(),
            tokens: 64 * step,
            targets: 63 * step,
            pending: false,
            best: Some(checkpoint::Best {
                step,
                loss: 0.1 + f32::from(seed),
                data: "files 1".into(),
            }),
            optimizer: OptimizerForm {
                weights: "f32".into(),
                state_dtype: "f32".into(),
                master: "none".into(),
            },
            algorithms: Some("heuristic".into()),
            attention_kernels: Some("sm80".into()),
            experts_kernels: Some("sm80".into()),
            reads_bytes: false,
            origin_dtype: None,
            left_out: None,
            ranks: None,
        };
        Self {
            state,
            model: Tensors::new("model", seed, elements),
            optimizer: Tensors::new("optimizer", seed.wrapping_add(1), elements),
            files: vec![("config.json".into(), format!("{{\"seed\": {seed}}}").into())],
        }
    }

    /// Saves it, the model as one file and its states as three shards.
    pub fn save(&self, disk: &dyn FileSystem, run: &Path) -> Result<PathBuf, CheckpointError> {
        let contents = Contents {
            stem: "model",
            state: &self.state,
            model: &self.model,
            optimizer: &self.optimizer,
            files: &self.files,
            max_shard_bytes: self.optimizer.specs[0].bytes(),
        };
        save(disk, run, &contents)
    }

    /// Whether a checkpoint is of this moment; it must be wholly so, bit for bit.
    pub fn is_in(&self, found: &Checkpoint) -> bool {
        if found.state != self.state {
            return false;
        }
        self.model.assert_same(&found.model().unwrap());
        self.optimizer.assert_same(&found.optimizer().unwrap());
        let (name, bytes) = &self.files[0];
        assert_eq!(found.file(name).unwrap().as_ref(), Some(bytes));
        true
    }
}
