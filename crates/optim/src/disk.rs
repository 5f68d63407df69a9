//! States in a file. During an update, chunks pass through buffers of pinned host memory, which are used in turn. Reads
//! run ahead of the uploads, and writes follow the downloads. Three waits order them, besides those of
//! [`crate::streamed`]:
//!
//! | who waits | for what | otherwise |
//! |---|---|---|
//! | the read | the buffer's last write ([`WRITTEN`]) | it reads over what has not been written, or what is about to be |
//! | the upload | the read ([`READ`]) | it sends what was in the buffer before |
//! | the write | the download ([`BACK`]) | it writes states as they were |
//!
//! No other wait is needed. The download into a buffer waits for the update, and so for the upload from that buffer. A
//! chunk has the same buffer in every update, so it is written before it is read again.
//!
//! Between updates the host reads and changes states through one more buffer.

use crate::chunks::{Away, BLOCK_BYTES, Chunks};
use crate::store::Store;
use kernels::{BlockFile, DiskCopy, Event, HostSide, Kernels, NoFile, Queue, Result};
use memory::{Buffer, Category, DType, Memory, Out, OutOfMemory};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

const WRITTEN: &str = "states are in the file before others come into their buffer";
const READ: &str = "states have been read before they go to the device";
const BACK: &str = "states are back on the host before they are written";

/// Chunks that are read before they have slots on the device. As many may wait to be written.
const AHEAD: usize = 2;

/// A file of chunks, and its buffers.
pub(crate) struct DiskStore {
    file: Arc<dyn BlockFile>,
    bytes: u64,
    /// Pinned host memory, `chunk_bytes` for each buffer.
    staging: Buffer,
    chunk_bytes: usize,
    /// The events of each buffer's last read and last write. Chunks have the buffers in turn.
    events: Vec<Events>,
    between: RefCell<Between>,
}

#[derive(Clone)]
struct Events {
    read: Event,
    written: Event,
}

/// A part of the file that the host reads and changes between updates.
struct Between {
    buffer: Buffer,
    place: Range<usize>,
    is_changed: bool,
}

impl DiskStore {
    pub(crate) fn lease(
        memory: &Memory,
        chunks: &Chunks,
        slots: usize,
    ) -> Result<DiskStore, OutOfMemory> {
        let away = chunks.all.iter().filter_map(|chunk| chunk.away.as_ref());
        let chunk_bytes = away.map(|away| away.place.len()).max().unwrap_or(0);
        let buffers = (slots + 2 * AHEAD).min(chunks.away);
        let lease = |chunks: usize| {
            let (category, dims) = (Category::OptimizerState, [chunks * chunk_bytes]);
            memory.lease_pinned(category, "disk_staging", dims, DType::U8)
        };
        let past = Events {
            read: Event::PAST,
            written: Event::PAST,
        };
        Ok(DiskStore {
            file: Arc::new(NoFile),
            bytes: chunks.away_bytes as u64,
            staging: lease(buffers)?,
            chunk_bytes,
            events: vec![past; buffers],
            between: RefCell::new(Between {
                buffer: lease(1)?,
                place: 0..0,
                is_changed: false,
            }),
        })
    }

    fn buffer_of(&self, away: &Away) -> usize {
        away.ordinal % self.events.len()
    }
}

impl Store for DiskStore {
    fn use_file(&mut self, file: Arc<dyn BlockFile>) {
        self.file = file;
    }

    fn disk_bytes(&self) -> Option<u64> {
        Some(self.bytes)
    }

    fn arena(&self) -> (&'static str, u64) {
        let bytes = self.staging.bytes() + self.between.borrow().buffer.bytes();
        ("disk_staging", bytes)
    }

    fn ahead(&self) -> usize {
        AHEAD
    }

