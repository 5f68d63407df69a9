//! Finds work of two queues that touches the same bytes while no event orders the one after the other.
//!
//! Each queue has a clock: how far it knows every queue to be done. Waiting for an event brings the clock of the queue that
//! recorded it. Of every byte it is known which command wrote it last, and which queues have read it since. A command that
//! touches a byte must know those to be done with it, or it is a hazard: on some device, in some run, it comes too early.
//! So a wait that is missing is found in a single run, whatever order that run took.
//!
//! Operations do not declare their scratch, single numbers, or what [`kernels::Init::Add`] reads: random schedules have to
//! show mistakes there.

use kernels::{Event, Queue};
use memory::{In, Out};
use std::collections::BTreeMap;
use std::ops::Range;

const QUEUES: usize = Queue::ALL.len();

/// The number of commands of each queue that are known to be done.
type Clock = [u64; QUEUES];

/// Bytes that a command touches.
#[derive(Clone, Debug)]
pub(crate) struct Touch {
    /// 0 for memory; else a number that tells a file from others.
    pub(crate) space: usize,
    /// Addresses in memory, or offsets in the file.
    pub(crate) bytes: Range<usize>,
    /// Whether they are written; else they are only read.
    pub(crate) is_written: bool,
}

impl Touch {
    /// All bytes from the first element of a view to its last, those between them included.
    pub(crate) fn read(x: &In) -> Touch {
        let start = x.pointer() as usize;
        let strides = x.dims().iter().zip(x.strides());
        let last: usize = strides
            .map(|(dim, stride)| dim.saturating_sub(1) * stride)
            .sum();
        let elements = if x.elements() == 0 { 0 } else { last + 1 };
        Touch {
            space: 0,
            bytes: start..start + elements * x.dtype().size_in_bytes(),
            is_written: false,
        }
    }

    /// As [`Touch::read`], of what is written.
    pub(crate) fn written(out: &Out) -> Touch {
        Touch {
            is_written: true,
            ..Touch::read(&out.as_in())
        }
    }
}

/// A command in its queue.
#[derive(Clone, Copy, PartialEq)]
struct Command {
    queue: Queue,
    /// Its number in the queue, from 1.
    position: u64,
    name: &'static str,
}

/// The last accesses to a range of bytes, which ends before `end`.
#[derive(Clone)]
struct Touched {
    end: usize,
    writer: Option<Command>,
    /// The last command of each queue that has read them since.
    readers: [Option<Command>; QUEUES],
}

impl Touched {
    fn untouched(end: usize) -> Touched {
        Touched {
            end,
            writer: None,
            readers: [None; QUEUES],
        }
    }

    /// The commands that have to be done before the bytes are read, or written.
    fn before(&self, is_written: bool) -> impl Iterator<Item = Command> {
        let readers = self.readers.iter().filter(move |_| is_written);
        self.writer.iter().chain(readers.flatten()).copied()
    }

    fn mark(&mut self, command: Command, is_written: bool) {
        match is_written {
            true => {
                self.readers = [None; QUEUES];
                self.writer = Some(command);
            }
            false => self.readers[command.queue as usize] = Some(command),
        }
    }
}

/// The accesses of all queues so far, and the order that events give them.
#[derive(Default)]
pub(crate) struct Hazards {
    /// The commands that the host has waited for. Every later command comes after them.
    host: Clock,
    /// The clock of each queue after each of its commands.
    clocks: [Vec<Clock>; QUEUES],
    /// By space and first byte; ranges do not overlap.
    touched: BTreeMap<(usize, usize), Touched>,
}

impl Hazards {
    /// Notes the next command of a queue. Returns a sentence about the first earlier command that it should have waited for.
    pub(crate) fn command(
        &mut self,
        queue: Queue,
        name: &'static str,
        touches: &[Touch],
    ) -> Option<String> {
        let clock = self.advance(queue, self.host);
        let command = Command {
            queue,
            position: clock[queue as usize],
            name,
        };
        let mut hazard = None;
        for touch in touches {
            for touched in self.ranges(touch) {
                let mut before = touched.before(touch.is_written);
                if let Some(early) = before.find(|it| clock[it.queue as usize] < it.position) {
                    hazard = hazard.or(Some(early));
                }
            }
        }
        for touch in touches {
            for touched in self.ranges(touch) {
                touched.mark(command, touch.is_written);
            }
        }
        hazard.map(|early| {
            let (here, there) = (queue.name(), early.queue.name());
            format!(
                "`{name}` in `{here}` does not wait for `{}` in `{there}`",
                early.name
            )
        })
    }

    /// Notes that a queue waits for an event.
    pub(crate) fn wait(&mut self, queue: Queue, event: Event) {
        self.advance(queue, self.clock(event));
    }

    /// Notes that the host has waited for an event.
    pub(crate) fn finish(&mut self, event: Event) {
        self.host = later(self.host, self.clock(event));
    }

