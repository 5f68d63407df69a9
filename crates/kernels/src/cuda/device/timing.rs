//! Points of a stream whose times can be told apart.

use cudarc::driver::result::{DriverError, event};
use cudarc::driver::sys::{self, CUresult};
use memory::Stamp;
use std::cell::RefCell;
use std::time::Duration;

/// Events that take the time. A step needs a few hundred, so they are made once and used again.
#[derive(Default)]
pub(super) struct Stamps {
    events: RefCell<Vec<sys::CUevent>>,
    vacant: RefCell<Vec<Stamp>>,
}

impl Stamps {
    /// Puts a stamp into a stream of the current context.
    pub(super) fn put(&self, stream: sys::CUstream) -> Result<Stamp, DriverError> {
        let vacant = self.vacant.borrow_mut().pop();
        let stamp = vacant.map_or_else(|| self.create(), Ok)?;
        // SAFETY: created below, and destroyed with `self` alone; the caller's stream is alive.
        let recorded = unsafe { event::record(self.event(stamp), stream) };
        if recorded.is_err() {
            self.give_back(stamp);
        }
        recorded.map(|()| stamp)
    }

    fn create(&self) -> Result<Stamp, DriverError> {
        let event = event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?;
        let mut events = self.events.borrow_mut();
        events.push(event);
        Ok(Stamp(events.len() - 1))
    }

    fn event(&self, stamp: Stamp) -> sys::CUevent {
        self.events.borrow()[stamp.0]
    }

    /// The time between two stamps; waits for the later one if it has not come.
    pub(super) fn elapsed(&self, from: Stamp, to: Stamp) -> Result<Duration, DriverError> {
        let (from, to) = (self.event(from), self.event(to));
        // SAFETY: both events were created and recorded above.
        let ask = || unsafe { event::elapsed(from, to) };
        let ms = match ask() {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => {
                // SAFETY: as above.
                unsafe { event::synchronize(to) }?;
                ask()?
            }
            asked => asked?,
        };
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    /// Lets a stamp be put again.
    pub(super) fn give_back(&self, stamp: Stamp) {
        self.vacant.borrow_mut().push(stamp);
    }

    /// Destroys the events; their device is about to go.
    pub(super) fn destroy(&self) {
        for event in self.events.take() {
            // SAFETY: created above, and used by nothing from here on.
            let _ = unsafe { event::destroy(event) };
        }
    }
}
