//! Finds exchanges that are a gathering, for which NCCL has a faster function.

use crate::{Incoming, Outgoing};

/// Every rank sends one piece to all, and the pieces arrive side by side in the order of ranks. A rank's own piece may
/// already be in its place, and then in neither list.
#[derive(Debug, PartialEq)]
pub(super) struct Gathering {
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
    /// How many bytes each rank sends.
    pub(super) bytes: usize,
}

impl Gathering {
    /// The exchange as a gathering, if it is one.
    pub(super) fn of(
        [rank, size]: [usize; 2],
        sends: &[Outgoing],
        receives: &[Incoming],
    ) -> Option<Gathering> {
        let (first, came) = (sends.first()?, receives.first()?);
        let (from, bytes) = (first.pointer, first.bytes);
        let to = came.pointer.wrapping_sub(came.from * bytes);
        let place = |of: usize| to.wrapping_add(of * bytes);
        let same = |piece: &Outgoing| (piece.pointer, piece.bytes) == (from, bytes);
        let in_place =
            |piece: &Incoming| piece.bytes == bytes && piece.pointer == place(piece.from);
        let goes_to = in_order(sends.iter().map(|piece| piece.to));
        let others = (0..size).filter(|other| *other != rank);
        let is_whole = goes_to.iter().copied().eq(0..size)
            || (goes_to.iter().copied().eq(others) && from == place(rank).cast_const());
        let is_one = bytes > 0
            && is_whole
            && goes_to == in_order(receives.iter().map(|piece| piece.from))
            && sends.iter().all(same)
            && receives.iter().all(in_place);
        is_one.then_some(Gathering { from, to, bytes })
    }
}

/// Ranks in order, repeated ones included.
fn in_order(ranks: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut ranks: Vec<usize> = ranks.collect();
    ranks.sort_unstable();
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: *const u8 = 0x1000 as *const u8;
    const TO: *mut u8 = 0x2000 as *mut u8;

    fn pieces() -> (Vec<Outgoing>, Vec<Incoming>) {
        let outgoing = |to| Outgoing {
            to,
            pointer: FROM,
            bytes: 8,
        };
        let incoming = |from| Incoming {
            from,
            pointer: TO.wrapping_add(8 * from),
            bytes: 8,
        };
        (
            (0..3).map(outgoing).collect(),
            (0..3).rev().map(incoming).collect(),
        )
    }

    #[test]
    fn the_same_to_all_and_side_by_side_is_a_gathering() {
        let (sends, receives) = pieces();
        let expected = Gathering {
            from: FROM,
            to: TO,
            bytes: 8,
        };
        assert_eq!(Gathering::of([1, 3], &sends, &receives), Some(expected));
    }

    /// A rank's own piece may be left out of the list if it is in place: the call is still one `ncclAllGather`.
    #[test]
    fn a_piece_in_its_place_may_be_left_out() {
        let of = |rank: usize, own: *const u8| {
            let (mut sends, mut receives) = pieces();
            sends.retain(|piece| piece.to != rank);
            receives.retain(|piece| piece.from != rank);
            sends.iter_mut().for_each(|piece| piece.pointer = own);
            Gathering::of([rank, 3], &sends, &receives)
        };
        for rank in 0..3 {
            let from = TO.wrapping_add(8 * rank).cast_const();
            let (to, bytes) = (TO, 8);
            assert_eq!(of(rank, from), Some(Gathering { from, to, bytes }));
            assert_eq!(of(rank, FROM), None, "the own piece is elsewhere");
        }
    }

    #[test]
    fn anything_else_is_not() {
        let change = |change: &dyn Fn(&mut Vec<Outgoing>, &mut Vec<Incoming>)| {
            let (mut sends, mut receives) = pieces();
            change(&mut sends, &mut receives);
            Gathering::of([1, 3], &sends, &receives)
        };
        assert_eq!(
            change(&|sends, _| sends[1].pointer = TO),
            None,
            "other bytes to one"
        );
        assert_eq!(
            change(&|sends, _| sends[1].bytes = 7),
            None,
            "fewer bytes to one"
        );
        assert_eq!(change(&|sends, _| sends.truncate(2)), None, "one gets none");
        assert_eq!(change(&|sends, _| sends[1].to = 0), None, "one gets two");
        assert_eq!(
            change(&|_, receives| receives.swap(0, 1)),
            change(&|_, _| ()),
            "any order"
        );
        assert_eq!(
            change(&|_, receives| receives[0].pointer = FROM.cast_mut()),
            None,
            "elsewhere"
        );
        assert_eq!(
            change(&|_, receives| receives[1].bytes = 4),
            None,
            "fewer bytes from one"
        );
        assert_eq!(Gathering::of([1, 3], &[], &[]), None, "nothing");
    }
}
