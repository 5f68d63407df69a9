//! Exchanges that are a gathering, for which the library has ways of its own.

use crate::{Incoming, Outgoing};

/// The same bytes from every rank to all, which arrive side by side in the order of ranks.
#[derive(Debug, PartialEq)]
pub(super) struct Gathering {
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
    /// How many each rank sends.
    pub(super) bytes: usize,
}

impl Gathering {
    /// What an exchange is as a gathering, if it is one.
    pub(super) fn of(size: usize, sends: &[Outgoing], receives: &[Incoming]) -> Option<Gathering> {
        let Outgoing {
            pointer: from,
            bytes,
            ..
        } = *sends.first()?;
        let to = receives.iter().find(|piece| piece.from == 0)?.pointer;
        let same = |piece: &Outgoing| (piece.pointer, piece.bytes) == (from, bytes);
        let in_place = |piece: &Incoming| {
            piece.bytes == bytes && piece.pointer == to.wrapping_add(piece.from * bytes)
        };
        let is_one = bytes > 0
            && each_once(size, sends.iter().map(|piece| piece.to))
            && each_once(size, receives.iter().map(|piece| piece.from))
            && sends.iter().all(same)
            && receives.iter().all(in_place);
        is_one.then_some(Gathering { from, to, bytes })
    }
}

fn each_once(size: usize, ranks: impl Iterator<Item = usize>) -> bool {
    let mut ranks: Vec<usize> = ranks.collect();
    ranks.sort_unstable();
    ranks.into_iter().eq(0..size)
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
        assert_eq!(Gathering::of(3, &sends, &receives), Some(expected));
    }

    #[test]
    fn anything_else_is_not() {
        let change = |change: &dyn Fn(&mut Vec<Outgoing>, &mut Vec<Incoming>)| {
            let (mut sends, mut receives) = pieces();
            change(&mut sends, &mut receives);
            Gathering::of(3, &sends, &receives)
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
        assert_eq!(Gathering::of(3, &[], &[]), None, "nothing");
    }
}
