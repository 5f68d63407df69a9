//! Notices memory that grows from step to step. Leases cannot grow, because their memory is reserved once.

use memory::format_bytes;

/// The lowest figure of this many steps counts, so that memory that comes and goes within them does not.
const WINDOW: usize = 16;

/// The number of windows that must rise one after the other.
const RISES: usize = 4;

/// The least growth over these windows.
const NOTABLE_BYTES: u64 = 16 << 20;

/// Watches one figure, and reports its growth once.
#[derive(Clone, Debug, Default)]
pub struct Growth {
    /// The lowest figure of the current window, and its number of steps.
    window: Option<u64>,
    steps: usize,
    /// The lowest figures of the windows that have risen so far.
    rising: Vec<u64>,
    is_said: bool,
}

impl Growth {
    /// Records a step's figure. Returns the growth if it is notable: bytes, and the number of steps.
    pub fn note(&mut self, bytes: u64) -> Option<(u64, usize)> {
        let least = self.window.map_or(bytes, |least| least.min(bytes));
        self.window = Some(least);
        self.steps += 1;
        if self.steps < WINDOW {
            return None;
        }
        (self.window, self.steps) = (None, 0);
        if self.rising.last().is_some_and(|last| least <= *last) {
            self.rising.clear();
        }
        self.rising.push(least);
        let gained = least - self.rising[0];
        let is_growth = self.rising.len() > RISES && gained >= NOTABLE_BYTES && !self.is_said;
        self.is_said |= is_growth;
        is_growth.then_some((gained, WINDOW * (self.rising.len() - 1)))
    }
}

/// Watches what a process and its device hold besides leases.
#[derive(Clone, Debug, Default)]
pub struct MemoryGrowth {
    resident: Growth,
    device: Growth,
}

impl MemoryGrowth {
    /// Records a step; returns messages about growth.
    pub fn note(&mut self, resident_bytes: Option<u64>, device_bytes: Option<u64>) -> Vec<String> {
        let resident = resident_bytes.and_then(|bytes| self.resident.note(bytes));
        let device = device_bytes.and_then(|bytes| self.device.note(bytes));
        let resident = resident.map(|grown| {
            describe(
                "resident memory",
                grown,
                "the host's allocator, a library, or the data that is read ahead",
            )
        });
        let device = device.map(|grown| {
            describe(
                "memory in use on the device",
                grown,
                "the driver, a library, or another process",
            )
        });
        resident.into_iter().chain(device).collect()
    }
}

fn describe(what: &str, (gained, steps): (u64, usize), who: &str) -> String {
    format!(
        "{what} grows: {} more than {steps} steps ago, {} a step; leases cannot, so it is {who}",
        format_bytes(gained),
        format_bytes(gained / steps as u64)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// The steps at which growth of a series is reported.
    fn said(figure: impl Fn(u64) -> u64) -> Vec<u64> {
        let mut growth = Growth::default();
        let mut steps = 0..1000;
        let steps = steps.by_ref();
        steps
            .filter(|step| growth.note(figure(*step)).is_some())
            .collect()
    }

    #[test]
    fn only_what_keeps_growing_is_said_and_only_once() {
        assert_eq!(said(|_| 100 * MIB), [0; 0]);
        assert_eq!(
            said(|step| step * MIB),
            [79],
            "five windows, each above the last"
        );
        assert_eq!(
            said(|step| step % 40 * 10 * MIB),
            [0; 0],
            "it comes and goes"
        );
        assert_eq!(said(|step| step.min(40) * MIB), [0; 0], "it settles");
        assert_eq!(
            said(|step| step * 1024),
            [0; 0],
            "it is not worth a word in a thousand steps"
        );
        let slow = said(|step| step * 100 * 1024);
        assert_eq!(slow.len(), 1);
        assert!(slow[0] > 160, "16 MiB at 100 KiB a step take a while");
    }

    #[test]
    fn the_sentence_has_the_rate_and_who_it_may_be() {
        let mut growth = MemoryGrowth::default();
        let said: Vec<String> = (0..100)
            .flat_map(|step| growth.note(Some(step * 2 * MIB), Some(100 * MIB)))
            .collect();
        let [sentence] = said.as_slice() else {
            panic!("{said:?}");
        };
        for words in [
            "resident memory grows: 128 MiB",
            "64 steps ago",
            "2.00 MiB a step",
            "leases cannot",
        ] {
            assert!(sentence.contains(words), "{words}: {sentence}");
        }
    }
}
