//! Rules that every engine must keep, as one rank tests them. All ranks of a group do the same.

use collectives::{Group, Incoming, Outgoing};

/// Bytes of each rank in the gathering in place; no other exchange has as many.
pub const IN_PLACE: usize = 54_321;

/// Tries everything.
pub fn all(group: &dyn Group) {
    uneven_pieces(group);
    order_between_two_ranks(group);
    nothing_at_all(group);
    gatherings(group);
    shares_that_are_not_counted(group);
    shares_beside_exchanges(group);
}

/// A byte that says where it comes from, where it goes, and its place.
fn byte(from: usize, to: usize, piece: usize, index: usize) -> u8 {
    (from * 131 + to * 71 + piece * 31 + index * 7 + index / 251) as u8
}

/// How many bytes the n-th piece between two ranks has: none, few, odd, more than libraries send at once.
fn length(from: usize, to: usize, piece: usize) -> usize {
    [3, 0, 100_003, 1, 4096, 3_000_001][(from * 5 + to * 3 + piece) % 6]
}

/// Exchanges `pieces(from, to)` pieces between any two ranks, receives them in another order of ranks than they are
/// sent in, and checks every byte.
fn exchange(group: &dyn Group, pieces: impl Fn(usize, usize) -> usize) {
    let (rank, size) = (group.rank(), group.size());
    let list = |between: &dyn Fn(usize) -> (usize, usize)| -> Vec<(usize, usize)> {
        (0..size)
            .flat_map(|other| {
                let (from, to) = between(other);
                (0..pieces(from, to)).map(move |piece| (other, piece))
            })
            .collect()
    };
    let outgoing = list(&|to| (rank, to));
    let mut incoming = list(&|from| (from, rank));
    // Stable: pieces of one rank keep their order, the ranks do not.
    incoming.sort_by_key(|(from, _)| std::cmp::Reverse(*from));

    let sent: Vec<Vec<u8>> = outgoing
        .iter()
        .map(|&(to, piece)| {
            let bytes = 0..length(rank, to, piece);
            bytes.map(|index| byte(rank, to, piece, index)).collect()
        })
        .collect();
    let mut received: Vec<Vec<u8>> = incoming
        .iter()
        .map(|&(from, piece)| vec![0xEE; length(from, rank, piece)])
        .collect();
    let sends: Vec<Outgoing> = outgoing
        .iter()
        .zip(&sent)
        .map(|(&(to, _), bytes)| goes(to, bytes))
        .collect();
    let receives: Vec<Incoming> = incoming
        .iter()
        .zip(&mut received)
        .map(|(&(from, _), bytes)| comes(from, bytes))
        .collect();

    let before = group.sent_bytes();
    // SAFETY: the vectors live on, untouched.
    unsafe { group.exchange(&sends, &receives) }.unwrap();
    for (&(from, piece), bytes) in incoming.iter().zip(&received) {
        let expected = (0..bytes.len()).map(|index| byte(from, rank, piece, index));
        assert!(
            bytes.iter().copied().eq(expected),
            "piece {piece} from rank {from} to rank {rank}"
        );
    }
    let formula: usize = (0..size)
        .filter(|to| *to != rank)
        .flat_map(|to| (0..pieces(rank, to)).map(move |piece| length(rank, to, piece)))
        .sum();
    assert_eq!(
        group.sent_bytes() - before,
        formula as u64,
        "bytes to other ranks"
    );
}

pub fn goes(to: usize, bytes: &[u8]) -> Outgoing {
    Outgoing {
        to,
        pointer: bytes.as_ptr(),
        bytes: bytes.len(),
    }
}

pub fn comes(from: usize, bytes: &mut [u8]) -> Incoming {
    Incoming {
        from,
        pointer: bytes.as_mut_ptr(),
        bytes: bytes.len(),
    }
}

fn uneven_pieces(group: &dyn Group) {
    for round in 0..4 {
        exchange(group, |from, to| (from * 3 + to * 5 + round) % 4);
    }
}