    fn clock(&self, event: Event) -> Clock {
        match event.position {
            0 => Clock::default(),
            position => self.clocks[event.queue as usize][position as usize - 1],
        }
    }

    /// A queue does one thing more, and knows what another clock says.
    fn advance(&mut self, queue: Queue, other: Clock) -> Clock {
        let clocks = &mut self.clocks[queue as usize];
        let mut clock = later(clocks.last().copied().unwrap_or_default(), other);
        clock[queue as usize] = clocks.len() as u64 + 1;
        clocks.push(clock);
        clock
    }

    /// The known ranges that make up these bytes. Cuts ranges at both ends and adds missing ones first.
    fn ranges(&mut self, touch: &Touch) -> impl Iterator<Item = &mut Touched> {
        let (space, Range { start, end }) = (touch.space, touch.bytes.clone());
        self.cut(space, start);
        self.cut(space, end);
        let mut at = start;
        let mut gaps = Vec::new();
        for ((_, first), touched) in self.touched.range((space, start)..(space, end)) {
            gaps.extend((at < *first).then_some(at..*first));
            at = touched.end;
        }
        gaps.extend((at < end).then_some(at..end));
        for gap in gaps {
            let untouched = Touched::untouched(gap.end);
            self.touched.insert((space, gap.start), untouched);
        }
        let ranges = self.touched.range_mut((space, start)..(space, end));
        ranges.map(|(_, touched)| touched)
    }

    /// Divides the range that has a byte inside it, so that one begins there.
    fn cut(&mut self, space: usize, at: usize) {
        let before = self.touched.range_mut((space, 0)..(space, at)).next_back();
        let Some((_, left)) = before.filter(|(_, touched)| at < touched.end) else {
            return;
        };
        let right = left.clone();
        left.end = at;
        self.touched.insert((space, at), right);
    }
}

/// The later of two clocks, queue by queue.
fn later(one: Clock, other: Clock) -> Clock {
    std::array::from_fn(|queue| one[queue].max(other[queue]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reads(bytes: Range<usize>) -> Touch {
        Touch {
            space: 0,
            bytes,
            is_written: false,
        }
    }

    fn writes(bytes: Range<usize>) -> Touch {
        Touch {
            is_written: true,
            ..reads(bytes)
        }
    }

    fn end(queue: Queue, position: u64) -> Event {
        Event { queue, position }
    }

    #[test]
    fn what_no_event_orders_is_named() {
        let mut hazards = Hazards::default();
        let fill = hazards.command(Queue::Compute, "fill", &[writes(0..8)]);
        assert_eq!(fill, None);
        let copy = hazards.command(Queue::Download, "copy", &[reads(7..9)]);
        assert_eq!(
            copy.unwrap(),
            "`copy` in `download` does not wait for `fill` in `compute`"
        );
    }

    #[test]
    fn an_event_orders_what_came_before_it_alone() {
        let mut hazards = Hazards::default();
        hazards.command(Queue::Compute, "fill", &[writes(0..4)]);
        hazards.command(Queue::Compute, "fill", &[writes(4..8)]);
        hazards.wait(Queue::Download, end(Queue::Compute, 1));
        let first = hazards.command(Queue::Download, "copy", &[reads(0..4)]);
        assert_eq!(first, None);
        let both = hazards.command(Queue::Download, "copy", &[reads(0..5)]);
        assert!(both.is_some());
    }

    #[test]
    fn waits_are_passed_on() {
        let mut hazards = Hazards::default();
        hazards.command(Queue::Compute, "fill", &[writes(0..4)]);
        hazards.wait(Queue::Upload, end(Queue::Compute, 1));
        hazards.wait(Queue::Download, end(Queue::Upload, 1));
        let copy = hazards.command(Queue::Download, "copy", &[reads(0..4)]);
        assert_eq!(copy, None);
    }

    #[test]
    fn what_is_read_is_not_written_before_it_was_read() {
        let mut hazards = Hazards::default();
        hazards.command(Queue::Download, "copy", &[reads(0..4)]);
        let read = hazards.command(Queue::Compute, "sum", &[reads(0..4)]);
        assert_eq!(read, None, "two that read need no order");
        let early = hazards.command(Queue::Compute, "fill", &[writes(2..3)]);
        assert!(early.is_some());
        hazards.finish(end(Queue::Download, 1));
        let late = hazards.command(Queue::Compute, "fill", &[writes(0..4)]);
        assert_eq!(late, None, "the host has waited");
    }

    #[test]
    fn the_same_place_in_a_file_and_in_memory_is_not_the_same() {
        let mut hazards = Hazards::default();
        let in_file = Touch {
            space: 7,
            ..writes(0..4)
        };
        hazards.command(Queue::DiskWrite, "copy", std::slice::from_ref(&in_file));
        let fill = hazards.command(Queue::Compute, "fill", &[writes(0..4)]);
        assert_eq!(fill, None);
        let again = hazards.command(Queue::DiskRead, "copy", &[in_file]);
        assert!(again.is_some());
    }
}
