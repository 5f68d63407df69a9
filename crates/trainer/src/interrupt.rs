//! Handles Ctrl-C and termination requests, and a signal for files that grow too large.

use crate::failure::{Failure, Result};
use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Notices SIGINT and SIGTERM; a second signal of either kind ends the process at once.
pub(crate) struct Interrupt {
    signals: [(i32, Arc<AtomicBool>); 2],
    arrived: Arc<AtomicBool>,
}

impl Interrupt {
    /// Installs the handlers.
    pub(crate) fn new() -> std::io::Result<Interrupt> {
        let signals = [SIGINT, SIGTERM].map(|signal| (signal, Arc::new(AtomicBool::new(false))));
        let arrived = Arc::new(AtomicBool::new(false));
        for (signal, flag) in &signals {
            flag::register_conditional_shutdown(*signal, 128 + signal, arrived.clone())?;
            flag::register(*signal, flag.clone())?;
            flag::register(*signal, arrived.clone())?;
        }
        Ok(Interrupt { signals, arrived })
    }

    /// A function that reports whether a signal came. It may be called from anywhere.
    pub(crate) fn watch(&self) -> impl Fn() -> bool + 'static {
        let arrived = self.arrived.clone();
        move || arrived.load(Ordering::Relaxed)
    }

    /// The signal that came, if any.
    pub(crate) fn signal(&self) -> Option<i32> {
        self.signals
            .iter()
            .find(|(_, flag)| flag.load(Ordering::Relaxed))
            .map(|(signal, _)| *signal)
    }
}

/// Makes a write beyond the limit on file sizes (`ulimit -f`) a usual error. By default the signal ends the process.
pub(crate) fn outlive_file_size_limit() -> Result {
    let noticed = flag::register(SIGXFSZ, Arc::default());
    noticed.map_err(|error| Failure::Device(error.to_string()))?;
    Ok(())
}
