//! Worker threads.

use crate::failure::{Failure, Result};

/// The number of threads asked for, but at most one for each usable processor: more would wait for each other.
pub(crate) fn threads_of(asked: Option<usize>) -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    match asked {
        Some(asked) if asked > processors => {
            tracing::warn!(
                "{asked} threads are asked for, and this process may use {processors} {}: it takes one thread for each",
                if processors == 1 {
                    "processor"
                } else {
                    "processors"
                }
            );
            processors
        }
        asked => asked.unwrap_or(processors),
    }
}

/// Makes the main thread a worker of the pool, so that operations start without changing threads.
pub(crate) fn start_threads(threads: Option<usize>) -> Result {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(threads_of(threads))
        .use_current_thread();
    pool.build_global()
        .map_err(|error| Failure::Usage(format!("the worker threads did not start: {error}")))
}
