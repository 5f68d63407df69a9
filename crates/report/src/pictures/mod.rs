//! Draws a run's memory from its history: for PyTorch's memory viewer, for Perfetto, and as an SVG; and memory snapshots.

pub mod comparison;
pub(crate) mod course;
mod slices;
mod snapshot;
mod timeline;
mod trace_events;

use kernels::timeline::Span;
use memory::{History, Place, Playback, Refusal};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// What pictures are drawn from.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The device, in words.
    pub device: String,
    /// The history of its memory.
    pub history: History,
    /// What its queues worked on, by the history's clock; empty if that was not recorded.
    pub spans: Vec<Span>,
    /// The refused lease that ended the run, if any.
    pub refused: Option<RefusedLease>,
}

/// A lease that was refused.
#[derive(Clone, Debug)]
pub struct RefusedLease {
    /// Its name.
    pub name: &'static str,
    /// Its size.
    pub bytes: u64,
    /// The place that asked for it.
    pub place: Place,
    /// Device bytes leased then. They identify the moment, because leases end while the error is returned.
    pub live_bytes: u64,
    /// Bytes that were free on the device; 0 if that is not known.
    pub free_bytes: u64,
}

impl From<&Refusal> for RefusedLease {
    fn from(refusal: &Refusal) -> RefusedLease {
        let live_bytes = refusal.live_by_category.total();
        let room = refusal.room().unwrap_or(0);
        RefusedLease {
            name: refusal.name,
            bytes: refusal.requested_bytes,
            place: refusal.place,
            live_bytes,
            free_bytes: room.saturating_sub(live_bytes),
        }
    }
}

impl Trace {
    /// Writes `snapshot.pickle` (for PyTorch's memory viewer), `trace.json` (for Perfetto) and `timeline.svg` into a
    /// folder, and makes the folder if it does not exist.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let playback = Playback::new(&self.history);
        let mut snapshot = BufWriter::new(File::create(folder.join("snapshot.pickle"))?);
        snapshot::write(&mut snapshot, self, &playback)?;
        snapshot.flush()?;
        let mut events = BufWriter::new(File::create(folder.join("trace.json"))?);
        trace_events::write(&mut events, self, &playback)?;
        events.flush()?;
        let svg = timeline::draw(self, &playback);
        std::fs::write(folder.join("timeline.svg"), svg)
    }
}
