//! Finds the largest micro-batch, sequence or rank of adapters that fits: `plan --largest`.

use crate::change::{Change, flags, set};
use crate::figures::figures;
use crate::gpus;
use crate::levers::SHORTEST;
use kernels::Target;
use memory::format_bytes;
use serde::Serialize;
use session::SessionError;
use settings::{Config, ConfigError, Settings};
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

/// The memory that a run has to fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// A device: reserved bytes and the overhead count.
    Device(u64),
    /// A limit on leases: the peak counts.
    Limit(u64),
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

    /// A configuration with this value.
    fn put(self, value: usize, config: &Config) -> Result<Config, ConfigError> {
        self.change(value).applied_to(config)
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

/// Plans candidates.
struct Search<'a> {
    config: &'a Config,
    target: Target,
    what: Sought,
    room: Room,
    overhead_bytes: u64,
}

/// Peak and reserved bytes.
type Bytes = (u64, u64);

impl Search<'_> {
    /// What a run needs with the candidate at a position; none if it makes no valid run.
    fn planned(&self, position: usize) -> Result<Option<Bytes>, SessionError> {
        let config = self
            .what
            .put(self.what.value(position, self.config), self.config);
        let settings = config.and_then(|config| Settings::new(&config));
        let tokens = |settings: &Settings| settings.micro_batch * settings.own_seq();
        let is_planned = |settings: &Settings| tokens(settings) <= TOKENS_MAX;
        let Some(settings) = settings.ok().filter(is_planned) else {
            return Ok(None);
        };
        let mut most = (0, 0);
        // Every stage of a pipeline has to fit.
        for stage in 0..settings.stage().of {
            let planned = match figures(&settings.in_stage(stage), self.target) {
                Ok(planned) => planned,
                Err(SessionError::Config(_)) => return Ok(None),
                Err(defect) => return Err(defect),
            };
            most.0 = planned.most_bytes().max(most.0);
            most.1 = planned.reserved_bytes.max(most.1);
        }
        Ok(Some(most))
    }

    /// The bytes that have to fit the room.
    fn needed(&self, (peak, reserved): Bytes) -> u64 {
        match self.room {
            Room::Device(_) => reserved + self.overhead_bytes,
            Room::Limit(_) => peak,
        }
    }

    fn fits(&self, planned: Option<Bytes>) -> bool {
        let (Room::Device(room) | Room::Limit(room)) = self.room;
        planned.is_some_and(|bytes| self.needed(bytes) <= room)
    }
}

impl Largest {
    /// Doubles the position until it no longer fits, then bisects.
    ///
    /// # Errors
    /// As [`crate::Plan::new`], or if the configuration makes no valid run even with the smallest.
    pub fn new(
        config: &Config,
        target: Target,
        what: Sought,
        room: Room,
    ) -> Result<Largest, SessionError> {
        let search = Search {
            config,
            target,
            what,
            room,
            overhead_bytes: gpus::overhead_bytes(target, &Settings::new(config)?),
        };
        // Position 0 stands for no run, which always fits.
        let (mut fitting, mut found) = (0, None);
        let (mut too_large, mut next) = (1, search.planned(1)?);
        while search.fits(next) {
            (fitting, found) = (too_large, next);
            too_large *= 2;
            next = search.planned(too_large)?;
        }
        while too_large - fitting > 1 {
            let middle = fitting + (too_large - fitting) / 2;
            let planned = search.planned(middle)?;
            match search.fits(planned) {
                true => (fitting, found) = (middle, planned),
                false => (too_large, next) = (middle, planned),
            }
        }
        let (peak_bytes, reserved_bytes) = match found.or(next) {
            Some(bytes) => bytes,
            // Not even the smallest makes a valid run: the configuration's own error says why.
            None => {
                let smallest = what.put(what.value(1, config), config)?;
                let planned = figures(&Settings::new(&smallest)?, target)?;
                (planned.most_bytes(), planned.reserved_bytes)
            }
        };
        let value = found.map(|_| what.value(fitting, config));
        Ok(Largest {
            what,
            value,
            set: what.change(value.unwrap_or(what.value(1, config))).set(),
            context_length: None,
            peak_bytes,
            reserved_bytes,
            next: what.value(too_large, config),
            next_needs_bytes: next.map(|bytes| search.needed(bytes)),
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
