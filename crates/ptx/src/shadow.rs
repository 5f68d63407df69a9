//! The last accesses of each byte, to find accesses that nothing orders.
//!
//! Each thread knows, for every other of its block, up to which time of that one's clock accesses come before its own. A barrier joins
//! what its threads know. Blocks are never ordered.
//!
//! Within a warp, a shuffle or vote of all lanes orders what they have read before what they write afterwards, since a lane gives
//! what it made of the values. It does not make their writes visible: for that the clock goes on, but not what is known of it.
//!
//! Copies and products that are under way access memory at any time until they are waited for. So an access is noted when it is
//! asked for, as one that only precedes those who know of the wait.

use crate::clock::{COPIES, PRODUCTS, VectorClock};
use crate::error::MistakeKind;
use crate::registers::{LANES, LaneMask};
use std::collections::HashMap;
use std::ops::Range;

/// Bytes of a page: an access lies in one.
const PAGE_BYTES: usize = 1024;

/// Fields of a [`Cell`].
const CLOCK_BITS: u32 = 28;
const CODE_BITS: u32 = 12;
/// Codes of who accesses: thread t is `t`, its copies `LANES * COPIES + t`, all that counts on line l `OF_LINE + l`. `SEVERAL` are
/// of several lines, which a [`ReadSets`] has.
const OF_LINE: usize = 2 * LANES * COPIES;
const SEVERAL: usize = (1 << CODE_BITS) - 1;
/// In the place of a block: several.
const BLOCKS: u64 = (1 << (64 - CLOCK_BITS - CODE_BITS)) - 1;

/// Most blocks of a launch.
pub(crate) const BLOCKS_MAX: u64 = BLOCKS - 1;

/// The line on which a code counts.
fn line_of(code: usize) -> usize {
    match code.checked_sub(OF_LINE) {
        None => code / LANES,
        Some(line) => line,
    }
}

/// Who accesses.
#[derive(Clone, Copy)]
pub(crate) struct Who<'a> {
    /// The number of the block in its grid.
    pub(crate) block: u64,
    /// The number of the thread in its block, whose own accesses precede; none for a product.
    thread: Option<usize>,
    code: usize,
    /// The time of its line.
    time: u32,
    /// The time of the warp's clock when its lanes last gave each other what they had read.
    met: u32,
    /// The time before which the thread's own copies precede.
    copied: u32,
    /// Whether no other lane accesses memory by the same instruction.
    is_alone: bool,
    /// What precedes otherwise.
    clock: &'a VectorClock,
}

impl<'a> Who<'a> {
    /// A thread, by its number in its block.
    pub(crate) fn thread(
        (block, thread): (u64, usize),
        [time, met, copied]: [u32; 3],
        clock: &'a VectorClock,
    ) -> Who<'a> {
        Who {
            block,
            thread: Some(thread),
            code: thread,
            time,
            met,
            copied,
            is_alone: false,
            clock,
        }
    }

    /// The same for an instruction of a mask.
    pub(crate) fn of(self, mask: LaneMask) -> Who<'a> {
        let is_alone = mask.count_ones() == 1;
        Who { is_alone, ..self }
    }

    /// A copy that the thread asks for, at a time of its copies.
    pub(crate) fn copying(self, time: u32) -> Who<'a> {
        let code = LANES * COPIES + self.code;
        Who { code, time, ..self }
    }

    /// A product of a warp, at a time of its products.
    pub(crate) fn product(block: u64, warp: usize, time: u32, clock: &'a VectorClock) -> Who<'a> {
        Who {
            block,
            thread: None,
            code: OF_LINE + PRODUCTS + warp,
            time,
            met: 0,
            copied: 0,
            is_alone: false,
            clock,
        }
    }

    /// Whether an access precedes that is not of several lines; within the warp also before it `met`.
    fn follows(&self, cell: Cell, met: u32) -> bool {
        if cell.0 == 0 {
            return true;
        }
        let (code, time) = (cell.code(), cell.time());
        let line = line_of(code);
        let is_own =
            |thread| code == thread || code == LANES * COPIES + thread && time < self.copied;
        cell.block() == self.block + 1
            && (self.thread.is_some_and(is_own)
                || time < self.clock.seen.of_line(line)
                || time < met && self.thread.is_some_and(|thread| thread / LANES == line)
                || code < OF_LINE && time < self.clock.seen.of_lane(line, code % LANES))
    }

    /// Whether a write that precedes was also fenced, as a product needs it.
    fn is_fenced(&self, cell: Cell) -> bool {
        let (code, time, fenced) = (cell.code(), cell.time(), &self.clock.fenced);
        cell.0 == 0
            || time < fenced.of_line(line_of(code))
            || code < OF_LINE && time < fenced.of_lane(line_of(code), code % LANES)
    }
}

/// An access: block + 1, code and time; zero if there was none.
#[derive(Clone, Copy, PartialEq, Default)]
struct Cell(u64);

impl Cell {
    const BY_SEVERAL_BLOCKS: Cell = Cell(BLOCKS << (CLOCK_BITS + CODE_BITS));

    fn new(block: u64, code: usize, time: u32) -> Cell {
        Cell((block << CODE_BITS | code as u64) << CLOCK_BITS | u64::from(time))
    }

    fn of(who: &Who) -> Cell {
        Cell::new(who.block + 1, who.code, who.time)
    }

    fn block(self) -> u64 {
        self.0 >> (CLOCK_BITS + CODE_BITS)
    }

