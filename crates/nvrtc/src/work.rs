//! Compiles many sources with several threads.

use crate::{Compiled, Error, Nvrtc, Source};
use std::sync::Mutex;

/// One compilation.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// What is compiled.
    pub source: &'a Source,
    /// The architecture: `sm_90`.
    pub target: &'a str,
}

/// Every source for every target that there is code for.
pub fn jobs<'a>(sources: &'a [Source], targets: &[&'a str]) -> Vec<Job<'a>> {
    let of = |source: &'a Source| {
        let job = move |target: &&'a str| {
            let target = source.target(target)?;
            Some(Job { source, target })
        };
        targets.iter().filter_map(job)
    };
    sources.iter().flat_map(of).collect()
}

/// Compiles with so many threads, and hands over each job's result as soon as it is done, in any order.
///
/// # Errors
/// The first failure, of a compilation or of the function that takes results; jobs that began before it still finish.
pub fn compile_all<'a>(
    nvrtc: &Nvrtc,
    mut jobs: Vec<Job<'a>>,
    threads: usize,
    done: impl Fn(Job<'a>, Compiled) -> Result<(), Error> + Sync,
) -> Result<(), Error> {
    // Jobs are taken from the end, the longest first, so that the last one to finish is a short one.
    jobs.sort_by_key(|job| job.source.text.len());
    let queue = Mutex::new(jobs);
    let next = || queue.lock().expect("no thread panics").pop();
    let work = || {
        while let Some(job) = next() {
            let compiled = nvrtc.compile(job.source, job.target);
            if let Err(error) = compiled.and_then(|compiled| done(job, compiled)) {
                queue.lock().expect("no thread panics").clear();
                return Err(error);
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
        let outcomes = threads
            .into_iter()
            .map(|thread| thread.join().expect("no thread panics"));
        outcomes.collect()
    })
}
