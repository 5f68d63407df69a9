//! Stamps: points of a stream with a time.

use super::handles::Event;
use super::loading::DRIVER;
use cudarc::driver::result::DriverError;
use cudarc::driver::sys::{self, CUresult};
use memory::Stamp;
use std::cell::RefCell;
use std::sync::OnceLock;
use std::time::Duration;

/// Events that record their time. A step needs a few hundred, so they are used again.
#[derive(Default)]
pub(super) struct Stamps {
    events: RefCell<Vec<Event>>,
    vacant: RefCell<Vec<Stamp>>,
}

impl Stamps {
    /// Puts a stamp into a stream of the current context.
    pub(super) fn put(&self, stream: sys::CUstream) -> Result<Stamp, DriverError> {
        let vacant = self.vacant.borrow_mut().pop();
        let stamp = vacant.map_or_else(|| self.create(), Ok)?;
        let recorded = self.events.borrow()[stamp.0].record(stream);
        if recorded.is_err() {
            self.give_back(stamp);
        }
        recorded.map(|()| stamp)
    }

    fn create(&self) -> Result<Stamp, DriverError> {
        let event = Event::timed()?;
        let mut events = self.events.borrow_mut();
        events.push(event);
        Ok(Stamp(events.len() - 1))
    }

    /// The time between two stamps. Waits for the later one.
    pub(super) fn elapsed(&self, from: Stamp, to: Stamp) -> Result<Duration, DriverError> {
        let events = self.events.borrow();
        let (from, to) = (&events[from.0], &events[to.0]);
        let ms = match elapsed_ms(from, to) {
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => {
                to.synchronize()?;
                elapsed_ms(from, to)?
            }
            asked => asked?,
        };
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }

    /// Lets a stamp be used again.
    pub(super) fn give_back(&self, stamp: Stamp) {
        self.vacant.borrow_mut().push(stamp);
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

/// The first version of `cuEventElapsedTime`, which every driver has. cudarc calls the second version, which came with
/// CUDA 12.8, and panics with an older driver.
fn elapsed_ms(from: &Event, to: &Event) -> Result<f32, DriverError> {
    static FOUND: OnceLock<Option<ElapsedTime>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        // SAFETY: the function has this type in every version of CUDA.
        unsafe { DRIVER.function("cuEventElapsedTime\0") }
    });
    let elapsed = found.ok_or(DriverError(CUresult::CUDA_ERROR_NOT_FOUND))?;
    let mut ms = 0.0;
    // SAFETY: both events are alive and take the time; writes one number.
    unsafe { elapsed(&mut ms, from.handle(), to.handle()) }.result()?;
    Ok(ms)
}
