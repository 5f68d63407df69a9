//! The last accesses of each byte, to find accesses that nothing orders.
//!
//! A warp has a clock, and knows of each warp of its block up to which time of that warp's clock its accesses come before its
//! own: a barrier brings what its warps know together. Blocks are never ordered.
//!
//! Within a warp, a shuffle or vote of all lanes orders what they have read before what they write afterwards, since a lane gives
//! what it made of the values. It does not make their writes visible: for that the clock goes on, but not what is known of it.

use crate::error::MistakeKind;
use std::collections::HashMap;
use std::ops::Range;

/// Bytes of a page: an access lies in one.
const PAGE_BYTES: usize = 1024;

/// Fields of a [`Cell`].
const CLOCK_BITS: u32 = 29;
const THREAD_BITS: u32 = 11;
/// Thread-field values for several threads: `OF_WARP + w` for warp w, `SEVERAL` for several warps, whose [`ReadSets`] has them.
const SEVERAL: u64 = (1 << THREAD_BITS) - 1;
const OF_WARP: u64 = 1024;
/// In the place of a block: several.
const BLOCKS: u64 = (1 << (64 - CLOCK_BITS - THREAD_BITS)) - 1;

/// Most blocks of a launch.
pub(crate) const BLOCKS_MAX: u64 = BLOCKS - 1;

/// The thread that accesses.
#[derive(Clone, Copy)]
pub(crate) struct Who<'a> {
    /// The number of the block in its grid.
    pub(crate) block: u64,
    /// The number of the thread in its block.
    pub(crate) thread: usize,
    /// The time of its warp's clock.
    pub(crate) time: u32,
    /// The time of that clock when the warp's lanes last gave each other what they had read.
    pub(crate) met: u32,
    /// For each warp of the block, the time of its clock before which its accesses precede this one.
    pub(crate) seen: &'a [u32],
}

impl Who<'_> {
    fn warp(&self) -> usize {
        self.thread / 32
    }

    /// The time before which accesses of a warp are ordered before this one; `own` is that of its own warp.
    fn limit(&self, warp: usize, own: u32) -> u32 {
        match warp == self.warp() {
            true => own,
            false => self.seen[warp],
        }
    }
}

/// An access: block + 1, thread and time; zero if there was none.
#[derive(Clone, Copy, PartialEq, Default)]
struct Cell(u64);

impl Cell {
    const BY_SEVERAL_BLOCKS: Cell = Cell(BLOCKS << (CLOCK_BITS + THREAD_BITS));

    fn new(block: u64, thread: u64, time: u32) -> Cell {
        Cell((block << THREAD_BITS | thread) << CLOCK_BITS | u64::from(time))
    }

    fn of(who: &Who) -> Cell {
        Cell::new(who.block + 1, who.thread as u64, who.time)
    }

    fn block(self) -> u64 {
        self.0 >> (CLOCK_BITS + THREAD_BITS)
    }

    fn thread(self) -> u64 {
        self.0 >> CLOCK_BITS & SEVERAL
    }

    fn time(self) -> u32 {
        (self.0 & ((1 << CLOCK_BITS) - 1)) as u32
    }

    /// The warp in the block, if the access is of one.
    fn warp(self) -> Option<usize> {
        match self.thread() {
            SEVERAL => None,
            thread if thread >= OF_WARP => Some((thread - OF_WARP) as usize),
            thread => Some(thread as usize / 32),
        }
    }

    /// Whether the access, of one thread or one warp, is ordered before `who`'s current one; `own` is the limit for its own warp.
    fn is_before_since(self, who: &Who, own: u32) -> bool {
        self.0 == 0
            || self.block() == who.block + 1
                && (self.thread() == who.thread as u64
                    || self
                        .warp()
                        .is_some_and(|warp| self.time() < who.limit(warp, own)))
    }

    /// For writes: visible to `who`.
    fn is_visible(self, who: &Who) -> bool {
        self.is_before_since(who, who.seen[who.warp()])
    }

