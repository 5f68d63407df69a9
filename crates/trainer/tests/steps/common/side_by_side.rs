//! Many small runs, side by side.

use std::panic::resume_unwind;
use std::sync::Mutex;

/// What becomes of each, in their order. As many are at work as the machine has processors, each in one thread: models as small
/// as those of tests gain nothing from more.
pub fn side_by_side<T: Send, R: Send>(
    all: impl IntoIterator<Item = T>,
    of: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    let all: Vec<T> = all.into_iter().collect();
    let waiting = Mutex::new(all.into_iter().enumerate());
    let next = || waiting.lock().unwrap().next();
    let work = || {
        let mut made = Vec::new();
        while let Some((index, one)) = next() {
            made.push((index, in_one_thread(|| of(one))));
        }
        made
    };
    let mut made: Vec<(usize, R)> = std::thread::scope(|scope| {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
        let made = workers.into_iter().map(|worker| worker.join());
        made.flat_map(|made| made.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    made.sort_by_key(|(index, _)| *index);
    made.into_iter().map(|(_, made)| made).collect()
}

/// Computes in one thread, beside whatever others do.
pub fn in_one_thread<R: Send>(of: impl FnOnce() -> R + Send) -> R {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1);
    pool.build().unwrap().install(of)
}
