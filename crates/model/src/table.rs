//! Which activations each stage of one model reads and writes: the table that everything else follows.

use crate::stage::{Activation, Stage};

/// How attention is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Probabilities are stored, `[b, a, s, s]`.
    #[default]
    Eager,
    /// Scores are never stored; the backward pass makes them again from the output and the log-sum-exp `[b, a, s]`.
    Flash,
}

impl Attention {
    /// The name in settings and files.
    pub fn name(self) -> &'static str {
        match self {
            Attention::Eager => "eager",
            Attention::Flash => "flash",
        }
    }
}

/// The stages' activations, as features of the model and the kind of attention decide them.
pub struct StageTable {
    reads: [Vec<Activation>; Stage::COUNT],
    writes: [Vec<Activation>; Stage::COUNT],
    backward_reads: [Vec<Activation>; Stage::COUNT],
    /// By activation; none where the model has no such activation.
    facts: [Option<Facts>; Activation::ALL.len()],
}

/// What follows from the table for one activation.
#[derive(Clone, Copy)]
struct Facts {
    producer: Stage,
    first_and_last_reader: Option<(Stage, Stage)>,
    released_after: Stage,
}

impl StageTable {
    /// The table of a model whose queries and keys are normalised or not (Qwen3).
    pub fn new(qk_norm: bool, attention: Attention) -> StageTable {
        let lists = |of: &dyn Fn(Stage) -> &'static [Activation]| {
            let present = |activation: &Activation| is_present(*activation, qk_norm, attention);
            Stage::ALL.map(|stage| of(stage).iter().copied().filter(present).collect())
        };
        let mut table = StageTable {
            reads: lists(&reads),
            writes: lists(&writes),
            backward_reads: lists(&|stage| backward_reads(stage, attention)),
            facts: [None; Activation::ALL.len()],
        };
        for activation in Activation::ALL {
            table.facts[activation as usize] = table.facts_of(activation);
        }
        table
    }

    fn facts_of(&self, activation: Activation) -> Option<Facts> {
        let is_in = |list: &[Activation]| list.contains(&activation);
        let producer = Stage::BLOCK
            .into_iter()
            .find(|stage| is_in(self.writes(*stage)))?;
        let mut readers = Stage::BLOCK
            .into_iter()
            .filter(|stage| is_in(self.reads(*stage)));
        let first = readers.next();
        let first_and_last_reader =
            first.map(|first| (first, readers.next_back().unwrap_or(first)));
        let reads_its_own = activation != Activation::X && is_in(self.backward_reads(producer));
        let released_after = match first {
            Some(first) if !reads_its_own => first,
            _ => producer,
        };
        Some(Facts {
            producer,
            first_and_last_reader,
            released_after,
        })
    }

    /// What the forward pass of a stage reads.
    pub fn reads(&self, stage: Stage) -> &[Activation] {
        &self.reads[stage as usize]
    }

    /// What a stage writes; [`Activation::X`] is the next block's.
    pub fn writes(&self, stage: Stage) -> &[Activation] {
        &self.writes[stage as usize]
    }

    /// What the backward pass of a stage reads.
    pub fn backward_reads(&self, stage: Stage) -> &[Activation] {
        &self.backward_reads[stage as usize]
    }

    /// The activations that there are, in forward order.
    pub fn activations(&self) -> impl Iterator<Item = Activation> + use<'_> {
        Activation::ALL
            .into_iter()
            .filter(|activation| self.has(*activation))
    }

    /// Whether the model has an activation at all.
    pub fn has(&self, activation: Activation) -> bool {
        self.facts[activation as usize].is_some()
    }

    /// The stage that makes an activation; of the block before for [`Activation::X`].
    pub fn producer(&self, activation: Activation) -> Stage {
        self.facts(activation).producer
    }

    /// The first and the last stage of a block that read an activation in the forward pass.
    pub fn first_and_last_reader(&self, activation: Activation) -> Option<(Stage, Stage)> {
        self.facts(activation).first_and_last_reader
    }

    /// What no stage after this one reads in the forward pass: what it is the last to read, and what it writes for the
    /// backward pass alone.
    pub fn last_used_by(&self, stage: Stage) -> impl Iterator<Item = Activation> + use<'_> {
        self.activations().filter(move |activation| {
            let readers = self.first_and_last_reader(*activation);
            let last = readers.map_or(self.producer(*activation), |(_, last)| last);
            last == stage
        })
    }

    /// The stage of a block after whose backward pass an activation is released: the first in forward order that reads
    /// it, or its own where that reads its outputs.
    pub fn released_after(&self, activation: Activation) -> Stage {
        self.facts(activation).released_after
    }

    fn facts(&self, activation: Activation) -> &Facts {
        self.facts[activation as usize]
            .as_ref()
            .unwrap_or_else(|| panic!("this model has no {}", activation.name()))
    }
}

