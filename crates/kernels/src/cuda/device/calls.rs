//! The calls of a section in order, as values. They are compared with the next run of the section, or made later.

use crate::cuda::{Argument, Gemm, Kernel, Launch, Workspace};
use crate::{Event, Queue};
use std::ops::Range;

/// A call that a driver got.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Call {
    /// A launch. Its arguments are a range of the list's arguments.
    Launch {
        queue: Queue,
        kernel: Kernel,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        arguments: Range<usize>,
    },
    /// Matrix products, by index in the list.
    Gemm(usize),
    /// Sets bytes to 0.
    Clear { to: *mut u8, bytes: usize },
    /// A copy between the device and pinned host memory.
    Copy {
        queue: Queue,
        to: *mut u8,
        from: *const u8,
        bytes: usize,
    },
    /// A record of the present end of a queue: its next record in this section.
    Record(Queue),
    /// A queue's wait for a record of this section, given by its number in its queue.
    Wait {
        queue: Queue,
        of: Queue,
        record: u64,
    },
}

/// Calls in order. Comparing with known calls allocates no memory.
#[derive(Default)]
pub(super) struct Calls {
    calls: Vec<Call>,
    arguments: Vec<Argument>,
    gemms: Vec<(Gemm, Workspace)>,
}

impl Calls {
    /// The number of calls.
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }

    /// The first `count` calls.
    pub(super) fn first(&self, count: usize) -> impl Iterator<Item = &Call> {
        self.calls[..count].iter()
    }

    /// The arguments of a launch.
    pub(super) fn arguments(&self, range: &Range<usize>) -> &[Argument] {
        &self.arguments[range.clone()]
    }

    /// The products at a place, and their workspace.
    pub(super) fn gemm(&self, place: usize) -> &(Gemm, Workspace) {
        &self.gemms[place]
    }

    /// Adds a call whose operands are in none of the lists.
    pub(super) fn push(&mut self, call: Call) {
        self.calls.push(call);
    }

    /// Adds a launch.
    pub(super) fn push_launch(&mut self, launch: &Launch) {
        let first = self.arguments.len();
        self.arguments.extend_from_slice(launch.arguments);
        self.calls.push(Call::Launch {
            queue: launch.queue,
            kernel: launch.kernel,
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            arguments: first..self.arguments.len(),
        });
    }

    /// Adds products.
    pub(super) fn push_gemm(&mut self, gemm: &Gemm, workspace: Workspace) {
        self.calls.push(Call::Gemm(self.gemms.len()));
        self.gemms.push((*gemm, workspace));
    }

    /// Whether the call at a place is these products, of the same matrices.
    pub(super) fn is_gemm(&self, at: usize, gemm: &Gemm, workspace: Workspace) -> bool {
        match self.calls.get(at) {
            Some(Call::Gemm(place)) => self.gemms[*place] == (*gemm, workspace),
            _ => false,
        }
    }

    /// Whether the call at a place is this one, which is in none of the lists.
    pub(super) fn is(&self, at: usize, call: &Call) -> bool {
        self.calls.get(at) == Some(call)
    }

    /// Whether the call at a place is this launch, with the same arguments.
    pub(super) fn is_launch(&self, at: usize, launch: &Launch) -> bool {
        let Some(Call::Launch {
            queue,
            kernel,
            grid,
            block,
            shared_bytes,
            arguments,
        }) = self.calls.get(at)
        else {
            return false;
        };
        let sizes = (*grid, *block, *shared_bytes);
        *queue == launch.queue
            && *kernel == launch.kernel
            && sizes == (launch.grid, launch.block, launch.shared_bytes)
            && self.arguments(arguments) == launch.arguments
    }
}

/// The records of a section, by queue. An event of the section is known by its place among them, in every run of the
/// section.
#[derive(Clone, Copy)]
pub(super) struct Records {
    /// Records of each stream before the section.
    before: [u64; Queue::ALL.len()],
    /// Records of each stream in it.
    within: [u64; Queue::ALL.len()],
}

impl Records {
    /// No records yet, after streams had this many before.
    pub(super) fn after(before: [u64; Queue::ALL.len()]) -> Records {
        Records {
            before,
            within: [0; Queue::ALL.len()],
        }
    }

    /// Adds a record. Returns the event that it will have once the section has been launched.
    pub(super) fn add(&mut self, queue: Queue) -> Event {
        let within = &mut self.within[queue as usize];
        *within += 1;
        Event {
            queue,
            position: self.before[queue as usize] + *within,
        }
    }

    /// The number of an event in its queue, from 1; none if it was recorded before the section.
    pub(super) fn number(&self, event: Event) -> Option<u64> {
        let number = event
            .position
            .checked_sub(self.before[event.queue as usize]);
        number.filter(|number| *number > 0)
    }

    /// The event of a record by its number.
    pub(super) fn event(&self, queue: Queue, number: u64) -> Event {
        Event {
            queue,
            position: self.before[queue as usize] + number,
        }
    }

    /// The number of records in a queue.
    pub(super) fn count(&self, queue: Queue) -> u64 {
        self.within[queue as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(arguments: &[Argument]) -> Launch<'_> {
        Launch {
            queue: Queue::Compute,
            kernel: Kernel {
                source: "elementwise",
                name: "fill_f32",
            },
            grid: [3, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            arguments,
        }
    }

    #[test]
    fn a_launch_is_the_same_with_the_same_arguments_alone() {
        let (here, there) = (0x100 as *const u8, 0x200 as *const u8);
        let arguments = [Argument::Pointer(here), Argument::Size(3), 0.5.into()];
        let mut calls = Calls::default();
        calls.push_launch(&launch(&[Argument::Int(1)]));
        calls.push_launch(&launch(&arguments));
        assert!(calls.is_launch(1, &launch(&arguments)));
        for other in [
            [Argument::Pointer(there), Argument::Size(3), 0.5.into()],
            [Argument::Pointer(here), Argument::Size(4), 0.5.into()],
            [Argument::Pointer(here), Argument::Size(3), 0.25.into()],
        ] {
            assert!(!calls.is_launch(1, &launch(&other)));
        }
        assert!(!calls.is_launch(0, &launch(&arguments)));
        assert!(
            !calls.is_launch(2, &launch(&arguments)),
            "there is no third"
        );
        let mut wider = launch(&arguments);
        wider.grid = [4, 1, 1];
        assert!(!calls.is_launch(1, &wider));
    }

    #[test]
    fn events_are_known_by_their_place_in_the_section() {
        let mut before = [0; Queue::ALL.len()];
        before[Queue::Download as usize] = 7;
        let mut records = Records::after(before);
        let first = records.add(Queue::Download);
        let second = records.add(Queue::Download);
        assert_eq!((first.position, second.position), (8, 9));
        assert_eq!(records.number(second), Some(2));
        assert_eq!(records.event(Queue::Download, 2), second);
        let older = Event {
            queue: Queue::Download,
            position: 7,
        };
        assert_eq!(records.number(older), None);
        assert_eq!(records.number(Event::PAST), None);
        assert_eq!(records.count(Queue::Download), 2);
        assert_eq!(records.count(Queue::Upload), 0);
    }
}
