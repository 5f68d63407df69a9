//! Counts what others see of a trainer's memory.

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use trainer::Failure;

/// How many tensors of others lie in a trainer's memory. The trainer's thread counts one before its address is told, and looks before it
/// moves the memory or gives it back.
#[derive(Clone, Default)]
pub(crate) struct Views(Arc<(Mutex<usize>, Condvar)>);

/// One of them.
pub(crate) struct View(Views);

impl Views {
    fn count(&self) -> MutexGuard<'_, usize> {
        self.0.0.lock().unwrap_or_else(|held| held.into_inner())
    }

    pub(crate) fn add(&self) -> View {
        *self.count() += 1;
        View(self.clone())
    }

    pub(crate) fn are_none(&self) -> bool {
        *self.count() == 0
    }

    /// Refuses what would move the memory below views.
    pub(crate) fn refuse(&self, what: &str) -> Result<(), Failure> {
        match *self.count() {
            0 => Ok(()),
            count => Err(Failure::Usage(format!(
                "{what} would change the memory below {count} views of weights that are alive; delete the tensors first, or copy them"
            ))),
        }
    }

    /// Waits for the end of the last one.
    pub(crate) fn wait_for_none(&self) {
        let ended = &self.0.1;
        drop(ended.wait_while(self.count(), |count| *count > 0));
    }
}

impl Drop for View {
    fn drop(&mut self) {
        *self.0.count() -= 1;
        self.0.0.1.notify_all();
    }
}
