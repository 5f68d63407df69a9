//! Checks and copies that every engine makes before it moves a byte; public for the tests' engine.

use crate::{GroupError, Incoming, Outgoing, Result};

/// Refuses lists that name ranks that do not exist.
pub fn check(size: usize, sends: &[Outgoing], receives: &[Incoming]) -> Result {
    let named = sends.iter().map(|piece| piece.to);
    let beyond = named.chain(receives.iter().map(|piece| piece.from)).max();
    match beyond {
        Some(rank) if rank >= size => Err(GroupError::Failed(format!(
            "an exchange names rank {rank}, where there are {size}"
        ))),
        _ => Ok(()),
    }
}

/// Copies what a rank sends to itself, the n-th sent piece into the n-th received.
///
/// # Safety
/// As for [`crate::Group::exchange`].
pub unsafe fn copy_own(rank: usize, sends: &[Outgoing], receives: &[Incoming]) -> Result {
    let mut comes = receives.iter().filter(|piece| piece.from == rank);
    for goes in sends.iter().filter(|piece| piece.to == rank) {
        let comes = comes.next();
        fits(rank, rank, goes.bytes, comes.map(|piece| piece.bytes))?;
        let to = comes.expect("it has as many bytes").pointer;
        // SAFETY: the caller's promise: both are alive and of that length. A piece may be left where it is.
        unsafe { std::ptr::copy(goes.pointer, to, goes.bytes) };
    }
    match comes.next() {
        None => Ok(()),
        Some(piece) => Err(GroupError::Failed(format!(
            "rank {rank} expects {} bytes from itself that it does not send",
            piece.bytes
        ))),
    }
}

/// Refuses a piece if its two ends disagree on its length.
pub fn fits(from: usize, to: usize, sent: usize, expected: Option<usize>) -> Result {
    let expected = match expected {
        Some(expected) if expected == sent => return Ok(()),
        Some(expected) => format!("{expected} are expected"),
        None => "none are expected".into(),
    };
    Err(GroupError::Failed(format!(
        "rank {from} sends rank {to} {sent} bytes where {expected}: the ranks do not do the same"
    )))
}

/// Bytes that go to other ranks.
pub fn sent_to_others(rank: usize, sends: &[Outgoing]) -> u64 {
    let others = sends.iter().filter(|piece| piece.to != rank);
    others.map(|piece| piece.bytes as u64).sum()
}

/// The bytes of all ranks, in two transfers: first how many, then the bytes. `transfer` gets no pieces of a rank to
/// itself.
pub(crate) fn share(
    rank: usize,
    size: usize,
    bytes: &[u8],
    mut transfer: impl FnMut(&[Outgoing], &[Incoming]) -> Result,
) -> Result<Vec<Vec<u8>>> {
    let others = || (0..size).filter(move |other| *other != rank);
    let to_all = |bytes: &[u8]| -> Vec<Outgoing> {
        let (pointer, bytes) = (bytes.as_ptr(), bytes.len());
        others().map(|to| Outgoing { to, pointer, bytes }).collect()
    };
    let mut all = vec![(bytes.len() as u64).to_le_bytes().to_vec(); size];
    for round in 0..2 {
        let own = all[rank].clone();
        let receives: Vec<Incoming> = others()
            .map(|from| Incoming {
                from,
                pointer: all[from].as_mut_ptr(),
                bytes: all[from].len(),
            })
            .collect();
        transfer(&to_all(&own), &receives)?;
        if round == 0 {
            for length in &mut all {
                let count: [u8; 8] = length[..].try_into().expect("a length has eight bytes");
                *length = vec![0; u64::from_le_bytes(count) as usize];
            }
            all[rank] = bytes.to_vec();
        }
    }
    Ok(all)
}
