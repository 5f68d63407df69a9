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
    pub callers: Vec<String>,
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
        callers: functions(&trace.to_string())
            .skip_while(|function| !is_asking(function))
            .map(str::to_owned)
            .collect(),
    });
    let watched = Watched {
        made: made.collect(),
        most_bytes: MOST.load(Ordering::Relaxed) as u64,
        left_bytes: LIVE.load(Ordering::Relaxed),
    };
    (result, watched)
}

/// The functions of a trace, whose lines are `   3: function`. Inlined ones are there only in builds with debug information.
fn functions(trace: &str) -> impl Iterator<Item = &str> {
    let functions = trace.lines().filter_map(|line| line.split_once(": "));
    functions.map(|(_, function)| function.trim_start_matches('<'))
}

/// Whether a function is neither of this allocator nor of the standard library, which only pass on what they are asked, and has its
/// module in its name: an inlined one has none.
fn is_asking(function: &str) -> bool {
    let passes_on = ["__rust", "alloc::", "core::", "std::"];
    let name = function.split('<').next().unwrap_or_default();
    name.contains("::")
        && !name.contains("hidden_allocations::allocations::")
        && !passes_on.iter().any(|module| name.starts_with(module))
}

impl Allocation {
    /// Whether the GEMM library made it for its packing, or the stack that it takes its packing buffers from.
    pub fn is_gemm_packing(&self) -> bool {
        let modules = ["gemm::", "gemm_common::", "gemm_f32::", "dyn_stack::"];
        let caller = self.callers.first();
        caller.is_some_and(|caller| modules.iter().any(|module| caller.starts_with(module)))
    }
}

impl std::fmt::Display for Allocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{} bytes by", self.bytes)?;
        self.callers
            .iter()
            .take(8)
            .try_for_each(|function| writeln!(f, "  {function}"))
    }
}
