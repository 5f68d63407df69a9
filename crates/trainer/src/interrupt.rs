//! Ctrl-C and termination requests.

use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Notices SIGINT and SIGTERM; a second signal of a kind ends the process at once.
pub(crate) struct Interrupt {
    signals: [(i32, Arc<AtomicBool>); 2],
}

impl Interrupt {
    /// Starts to notice.
    pub(crate) fn new() -> std::io::Result<Interrupt> {
        let signals = [SIGINT, SIGTERM].map(|signal| (signal, Arc::new(AtomicBool::new(false))));
        for (signal, flag) in &signals {
            signal_hook::flag::register_conditional_shutdown(*signal, 128 + signal, flag.clone())?;
            signal_hook::flag::register(*signal, flag.clone())?;
        }
        Ok(Interrupt { signals })
    }

    /// Says whether a signal came, from anywhere.
    pub(crate) fn watch(&self) -> impl Fn() -> bool + 'static {
        let flags = self.signals.each_ref().map(|(_, flag)| flag.clone());
        move || flags.iter().any(|flag| flag.load(Ordering::Relaxed))
    }

    /// The signal that came, if one did.
    pub(crate) fn signal(&self) -> Option<i32> {
        self.signals
            .iter()
            .find(|(_, flag)| flag.load(Ordering::Relaxed))
            .map(|(signal, _)| *signal)
    }
}