    /// For reads: finished before `who` writes.
    fn is_over(self, who: &Who, sets: &ReadSets) -> bool {
        match self.thread() {
            SEVERAL if self.block() == who.block + 1 => {
                let mut times = sets.sets[self.time() as usize].iter().enumerate();
                times.all(|(warp, time)| *time <= who.limit(warp, who.met))
            }
            _ => self.is_before_since(who, who.met),
        }
    }

    /// A read by all lanes of a warp.
    fn of_warp(who: &Who) -> Cell {
        Cell::new(who.block + 1, OF_WARP + who.warp() as u64, who.time)
    }

    /// Combines this read with `other`, one by `who`.
    fn and(self, other: Cell, who: &Who, sets: &mut ReadSets) -> Cell {
        if self.is_over(who, sets) {
            other
        } else if self.block() != who.block + 1 {
            Cell::BY_SEVERAL_BLOCKS
        } else if self.warp() == Some(who.warp()) {
            Cell::of_warp(who)
        } else {
            sets.with(self, who)
        }
    }

    fn describe(self) -> String {
        match (self.block(), self.thread()) {
            (BLOCKS, _) => "several blocks".into(),
            (block, OF_WARP..) => format!("several threads of block number {}", block - 1),
            (block, thread) => format!("thread number {thread} of block number {}", block - 1),
        }
    }
}

/// Reads of several warps: for each, the time after its last one, or 0. A cell's time is the number of its set.
#[derive(Default)]
struct ReadSets {
    /// The launch that the rest is of.
    launch: u64,
    sets: Vec<Vec<u32>>,
    /// The set that a cell became by a read of a warp at a time: bytes that are read alike share their sets.
    made: HashMap<Joined, Cell>,
    /// The last of these: neighbours are mostly read one after the other.
    recent: Option<(Joined, Cell)>,
}

/// A cell, and the warp and its time by whose read it becomes a set.
type Joined = (u64, usize, u32);

impl ReadSets {
    fn begin(&mut self, launch: u64) {
        if self.launch != launch {
            self.launch = launch;
            self.sets.clear();
            self.made.clear();
            self.recent = None;
        }
    }

    /// The reads of a cell and one more.
    fn with(&mut self, cell: Cell, who: &Who) -> Cell {
        // Which thread of its warp it was does not matter here.
        let cell = match cell.warp() {
            None if self.sets[cell.time() as usize][who.warp()] == who.time + 1 => return cell,
            None => cell,
            Some(warp) => Cell::new(cell.block(), OF_WARP + warp as u64, cell.time()),
        };
        let key = (cell.0, who.warp(), who.time);
        if let Some((_, made)) = self.recent.filter(|(recent, _)| *recent == key) {
            return made;
        }
        let made = self.made.get(&key).copied();
        let made = made.unwrap_or_else(|| self.make(cell, who, key));
        self.recent = Some((key, made));
        made
    }

    fn make(&mut self, cell: Cell, who: &Who, key: Joined) -> Cell {
        let mut times = match cell.warp() {
            None => self.sets[cell.time() as usize].clone(),
            Some(warp) => {
                let mut times = vec![0; who.seen.len()];
                times[warp] = cell.time() + 1;
                times
            }
        };
        times[who.warp()] = who.time + 1;
        let made = Cell::new(who.block + 1, SEVERAL, self.sets.len() as u32);
        self.sets.push(times);
        self.made.insert(key, made);
        made
    }
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AccessKind {
    Read,
    /// A read of what nothing writes during the launch.
    ReadOnly,
    Write,
}

/// Access records of 1 KiB, at the granularity of the smallest access so far.
#[derive(Default)]
struct Page {
    /// The launch that the rest is of.
    launch: u64,
    piece_bytes: usize,
    reads: Vec<Cell>,
    writes: Vec<Cell>,
}

impl Page {
    fn clear(&mut self, launch: u64, piece_bytes: usize) {
        self.launch = launch;
        self.piece_bytes = piece_bytes;
        for cells in [&mut self.reads, &mut self.writes] {
            cells.clear();
            cells.resize(PAGE_BYTES / piece_bytes, Cell::default());
        }
    }

