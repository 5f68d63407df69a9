//! Finds changes that make a run fit a device's memory: `plan --device-memory`.

use crate::change::{Change, other_training};
use crate::gpus;
use crate::levers::Setup;
use crate::room::Room;
use crate::search::{Rung, Search};
use kernels::Target;
use memory::format_bytes;
use report::Align::{Left, Right};
use report::Table;
use serde::Serialize;
use session::{Result, SessionError};
use settings::Config;
use std::fmt::{Display, Formatter};

/// The steps by which a run is made to fit a device's memory.
///
/// Each rung is a change that saves memory, on top of the rungs before. The list ends at the first configuration that
/// fits. Changes that turn out unnecessary are undone, most expensive first. Changes that add no time to a step on
/// paper come first: first those that keep the bits of the loss, then the others. Next come changes that take time, or
/// host memory over a link whose rate is assumed, the cheapest first. Gradients without clipping and shorter sequences
/// come last, at any cost, because they change what the model learns.
#[derive(Clone, Debug, Serialize)]
pub struct Advice {
    /// The memory of the device, without what another program keeps.
    pub device_memory_bytes: u64,
    /// What that program keeps.
    #[serde(skip)]
    pub beside_bytes: u64,
    /// Whether the last rung fits; without rungs, the run as it is.
    pub fits: bool,
    /// What the last configuration needs: its reserved bytes, and the overhead.
    pub needs_bytes: u64,
    /// The rungs, in order.
    pub rungs: Vec<Rung>,
    /// The command that trains the configuration that fits.
    pub command: Option<String>,
    /// Where the run does not fit as it is: other trainings that do, in which adapters alone learn.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub other_trainings: Vec<OtherTraining>,
    #[serde(skip)]
    target: Target,
}

/// A training of adapters that fits, instead of the one that was asked for.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct OtherTraining {
    /// The change in words.
    pub what: String,
    /// The settings to add, each as `--set` takes it.
    pub set: Vec<String>,
    /// Bytes that the changed run needs: reserved, and the overhead.
    pub needs_bytes: u64,
    /// Pinned host memory with it.
    pub host_pinned_bytes: u64,
    /// The command that trains so.
    pub command: Option<String>,
}

impl Advice {
    /// Tries changes until the run fits.
    ///
    /// # Errors
    /// As [`crate::Plan::new`].
    pub fn new(config: &Config, target: Target, device_memory_bytes: u64) -> Result<Advice> {
        let start = Setup::new(config.clone(), target)?;
        let room = Room::Device(device_memory_bytes);
        let climb = Search::new(room).climb(&start, |_| true)?;
        let fits = climb.run.needs.fit(room);
        let other_trainings = match fits && climb.rungs.is_empty() {
            true => Vec::new(),
            false => OtherTraining::all(&start, room)?,
        };
        Ok(Advice {
            device_memory_bytes,
            beside_bytes: 0,
            fits,
            needs_bytes: climb.run.needs.device_bytes,
            rungs: climb.rungs,
            command: None,
            other_trainings,
            target,
        })
    }

    /// The settings of all rungs, in order. Later ones replace earlier ones of the same key.
    pub fn set(&self) -> Vec<String> {
        self.rungs
            .iter()
            .flat_map(|rung| rung.set.clone())
            .collect()
    }

    #[rustfmt::skip]
    fn table(&self) -> Table {
        let on_host = self.rungs.iter().any(|rung| rung.host_pinned_bytes > 0);
        let host = |rung: &Rung| on_host.then(|| format_bytes(rung.host_pinned_bytes));
        let loss = |rung: &Rung| if rung.changes_math { "other bits" } else { "same bits" };
        // No negative zero.
        let percent = |rung: &Rung| (1e3 * rung.cost_fraction).round() / 10.0 + 0.0;
        let table = Table::of_items(&self.rungs, &[
            ("each on top of those above", Left, &|rung| rung.what.clone()),
            ("peak", Right, &|rung| format_bytes(rung.peak_bytes)),
            ("saves", Right, &|rung| format_bytes(rung.saves_bytes)),
            ("time on paper", Right, &|rung| format!("{:+.1} %", percent(rung))),
            ("on the host", Right, &|rung| host(rung).unwrap_or_default()),
            ("loss", Left, &|rung| loss(rung).into()),
        ]);
        table.without_empty_columns()
    }

    /// What to do if even the smallest configuration found does not fit.
    fn way_out(&self) -> String {
        if self.target == Target::Cpu {
            return "take a smaller model, or a machine with as much".into();
        }
        match gpus::holding(self.needs_bytes + self.beside_bytes).as_slice() {
            [] => {
                "take a smaller model, or a device with as much: no GPU that is known here has it"
                    .into()
            }
            names => format!("that fits {}", names.join(", ")),
        }
    }
}

impl OtherTraining {
    /// Those that fit, with as few further changes as they need.
    fn all(start: &Setup, room: Room) -> Result<Vec<OtherTraining>> {
        let mut fitting = Vec::new();
        for (words, change) in start.adapters() {
            let Some(setup) = start.with(&change) else {
                continue;
            };
            let climb = match Search::new(room).climb(&setup, Change::keeps_learning) {
                Ok(climb) => climb,
                // A matrix of this model may be too small for adapters.
                Err(SessionError::Config(_)) => continue,
                Err(defect) => return Err(defect),
            };
            if !climb.run.needs.fit(room) {
                continue;
            }
            let rungs = climb.rungs.iter().map(|rung| rung.what.clone());
            fitting.push(OtherTraining {
                what: std::iter::once(words)
                    .chain(rungs)
                    .collect::<Vec<_>>()
                    .join(", "),
                set: change.and(&climb.change).set(),
                needs_bytes: climb.run.needs.device_bytes,
                host_pinned_bytes: climb.run.needs.host_pinned_bytes,
                command: None,
            });
        }
        Ok(fitting)
    }
}

impl Display for OtherTraining {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let needed = format_bytes(self.needs_bytes);
        let host = match self.host_pinned_bytes {
            0 => String::new(),
            bytes => format!(", and {} of host memory", format_bytes(bytes)),
        };
        writeln!(
            f,
            "  {}: needs {needed}, overhead included{host}",
            self.what
        )?;
        match &self.command {
            Some(command) => writeln!(f, "  {command}"),
            None => Ok(()),
        }
    }
}

impl Display for Advice {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let (room, needed) = (self.device_memory_bytes, format_bytes(self.needs_bytes));
        writeln!(f, "\nto fit {} ({room} bytes)\n", format_bytes(room))?;
        if !self.rungs.is_empty() {
            writeln!(f, "{}", self.table())?;
        }
        match (self.fits, self.rungs.is_empty()) {
            (true, true) => writeln!(f, "it fits as it is: it needs {needed}, overhead included")?,
            (true, false) => writeln!(f, "it fits then: it needs {needed}, overhead included")?,
            (false, _) => writeln!(
                f,
                "nothing that is known here makes it fit: the least needs {needed}, overhead included; {}",
                self.way_out()
            )?,
        }
        if let Some(command) = &self.command {
            writeln!(f, "\n{command}")?;
        }
        if let Some(first) = self.other_trainings.first() {
            let too = if self.fits { "fits too" } else { "fits" };
            writeln!(f, "\n{}, {too}:", other_training(&first.set))?;
        }
        let mut others = self.other_trainings.iter();
        others.try_for_each(|other| write!(f, "{other}"))
    }
}