    fn fetch(&mut self, kernels: &Kernels, away: &Away) -> Result {
        let buffer = self.buffer_of(away);
        kernels.wait(Queue::DiskRead, self.events[buffer].written, WRITTEN)?;
        let (file, offset) = (self.file.clone(), away.place.start as u64);
        // SAFETY: the buffer lives as long as kernels have work (`Optimizer::lease`). Its last write is over before
        // this read. The upload that reads the buffer waits for `read`.
        unsafe { kernels.start_disk_read(self.on_host(away), &file, offset) }?;
        self.events[buffer].read = kernels.record(Queue::DiskRead)?;
        Ok(())
    }

    fn fetched(&self, kernels: &Kernels, away: &Away) -> Result {
        kernels.wait(Queue::Upload, self.events[self.buffer_of(away)].read, READ)
    }

    fn on_host(&mut self, away: &Away) -> Out<'_> {
        let start = self.buffer_of(away) * self.chunk_bytes;
        self.staging
            .view_mut()
            .rows(start..start + away.place.len())
    }

    fn put_back(&mut self, kernels: &Kernels, away: &Away) -> Result {
        let downloaded = kernels.record(Queue::Download)?;
        kernels.wait(Queue::DiskWrite, downloaded, BACK)?;
        let (file, offset) = (self.file.clone(), away.place.start as u64);
        let bytes = self.on_host(away);
        // SAFETY: as in `fetch`. The next read into this buffer waits for `written`.
        unsafe { kernels.start_disk_write(&file, offset, bytes.as_in()) }?;
        let buffer = self.buffer_of(away);
        self.events[buffer].written = kernels.record(Queue::DiskWrite)?;
        Ok(())
    }

    fn last_queue(&self) -> Queue {
        Queue::DiskWrite
    }

    /// Writes what the host changed, and discards the copy, since updates change the file.
    fn end_host_access(&mut self) -> Result {
        let between = self.between.get_mut();
        between.write(&self.file)?;
        between.place = 0..0;
        Ok(())
    }

    fn read(&self, range: &Range<usize>, bytes: &mut [u8]) -> Result {
        let mut between = self.between.borrow_mut();
        let first = range.start / BLOCK_BYTES * BLOCK_BYTES;
        between.load(&self.file, first..range.end.next_multiple_of(BLOCK_BYTES))?;
        let start = range.start - between.place.start;
        let own = between.buffer.view().rows(start..start + range.len());
        bytes.copy_from_slice(own.slice());
        Ok(())
    }

    /// The place has whole blocks of the file.
    fn change(&mut self, Away { place, .. }: &Away) -> Result<Out<'_>> {
        let between = self.between.get_mut();
        between.load(&self.file, place.clone())?;
        between.is_changed = true;
        let start = place.start - between.place.start;
        Ok(between.buffer.view_mut().rows(start..start + place.len()))
    }
}

impl Between {
    /// Reads a part of the file, unless the buffer holds it.
    fn load(&mut self, file: &Arc<dyn BlockFile>, place: Range<usize>) -> Result {
        if self.place.start <= place.start && place.end <= self.place.end {
            return Ok(());
        }
        self.write(file)?;
        // If the read fails, the buffer holds no part.
        self.place = 0..0;
        let buffer = self.buffer.view_mut().rows(0..place.len());
        copy(file, place.start, HostSide::Read(buffer))?;
        self.place = place;
        Ok(())
    }

    fn write(&mut self, file: &Arc<dyn BlockFile>) -> Result {
        if self.is_changed {
            let buffer = self.buffer.view().rows(0..self.place.len());
            copy(file, self.place.start, HostSide::Write(buffer))?;
            self.is_changed = false;
        }
        Ok(())
    }
}

/// Copies between a file and the buffer for the time between updates, which nothing else uses.
fn copy(file: &Arc<dyn BlockFile>, offset: usize, host: HostSide) -> Result {
    let copy = DiskCopy {
        file: file.clone(),
        offset: offset as u64,
        host,
    };
    // SAFETY: the buffer is host memory.
    unsafe { copy.carry_out() }
}