    fn refine(&mut self, piece_bytes: usize) {
        let copies = self.piece_bytes / piece_bytes;
        for cells in [&mut self.reads, &mut self.writes] {
            *cells = cells
                .iter()
                .flat_map(|cell| std::iter::repeat_n(*cell, copies))
                .collect();
        }
        self.piece_bytes = piece_bytes;
    }
}

/// The accesses of a region during one launch.
pub(crate) struct Shadow {
    pages: Vec<Page>,
    sets: ReadSets,
}

impl Shadow {
    pub(crate) fn new(bytes: usize) -> Shadow {
        let pages = bytes.div_ceil(PAGE_BYTES);
        Shadow {
            pages: std::iter::repeat_with(Page::default).take(pages).collect(),
            sets: ReadSets::default(),
        }
    }

    /// The page of an access, and its pieces there.
    #[inline]
    fn pieces(
        &mut self,
        offset: usize,
        bytes: usize,
        launch: u64,
    ) -> (&mut Page, &mut ReadSets, Range<usize>) {
        self.sets.begin(launch);
        let page = &mut self.pages[offset / PAGE_BYTES];
        if page.launch != launch {
            page.clear(launch, bytes);
        } else if page.piece_bytes > bytes {
            page.refine(bytes);
        }
        let first = offset % PAGE_BYTES / page.piece_bytes;
        let pieces = first..first + bytes / page.piece_bytes;
        (page, &mut self.sets, pieces)
    }

    /// Notes a read by a product of a warp, before which a proxy fence has to follow the last write: `fenced` has the times
    /// of these. If something is missing, says what.
    pub(crate) fn note_product(
        &mut self,
        offset: usize,
        bytes: usize,
        launch: u64,
        who: &Who,
        fenced: &[u32],
    ) -> Result<(), (MistakeKind, String)> {
        let (page, sets, pieces) = self.pieces(offset, bytes, launch);
        for index in pieces {
            let write = page.writes[index];
            if let Some(warp) = write.warp().filter(|_| write.0 != 0) {
                // All lanes of the group read, so what one of them wrote is ordered by a barrier or not at all.
                if write.block() != who.block + 1 || write.time() >= who.seen[warp] {
                    return Err((MistakeKind::Race, format!("{} wrote it", write.describe())));
                }
                if write.time() >= fenced[warp] {
                    return Err((
                        MistakeKind::Unfenced,
                        format!("{} wrote it", write.describe()),
                    ));
                }
            }
            let read = &mut page.reads[index];
            *read = read.and(Cell::of_warp(who), who, sets);
        }
        Ok(())
    }

    /// Notes an access of `bytes` bytes, a power of two up to 16 that divides `offset`; if it races, says with whom.
    #[inline]
    pub(crate) fn note(
        &mut self,
        offset: usize,
        bytes: usize,
        touch: AccessKind,
        launch: u64,
        who: &Who,
    ) -> Result<(), String> {
        let (page, sets, pieces) = self.pieces(offset, bytes, launch);
        for index in pieces {
            let (read, write) = (&mut page.reads[index], &mut page.writes[index]);
            if !write.is_visible(who) {
                return Err(format!("{} wrote it", write.describe()));
            }
            match touch {
                AccessKind::Read => *read = read.and(Cell::of(who), who, sets),
                AccessKind::ReadOnly if write.0 == 0 => *read = Cell::BY_SEVERAL_BLOCKS,
                AccessKind::ReadOnly => return Err("this launch wrote it".into()),
                AccessKind::Write if read.is_over(who, sets) => *write = Cell::of(who),
                AccessKind::Write => return Err(format!("{} read it", read.describe())),
            }
        }
        Ok(())
    }
}
