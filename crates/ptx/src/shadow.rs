//! Who accessed each byte, to find accesses that nothing orders.
//!
//! A warp has a clock, which goes on at every barrier, and knows of each warp of its block up to which time of that warp's
//! clock its accesses come before its own: a barrier brings what its warps know together. Blocks are never ordered.

/// Bytes of a page: an access lies in one.
const PAGE_BYTES: usize = 1024;

/// Fields of a [`Cell`].
const CLOCK_BITS: u32 = 29;
const THREAD_BITS: u32 = 11;
/// In the place of a thread: several of the block.
const SEVERAL: u64 = (1 << THREAD_BITS) - 1;
/// In the place of a block: several.
const BLOCKS: u64 = (1 << (64 - CLOCK_BITS - THREAD_BITS)) - 1;

/// Most blocks of a launch.
pub(crate) const BLOCKS_MAX: u64 = BLOCKS - 1;

/// Who accesses.
#[derive(Clone, Copy)]
pub(crate) struct Who<'a> {
    /// The number of the block in its grid.
    pub(crate) block: u64,
    /// The number of the thread in its block.
    pub(crate) thread: usize,
    /// For each warp of the block, the time of its clock before which its accesses precede this one. For the thread's own
    /// warp, this is the time now.
    pub(crate) seen: &'a [u32],
    /// How many barriers of the whole block there were.
    pub(crate) barriers: u32,
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
        let time = who.seen[who.thread / 32];
        Cell::new(who.block + 1, who.thread as u64, time)
    }

    fn block(self) -> u64 {
        self.0 >> (CLOCK_BITS + THREAD_BITS)
    }

    fn thread(self) -> u64 {
        self.0 >> CLOCK_BITS & SEVERAL
    }

    /// Whether the access comes before what `who` does now, in every order that the device may choose.
    fn is_before(self, who: &Who) -> bool {
        if self.0 == 0 {
            return true;
        }
        let time = (self.0 & ((1 << CLOCK_BITS) - 1)) as u32;
        self.block() == who.block + 1
            && match self.thread() {
                SEVERAL => time < who.barriers,
                thread if thread == who.thread as u64 => true,
                thread => time < who.seen[thread as usize / 32],
            }
    }

    /// This read, and one more.
    fn and(self, who: &Who) -> Cell {
        if self.is_before(who) {
            Cell::of(who)
        } else if self.block() == who.block + 1 {
            Cell::new(who.block + 1, SEVERAL, who.barriers)
        } else {
            Cell::BY_SEVERAL_BLOCKS
        }
    }

    fn describe(self) -> String {
        match (self.block(), self.thread()) {
            (BLOCKS, _) => "several blocks".into(),
            (block, SEVERAL) => format!("several threads of block number {}", block - 1),
            (block, thread) => format!("thread number {thread} of block number {}", block - 1),
        }
    }
}

/// What an access does.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LastTouch {
    Read,
    /// A read of what nothing writes during the launch.
    ReadOnly,
    Write,
}

/// The accesses of a kilobyte, in pieces as small as the smallest of them.
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
}

impl Shadow {
    pub(crate) fn new(bytes: usize) -> Shadow {
        let pages = bytes.div_ceil(PAGE_BYTES);
        Shadow {
            pages: std::iter::repeat_with(Page::default).take(pages).collect(),
        }
    }

    /// Notes an access of `bytes` bytes, a power of two up to 16 that divides `offset`; if it races, says with whom.
    #[inline]
    pub(crate) fn note(
        &mut self,
        offset: usize,
        bytes: usize,
        touch: LastTouch,
        launch: u64,
        who: &Who,
    ) -> Result<(), String> {
        let page = &mut self.pages[offset / PAGE_BYTES];
        if page.launch != launch {
            page.clear(launch, bytes);
        } else if page.piece_bytes > bytes {
            page.refine(bytes);
        }
        let first = offset % PAGE_BYTES / page.piece_bytes;
        for index in first..first + bytes / page.piece_bytes {
            let (read, write) = (&mut page.reads[index], &mut page.writes[index]);
            if !write.is_before(who) {
                return Err(format!("{} wrote it", write.describe()));
            }
            match touch {
                LastTouch::Read => *read = read.and(who),
                LastTouch::ReadOnly if write.0 == 0 => *read = Cell::BY_SEVERAL_BLOCKS,
                LastTouch::ReadOnly => return Err("this launch wrote it".into()),
                LastTouch::Write if read.is_before(who) => *write = Cell::of(who),
                LastTouch::Write => return Err(format!("{} read it", read.describe())),
            }
        }
        Ok(())
    }
}
