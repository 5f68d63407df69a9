//! The clocks of several ranks whose steps are made on shapes at once, each in a thread of its own.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Seconds since the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seconds {
    /// With the time of copies and exchanges.
    pub with_copies: f64,
    /// Without the time of copies and exchanges. The difference is the time spent waiting for them.
    pub without_copies: f64,
}

impl Seconds {
    pub(crate) fn later(self, other: Seconds) -> Seconds {
        Seconds {
            with_copies: self.with_copies.max(other.with_copies),
            without_copies: self.without_copies.max(other.without_copies),
        }
    }

    /// The time that passed since an earlier one.
    pub fn since(self, earlier: Seconds) -> Seconds {
        Seconds {
            with_copies: self.with_copies - earlier.with_copies,
            without_copies: self.without_copies - earlier.without_copies,
        }
    }
}

/// One end of a tensor's way between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct End {
    from: usize,
    to: usize,
    /// Whether it is the sender's; otherwise it is the receiver's.
    is_sender: bool,
}

impl End {
    /// The rank whose end it is.
    fn rank(self) -> usize {
        match self.is_sender {
            true => self.from,
            false => self.to,
        }
    }

    fn other(self) -> End {
        End {
            is_sender: !self.is_sender,
            ..self
        }
    }
}

/// When each rank was ready for its transfers.
#[derive(Default)]
struct Board {
    /// The times at one end, in the order of its transfers.
    ready: HashMap<End, Vec<Seconds>>,
    /// Ranks whose steps are over.
    over: HashSet<usize>,
    /// Which end each waiting rank waits for, and for which of its transfers.
    waiting: HashMap<usize, (End, usize)>,
}

impl Board {
    /// When an end was ready for a transfer; none if it is not yet.
    fn ready(&self, end: End, number: usize) -> Option<Seconds> {
        self.ready.get(&end)?.get(number).copied()
    }

    /// Whether of so many ranks each is over or waits, and nobody is left who could end a wait.
    fn is_stuck(&self, ranks: usize) -> bool {
        let mut waiting = self.waiting.values();
        self.waiting.len() + self.over.len() == ranks
            && waiting.all(|(end, number)| {
                self.ready(*end, *number).is_none() && !self.over.contains(&end.rank())
            })
    }
}

/// Ranks that keep time together: a transfer between two of them begins when both are ready for it.
pub struct Clocks {
    /// The ranks, and what wakes each when it waits: only its own thread waits for it. One for all would wake many for nothing.
    ranks: HashMap<usize, Condvar>,
    board: Mutex<Board>,
}

/// A rank's access to [`Clocks`]. When it is dropped, nobody waits for the rank any more.
pub struct Clock {
    clocks: Arc<Clocks>,
    rank: usize,
}

impl Clocks {
    /// Clocks of ranks with these numbers among all.
    pub fn new(ranks: Vec<usize>) -> Arc<Clocks> {
        Arc::new(Clocks {
            ranks: ranks
                .into_iter()
                .map(|rank| (rank, Condvar::new()))
                .collect(),
            board: Mutex::default(),
        })
    }

    /// The clock of one of the ranks.
    ///
    /// # Panics
    /// If it is none of them.
    pub fn of(self: &Arc<Clocks>, rank: usize) -> Clock {
        assert!(self.ranks.contains_key(&rank), "rank {rank} has no clock");
        Clock {
            clocks: self.clone(),
            rank,
        }
    }
}

impl Clock {
    /// Tells that this rank is ready at a time to send to some ranks and to receive from others, waits for those among them that
    /// keep time with it, and returns when all are ready.
    pub(crate) fn meet(&self, sends: &[usize], receives: &[usize], at: Seconds) -> Seconds {
        let sends = sends.iter().map(|to| End {
            from: self.rank,
            to: *to,
            is_sender: true,
        });
        let receives = receives.iter().map(|from| End {
            from: *from,
            to: self.rank,
            is_sender: false,
        });
        let ranks = &self.clocks.ranks;
        let keeps_time = |end: &End| {
            let peer = end.other().rank();
            peer != self.rank && ranks.contains_key(&peer)
        };
        let ends: Vec<End> = sends.chain(receives).filter(keeps_time).collect();
        let mut board = self.board();
        let mut numbers = Vec::with_capacity(ends.len());
        for end in &ends {
            let ready = board.ready.entry(*end).or_default();
            ready.push(at);
            numbers.push(ready.len() - 1);
            ranks[&end.other().rank()].notify_one();
        }
        let mut all_ready = at;
        for (end, number) in ends.iter().zip(numbers) {
            board = self.wait_for(board, end.other(), number);
            let ready = board.ready(end.other(), number);
            all_ready = ready.map_or(all_ready, |ready| all_ready.later(ready));
        }
        all_ready
    }