fn is_present(activation: Activation, qk_norm: bool, attention: Attention) -> bool {
    match activation {
        Activation::QRaw | Activation::KRaw => qk_norm,
        Activation::Probs => attention == Attention::Eager,
        Activation::Lse => attention == Attention::Flash,
        _ => true,
    }
}

fn reads(stage: Stage) -> &'static [Activation] {
    use Activation::*;
    match stage {
        Stage::Embedding => &[],
        Stage::AttnNorm => &[X],
        Stage::Qkv => &[H1],
        Stage::CoreAttn => &[Q, K, V],
        Stage::AttnOut => &[O, X],
        Stage::MlpNorm => &[X2],
        Stage::MlpUp => &[H2],
        Stage::MlpAct => &[Gate, Up],
        Stage::MlpDown => &[Act, X2],
    }
}

fn writes(stage: Stage) -> &'static [Activation] {
    use Activation::*;
    match stage {
        Stage::Embedding | Stage::MlpDown => &[X],
        Stage::AttnNorm => &[H1, Rstd1],
        Stage::Qkv => &[QRaw, KRaw, Q, K, V],
        Stage::CoreAttn => &[Probs, O, Lse],
        Stage::AttnOut => &[X2],
        Stage::MlpNorm => &[H2, Rstd2],
        Stage::MlpUp => &[Gate, Up],
        Stage::MlpAct => &[Act],
    }
}

fn backward_reads(stage: Stage, attention: Attention) -> &'static [Activation] {
    use Activation::*;
    match stage {
        Stage::Embedding => &[],
        Stage::AttnNorm => &[X, Rstd1],
        Stage::Qkv => &[H1, QRaw, KRaw],
        Stage::CoreAttn if attention == Attention::Flash => &[Q, K, V, O, Lse],
        Stage::CoreAttn => &[Q, K, V, Probs],
        Stage::AttnOut => &[O],
        Stage::MlpNorm => &[X2, Rstd2],
        Stage::MlpUp => &[H2],
        Stage::MlpAct => &[Gate, Up],
        Stage::MlpDown => &[Act],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables() -> Vec<StageTable> {
        let of =
            |norm| [Attention::Eager, Attention::Flash].map(|kind| StageTable::new(norm, kind));
        [of(false), of(true)].into_iter().flatten().collect()
    }

    #[test]
    fn every_activation_is_written_once_and_used() {
        for table in tables() {
            for activation in table.activations() {
                let writes = |stage: &&Stage| table.writes(**stage).contains(&activation);
                let writers = Stage::BLOCK.iter().filter(writes).count();
                assert_eq!(writers, 1, "{activation:?}");
                let reads = |stage: &Stage| table.backward_reads(*stage).contains(&activation);
                assert!(
                    Stage::BLOCK.iter().any(reads),
                    "{activation:?} is saved for no backward pass"
                );
            }
        }
    }

    #[test]
    fn activations_follow_features() {
        let present = |table: &StageTable| -> Vec<&str> {
            let special = [
                Activation::QRaw,
                Activation::KRaw,
                Activation::Probs,
                Activation::Lse,
            ];
            let present = special
                .into_iter()
                .filter(|activation| table.has(*activation));
            present.map(Activation::name).collect()
        };
        let [eager, flash, eager_norm, flash_norm] = tables().try_into().ok().unwrap();
        assert_eq!(present(&eager), ["probs"]);
        assert_eq!(present(&flash), ["lse"]);
        assert_eq!(present(&eager_norm), ["q_raw", "k_raw", "probs"]);
        assert_eq!(present(&flash_norm), ["q_raw", "k_raw", "lse"]);
    }

    #[test]
    fn release_points_follow_from_the_table() {
        let [eager, flash, _, _] = tables().try_into().ok().unwrap();
        assert_eq!(eager.released_after(Activation::X), Stage::AttnNorm);
        assert_eq!(eager.released_after(Activation::Probs), Stage::CoreAttn);
        assert_eq!(eager.released_after(Activation::X2), Stage::MlpNorm);
        assert_eq!(eager.released_after(Activation::O), Stage::AttnOut);
        assert_eq!(flash.released_after(Activation::O), Stage::CoreAttn);
        assert_eq!(flash.released_after(Activation::Lse), Stage::CoreAttn);
        let readers = eager.first_and_last_reader(Activation::X);
        assert_eq!(readers, Some((Stage::AttnNorm, Stage::AttnOut)));
        assert_eq!(eager.first_and_last_reader(Activation::Rstd1), None);
        let last_used_by = |stage| eager.last_used_by(stage).collect::<Vec<_>>();
        assert_eq!(last_used_by(Stage::AttnNorm), [Activation::Rstd1]);
        assert_eq!(last_used_by(Stage::AttnOut), [Activation::X, Activation::O]);
    }
}
