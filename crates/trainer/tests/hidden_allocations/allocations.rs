//! An allocator that remembers who asked for how much.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

/// Smaller allocations are bookkeeping.
pub const SMALLEST: usize = 4096;

/// The system's allocator. While something is watched, allocations of at least [`SMALLEST`] bytes are recorded, in
/// every thread.
pub struct Watching;

static WATCHES: AtomicBool = AtomicBool::new(false);
static LIVE: AtomicI64 = AtomicI64::new(0);
static MOST: AtomicI64 = AtomicI64::new(0);
static MADE: Mutex<Vec<(usize, Backtrace)>> = Mutex::new(Vec::new());

thread_local! {
    /// Recording allocates as well.
    static RECORDS: Cell<bool> = const { Cell::new(false) };
}

fn note(bytes: usize) {
    if bytes < SMALLEST || !WATCHES.load(Ordering::Relaxed) || RECORDS.get() {
        return;
    }
    RECORDS.set(true);
    let live = LIVE.fetch_add(bytes as i64, Ordering::Relaxed) + bytes as i64;
    MOST.fetch_max(live, Ordering::Relaxed);
    let made = (bytes, Backtrace::force_capture());
    MADE.lock().unwrap().push(made);
    RECORDS.set(false);
}

// SAFETY: every call is handed on to the system's allocator unchanged. `realloc` is the trait's own: it allocates,
// copies and frees through these.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if layout.size() >= SMALLEST && WATCHES.load(Ordering::Relaxed) && !RECORDS.get() {
            LIVE.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// An allocation and who made it.
pub struct Allocation {
    /// Its size.
    pub bytes: usize,
    /// The functions under way, innermost first, without the standard library and this allocator.
    pub callers: Vec<Frame>,
}

/// A function and where it is written.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Its name; without its module where it was inlined.
    pub function: String,
    /// File and line, in code that was built with them.
    pub place: String,
}

/// What was allocated while something was watched.
pub struct Watched {
    /// Every allocation.
    pub made: Vec<Allocation>,
    /// The most bytes that were live at once.
    pub most_bytes: u64,
    /// The bytes that were live at the end.
    pub left_bytes: i64,
}

/// Watches `run`. Only one thing can be watched at a time.
pub fn watch<T>(run: impl FnOnce() -> T) -> (T, Watched) {
    LIVE.store(0, Ordering::Relaxed);
    MOST.store(0, Ordering::Relaxed);
    WATCHES.store(true, Ordering::SeqCst);
    let result = run();
    WATCHES.store(false, Ordering::SeqCst);
    let made = std::mem::take(&mut *MADE.lock().unwrap());
    let made = made.into_iter().map(|(bytes, trace)| Allocation {
        bytes,
        callers: frames(&trace.to_string())
            .into_iter()
            .skip_while(|frame| !frame.is_asking())
            .collect(),
    });
    let watched = Watched {
        made: made.collect(),
        most_bytes: MOST.load(Ordering::Relaxed) as u64,
        left_bytes: LIVE.load(Ordering::Relaxed),
    };
    (result, watched)
}

/// A trace's lines are `   3: function`, each followed by `             at file:line` where that is known.
fn frames(trace: &str) -> Vec<Frame> {
    let mut frames: Vec<Frame> = Vec::new();
    for line in trace.lines().map(str::trim_start) {
        if let (Some(place), Some(frame)) = (line.strip_prefix("at "), frames.last_mut()) {
            frame.place = place.into();
        } else if let Some((_, function)) = line.split_once(": ") {
            frames.push(Frame {
                function: function.trim_start_matches('<').into(),
                place: String::new(),
            });
        }
    }
    frames
}

impl Frame {
    /// Whether this is neither this allocator nor the standard library, which only pass on what they are asked. A
    /// function of no known place or module, inlined from somewhere, does not count either.
    fn is_asking(&self) -> bool {
        if self.function.starts_with("__rust") {
            return false; // its place is that of `#[global_allocator]`
        }
        if !self.place.is_empty() {
            return !self.place.contains("/rustc/")
                && !self.place.contains("/rustlib/src/rust/library/")
                && !self.place.contains("common/allocations.rs:");
        }
        let name = self.function.split('<').next().unwrap_or_default();
        let passes_on = ["alloc::", "core::", "std::"];
        name.contains("::") && !passes_on.iter().any(|module| name.starts_with(module))
    }

    /// Whether the function belongs to the GEMM library or to the stack that it takes its packing buffers from.
    pub fn is_gemm_packing(&self) -> bool {
        let parts = ["gemm", "dyn-stack"];
        let of_crate = |part: &str, folder: &str| {
            folder == part || (folder.starts_with(part) && folder[part.len()..].starts_with('-'))
        };
        let mut folders = self.place.split('/');
        let in_folder = folders.any(|folder| parts.iter().any(|part| of_crate(part, folder)));
        in_folder
            || ["gemm::", "gemm_common::", "gemm_f32::", "dyn_stack::"]
                .iter()
                .any(|module| self.function.starts_with(module))
    }
}

impl Allocation {
    /// Whether the GEMM library made it for its packing.
    pub fn is_gemm_packing(&self) -> bool {
        self.callers.first().is_some_and(Frame::is_gemm_packing)
    }
}

impl std::fmt::Display for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} bytes by", self.bytes)?;
        self.callers
            .iter()
            .take(8)
            .try_for_each(|frame| writeln!(f, "  {} at {}", frame.function, frame.place))
    }
}