/// Pieces of one length, so that nothing but their order tells them apart.
fn order_between_two_ranks(group: &dyn Group) {
    let (rank, size) = (group.rank(), group.size());
    let count = 5;
    let sent: Vec<[u8; 2]> = (0..count).map(|piece| [rank as u8, piece]).collect();
    let mut received = vec![[0xEE_u8; 2]; size * sent.len()];
    let sends: Vec<Outgoing> = sent
        .iter()
        .flat_map(|piece| (0..size).map(move |to| goes(to, piece)))
        .collect();
    let receives: Vec<Incoming> = received
        .iter_mut()
        .enumerate()
        .map(|(index, piece)| comes(index / sent.len(), piece))
        .collect();
    // SAFETY: the vectors live on, untouched.
    unsafe { group.exchange(&sends, &receives) }.unwrap();
    let expected = (0..size as u8).flat_map(|from| (0..count).map(move |piece| [from, piece]));
    assert!(received.iter().copied().eq(expected), "{received:?}");
}

fn nothing_at_all(group: &dyn Group) {
    // SAFETY: there are no pieces.
    unsafe { group.exchange(&[], &[]) }.unwrap();
}

/// Every rank sends the same bytes to all. They arrive side by side, which engines may do in one call, and in another
/// order.
fn gatherings(group: &dyn Group) {
    let (rank, size) = (group.rank(), group.size());
    for (bytes, is_reversed) in [(1, false), (4096, true), (1_000_000, false)] {
        let own: Vec<u8> = (0..bytes).map(|index| byte(rank, 0, 0, index)).collect();
        let mut all = vec![0xEE; bytes * size];
        let place = |at: usize| if is_reversed { size - 1 - at } else { at };
        let sends: Vec<Outgoing> = (0..size).map(|to| goes(to, &own)).collect();
        let pieces = all.chunks_mut(bytes).enumerate();
        let receives: Vec<Incoming> = pieces.map(|(at, piece)| comes(place(at), piece)).collect();
        let before = group.sent_bytes();
        // SAFETY: the vectors live on, untouched.
        unsafe { group.exchange(&sends, &receives) }.unwrap();
        let expected = (0..size * bytes).map(|at| byte(place(at / bytes), 0, 0, at % bytes));
        assert!(
            all.iter().copied().eq(expected),
            "a gathering of {bytes} bytes"
        );
        assert_eq!(group.sent_bytes() - before, ((size - 1) * bytes) as u64);
    }
    gathering_in_place(group);
}

/// As above, but each rank's own bytes are already in their place, and in no list.
fn gathering_in_place(group: &dyn Group) {
    let (rank, size, bytes) = (group.rank(), group.size(), IN_PLACE);
    let of = |rank: usize| (0..bytes).map(move |index| byte(rank, 1, 0, index));
    let mut all = vec![0xEE; bytes * size];
    all.chunks_mut(bytes)
        .nth(rank)
        .unwrap()
        .copy_from_slice(&of(rank).collect::<Vec<_>>());
    let pieces: Vec<&mut [u8]> = all.chunks_mut(bytes).collect();
    let others = || (0..size).filter(move |other| *other != rank);
    let sends: Vec<Outgoing> = others().map(|to| goes(to, pieces[rank])).collect();
    let receives = pieces
        .into_iter()
        .enumerate()
        .filter(|(from, _)| *from != rank);
    let receives: Vec<Incoming> = receives.map(|(from, piece)| comes(from, piece)).collect();
    let before = group.sent_bytes();
    // SAFETY: the vector lives on, untouched.
    unsafe { group.exchange(&sends, &receives) }.unwrap();
    assert!(
        all.iter().copied().eq((0..size).flat_map(of)),
        "a gathering in place"
    );
    assert_eq!(group.sent_bytes() - before, ((size - 1) * bytes) as u64);
}

fn shares_that_are_not_counted(group: &dyn Group) {
    let before = group.sent_bytes();
    shares(group);
    assert_eq!(group.sent_bytes(), before);
}

fn shares(group: &dyn Group) {
    for round in 0..20 {
        let bytes = |rank: usize| vec![(rank + round) as u8; (rank * 1000 + round) % 2777];
        let all = group.share(&bytes(group.rank())).unwrap();
        let expected: Vec<Vec<u8>> = (0..group.size()).map(bytes).collect();
        assert_eq!(all, expected);
    }
}

fn shares_beside_exchanges(group: &dyn Group) {
    std::thread::scope(|scope| {
        scope.spawn(|| shares(group));
        for _ in 0..10 {
            exchange(group, |from, to| (from + to) % 3);
        }
    });
}