    fn code(self) -> usize {
        (self.0 >> CLOCK_BITS) as usize & SEVERAL
    }

    fn time(self) -> u32 {
        (self.0 & ((1 << CLOCK_BITS) - 1)) as u32
    }

    /// The line, if the access is of one.
    fn line(self) -> Option<usize> {
        Some(self.code())
            .filter(|code| *code != SEVERAL)
            .map(line_of)
    }

    /// For reads: finished before `who` writes.
    fn is_over(self, who: &Who, sets: &ReadSets) -> bool {
        match self.line() {
            None if self.block() == who.block + 1 => {
                let mut reads = sets.sets[self.time() as usize].iter();
                reads.all(|read| who.follows(*read, who.met))
            }
            _ => who.follows(self, who.met),
        }
    }

    /// The same access by whatever lane of its line.
    fn of_line(self) -> Cell {
        let code = self.line().map_or(SEVERAL, |line| OF_LINE + line);
        Cell::new(self.block(), code, self.time())
    }

    /// Combines this read with one by `who`.
    fn and(self, who: &Who, sets: &mut ReadSets) -> Cell {
        let other = Cell::of(who);
        if self.is_over(who, sets) {
            other
        } else if self.block() != other.block() {
            Cell::BY_SEVERAL_BLOCKS
        } else if self.code() == who.code {
            other
        } else if self.line() == other.line() {
            other.of_line()
        } else if who.is_alone {
            sets.with(self, other)
        } else {
            // Bytes that many lanes read share their sets.
            sets.with(self.of_line(), other.of_line())
        }
    }

    fn describe(self) -> String {
        let block = self.block().wrapping_sub(1);
        match (self.block(), self.code()) {
            (BLOCKS, _) => "several blocks".into(),
            (_, SEVERAL) => format!("several threads of block number {block}"),
            (_, code) if code >= OF_LINE => {
                let (line, what) = (line_of(code), ["threads", "copies", "products"]);
                let (what, warp) = (what[line / COPIES], line % COPIES);
                format!("{what} of warp {warp} of block number {block}")
            }
            (_, code) => {
                let what = ["", "a copy by "][code / (LANES * COPIES)];
                let thread = code % (LANES * COPIES);
                format!("{what}thread number {thread} of block number {block}")
            }
        }
    }
}

/// Reads on several lines: the last one on each. A cell's time is the number of its set.
#[derive(Default)]
struct ReadSets {
    /// The launch that the rest is of.
    launch: u64,
    sets: Vec<Vec<Cell>>,
    /// The set that a cell and a read made together.
    made: HashMap<(u64, u64), Cell>,
    /// The last of these: neighbours are mostly read one after the other.
    recent: Option<((u64, u64), Cell)>,
}

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
    fn with(&mut self, cell: Cell, read: Cell) -> Cell {
        if cell.line().is_none() && self.sets[cell.time() as usize].contains(&read) {
            return cell;
        }
        let key = (cell.0, read.0);
        if let Some((_, made)) = self.recent.filter(|(recent, _)| *recent == key) {
            return made;
        }
        let made = self.made.get(&key).copied();
        let made = made.unwrap_or_else(|| self.make(cell, read));
        self.recent = Some((key, made));
        made
    }

    fn make(&mut self, cell: Cell, read: Cell) -> Cell {
        let mut reads = match cell.line() {
            None => self.sets[cell.time() as usize].clone(),
            Some(_) => vec![cell],
        };
        let earlier = reads.iter().position(|other| other.line() == read.line());
        let earlier = earlier.map(|index| reads.swap_remove(index));
        let is_other = earlier.is_some_and(|other| other.code() != read.code());
        reads.push(if is_other { read.of_line() } else { read });
        let made = Cell::new(read.block(), SEVERAL, self.sets.len() as u32);
        self.sets.push(reads);
        self.made.insert((cell.0, read.0), made);
        made
    }
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum AccessKind {
    Read,
    /// A read of what nothing writes during the launch.
    ReadOnly,
    /// A read by a product, before which a proxy fence has to follow the last write.
    Product,
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

    /// Notes an access of `bytes` bytes, a power of two up to 16 that divides `offset`; if something is missing before it, says what, and
    /// after whose access.
    #[inline]
    pub(crate) fn note(
        &mut self,
        offset: usize,
        bytes: usize,
        touch: AccessKind,
        launch: u64,
        who: &Who,
    ) -> Result<(), (MistakeKind, String)> {
        let race = |message| Err((MistakeKind::Race, message));
        let (page, sets, pieces) = self.pieces(offset, bytes, launch);
        for index in pieces {
            let (read, write) = (&mut page.reads[index], &mut page.writes[index]);
            if !who.follows(*write, 0) {
                return race(format!("{} wrote it", write.describe()));
            }
            match touch {
                AccessKind::Product if !who.is_fenced(*write) => {
                    let message = format!("{} wrote it", write.describe());
                    return Err((MistakeKind::Unfenced, message));
                }
                AccessKind::Read | AccessKind::Product => *read = read.and(who, sets),
                AccessKind::ReadOnly if write.0 == 0 => *read = Cell::BY_SEVERAL_BLOCKS,
                AccessKind::ReadOnly => return race("this launch wrote it".into()),
                AccessKind::Write if read.is_over(who, sets) => *write = Cell::of(who),
                AccessKind::Write => return race(format!("{} read it", read.describe())),
            }
        }
        Ok(())
    }
}
