//! Finds the largest micro-batch, sequence or rank of adapters that fits: `plan --largest`.

use crate::change::{Change, flags, set};
use crate::figures::figures;
use crate::levers::{SHORTEST, Setup};
use crate::room::{Needs, Room};
use kernels::Target;
use memory::format_bytes;
use serde::Serialize;
use session::{Result, SessionError};
use settings::Config;
use std::fmt::{Display, Formatter};

choices::choices! {
    /// The key whose largest value is sought.
    Sought {
        /// Sequences in a micro-batch.
        MicroBatch = "micro-batch",
        /// Tokens in a sequence.
        Seq = "seq",
        /// The rank of adapters.
        Rank = "rank",
    }
}

/// The largest value that fits. The next one does not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Largest {
    /// The key.
    pub what: Sought,
    /// The value; null if not even the smallest fits.
    pub value: Option<usize>,
    /// The settings to add for it, each as `--set` takes it; those of the smallest if nothing fits.
    pub set: Vec<String>,
    /// For sequences: the longest that the model was made for, where its folder says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_length: Option<usize>,
    /// The peak with it; if nothing fits, the peak with the smallest.
    pub peak_bytes: u64,
    /// Slab and everything that lives across steps, with it.
    pub reserved_bytes: u64,
    /// The next larger value.
    pub next: usize,
    /// The bytes that the next value needs. Null if it makes no valid run, because it is beyond the model's positions or
    /// the sides of a matrix, or has more than 2^24 tokens in a micro-batch.
    pub next_needs_bytes: Option<u64>,
}

/// The most tokens in a micro-batch that is planned: even a plan on shapes takes memory that grows with them.
const TOKENS_MAX: usize = 1 << 24;

impl Sought {
    /// The value with this name.
    pub fn named(name: &str) -> Option<Sought> {
        let mut all = [Sought::MicroBatch, Sought::Seq, Sought::Rank].into_iter();
        all.find(|sought| sought.name() == name)
    }

    /// The setting of this value.
    fn change(self, value: usize) -> Change {
        match self {
            Sought::MicroBatch => set!(batch.micro = value),
            Sought::Seq => set!(data.seq = value),
            Sought::Rank => set!(lora.rank = Some(value), value),
        }
    }

    /// The candidate at a position, from 1 on. Sequences above 128 tokens are multiples of 128, and pairs are whole. Parts of
    /// sequences have so many tokens each.
    fn value(self, position: usize, config: &Config) -> usize {
        let parts = config.parts();
        match self {
            Sought::Seq if position > SHORTEST => parts * SHORTEST * (position - SHORTEST + 1),
            Sought::Seq => parts * position,
            Sought::MicroBatch if config.has_pairs() => 2 * position,
            _ => position,
        }
    }
}

/// What a run needs, the largest stage of a pipeline included; none if it has too many tokens in a micro-batch.
fn needs(run: &Setup) -> Result<Option<Needs>> {
    let settings = &run.settings;
    if settings.micro_batch * settings.own_seq() > TOKENS_MAX {
        return Ok(None);
    }
    let mut most = Needs::default();
    for stage in 0..settings.stage().of {
        most = most.most(figures(&settings.in_stage(stage), run.target)?.needs());
    }
    Ok(Some(most))
}

impl Largest {
    /// Doubles the position until it no longer fits, then bisects.
    ///
    /// # Errors
    /// As [`crate::Plan::new`], or if the configuration makes no valid run even with the smallest.
    pub fn new(config: &Config, target: Target, what: Sought, room: Room) -> Result<Largest> {
        let run = Setup::new(config.clone(), target)?;
        let change = |position| what.change(what.value(position, config));
        // None if the candidate at a position makes no valid run.
        let planned = |position| {
            let candidate = run.with(&change(position));
            match candidate.map(|candidate| needs(&candidate)) {
                None | Some(Err(SessionError::Config(_))) => Ok(None),
                Some(needs) => needs,
            }
        };
        let fits = |needs: Option<Needs>| needs.is_some_and(|needs| needs.fit(room));
        // Position 0 stands for no run, which always fits.
        let (mut fitting, mut found) = (0, None);
        let (mut too_large, mut next) = (1, planned(1)?);
        while fits(next) {
            (fitting, found) = (too_large, next);
            too_large *= 2;
            next = planned(too_large)?;
        }
        while too_large - fitting > 1 {
            let middle = fitting + (too_large - fitting) / 2;
            let needs = planned(middle)?;
            match fits(needs) {
                true => (fitting, found) = (middle, needs),
                false => (too_large, next) = (middle, needs),
            }
        }
        let planned = match found.or(next) {
            Some(needs) => needs,
            // Not even the smallest makes a valid run: the configuration's own error says why.
            None => figures(&run.try_with(&change(1))?.settings, target)?.needs(),
        };
        let value = found.map(|_| what.value(fitting, config));
        Ok(Largest {
            what,
            value,
            set: change(fitting.max(1)).set(),
            context_length: None,
            peak_bytes: planned.peak_bytes,
            reserved_bytes: planned.reserved_bytes,
            next: what.value(too_large, config),
            next_needs_bytes: next.map(|needs| needs.of(room)),
        })
    }
}

impl Display for Largest {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let (what, next) = (self.what, self.next);
        let [peak, reserved] = [self.peak_bytes, self.reserved_bytes].map(format_bytes);
        match self.value {
            Some(value) => writeln!(f, "the largest {what} that fits is {value}")?,
            None => writeln!(f, "no {what} fits; {next} takes")?,
        }
        if let Some(context) = self.context_length {
            writeln!(f, "  the model was made for sequences of up to {context}")?;
        }
        writeln!(
            f,
            "  peak {peak} ({} bytes), reserved {reserved} ({} bytes)",
            self.peak_bytes, self.reserved_bytes
        )?;
        if self.set.len() > 1 {
            writeln!(f, "  with {}", flags(&self.set))?;
        }
        match (self.value, self.next_needs_bytes) {
            (None, _) => writeln!(
                f,
                "  `trainer plan --device-memory` without --largest says what would make it fit"
            ),
            (_, Some(bytes)) => {
                writeln!(f, "  the next, {next}, would need {}", format_bytes(bytes))
            }
            (_, None) => writeln!(
                f,
                "  the next, {next}, is no run: there is a bound beside memory"
            ),
        }
    }
}