    /// Waits until an end is ready for a transfer, or its rank's step is over without it.
    fn wait_for<'a>(
        &self,
        board: MutexGuard<'a, Board>,
        end: End,
        number: usize,
    ) -> MutexGuard<'a, Board> {
        let changed = self.clocks.ranks[&self.rank].wait_while(board, |board| {
            let waits = board.ready(end, number).is_none() && !board.over.contains(&end.rank());
            if waits {
                board.waiting.insert(self.rank, (end, number));
                let is_stuck = board.is_stuck(self.clocks.ranks.len());
                assert!(!is_stuck, "ranks wait for each other: {:?}", board.waiting);
            }
            waits
        });
        let mut board = changed.unwrap_or_else(PoisonError::into_inner);
        board.waiting.remove(&self.rank);
        board
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        let board = self.clocks.board.lock();
        // A thread that panicked leaves whole entries.
        board.unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        let mut board = self.board();
        board.waiting.remove(&self.rank);
        board.over.insert(self.rank);
        drop(board);
        self.clocks.ranks.values().for_each(Condvar::notify_one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Seconds {
        Seconds {
            with_copies: seconds,
            without_copies: seconds / 2.0,
        }
    }

    #[test]
    fn a_transfer_begins_when_both_ends_are_ready() {
        let clocks = Clocks::new(vec![0, 4]);
        let (first, second) = (clocks.of(0), clocks.of(4));
        let times = std::thread::scope(|scope| {
            let there = scope.spawn(move || {
                let early = second.meet(&[], &[0], at(1.0));
                (early, second.meet(&[0], &[], at(9.0)))
            });
            // Rank 7 keeps no time here.
            let late = first.meet(&[4, 7], &[], at(5.0));
            let [to, from] = [late, first.meet(&[], &[4], at(6.0))];
            (to, from, there.join().unwrap())
        });
        assert_eq!(times, (at(5.0), at(9.0), (at(5.0), at(9.0))));
    }

    /// A rank that waits for one is not kept by what another tells it, and each end wakes whoever waits for it.
    #[test]
    fn a_rank_is_woken_by_the_one_that_it_waits_for() {
        let clocks = Clocks::new(vec![0, 1, 2]);
        let [first, second, third] = [0, 1, 2].map(|rank| clocks.of(rank));
        let times = std::thread::scope(|scope| {
            let waits = scope.spawn(move || {
                let for_last = first.meet(&[], &[2], at(1.0));
                let before = first.meet(&[], &[1], for_last);
                [for_last, before]
            });
            let tells = scope.spawn(move || {
                second.meet(&[], &[2], at(2.0));
                second.meet(&[0], &[], at(3.0))
            });
            let last = third.meet(&[0, 1], &[], at(7.0));
            drop(third);
            (waits.join().unwrap(), tells.join().unwrap(), last)
        });
        assert_eq!(times, ([at(7.0); 2], at(7.0), at(7.0)));
    }

    #[test]
    fn nobody_waits_for_a_rank_whose_step_is_over() {
        let clocks = Clocks::new(vec![0, 1]);
        let first = clocks.of(0);
        drop(clocks.of(1));
        assert_eq!(first.meet(&[1], &[1], at(3.0)), at(3.0));
    }

    #[test]
    fn ranks_that_would_wait_for_ever_are_noticed() {
        let clocks = Clocks::new(vec![0, 1]);
        let waits = |own: usize| {
            let clock = clocks.of(own);
            // The other sends nothing.
            std::thread::spawn(move || clock.meet(&[], &[1 - own], at(1.0)))
        };
        let ended = [waits(0), waits(1)].map(|thread| thread.join());
        // The one that is last to wait notices; the other may go on.
        assert!(ended.iter().any(Result::is_err));
    }
}
