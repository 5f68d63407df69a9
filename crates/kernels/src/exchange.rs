//! Exchanges of memory with other ranks.

use crate::{Fault, KernelError, Result};
use collectives::{Group, GroupError, Incoming, Outgoing};
use memory::{In, Out};

/// Pieces that go to ranks and come from them. Each is contiguous, of any type. Pieces between two ranks arrive in the
/// order of their lists, each in a piece of the same size. What a rank sends to itself is copied.
pub struct Exchange<'a> {
    /// The rank that each piece goes to.
    pub sends: Vec<(usize, In<'a>)>,
    /// The rank that each piece comes from.
    pub receives: Vec<(usize, Out<'a>)>,
}

/// Bytes of an exchange, without those that a rank sends to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExchangeBytes {
    /// Those that go to other ranks.
    pub sent: u64,
    /// Those that come from other ranks.
    pub received: u64,
    /// Set if only a group of so many neighbouring ranks takes part. Only times on paper go by it.
    pub neighbours: Option<usize>,
}

impl ExchangeBytes {
    /// An exchange in which any ranks may take part.
    pub fn new(sent: u64, received: u64) -> ExchangeBytes {
        ExchangeBytes {
            sent,
            received,
            neighbours: None,
        }
    }

    /// An exchange that sends as many bytes as it receives.
    pub fn both_ways(bytes: usize) -> ExchangeBytes {
        ExchangeBytes::new(bytes as u64, bytes as u64)
    }

    /// The same within groups of so many neighbours.
    pub fn among(self, neighbours: usize) -> ExchangeBytes {
        ExchangeBytes {
            neighbours: Some(neighbours),
            ..self
        }
    }
}

const EXCHANGE: &str = "exchange";

impl<'a> Exchange<'a> {
    /// Bytes sent to and received from other ranks.
    pub fn bytes(&self, rank: usize) -> ExchangeBytes {
        let sends = self.sends.iter().filter(|(to, _)| *to != rank);
        let receives = self.receives.iter().filter(|(from, _)| *from != rank);
        ExchangeBytes::new(
            sends.map(|(_, x)| x.bytes() as u64).sum(),
            receives.map(|(_, out)| out.bytes() as u64).sum(),
        )
    }

    /// The same exchange with ranks that are counted from `first` on.
    pub(crate) fn counted_from(self, first: usize) -> Self {
        let sends = self.sends.into_iter();
        let receives = self.receives.into_iter();
        Exchange {
            sends: sends.map(|(to, x)| (first + to, x)).collect(),
            receives: receives.map(|(from, out)| (first + from, out)).collect(),
        }
    }

    /// The same exchange without its lifetime.
    ///
    /// # Safety
    /// As for [`Out::outliving`].
    pub unsafe fn outliving(self) -> Exchange<'static> {
        // SAFETY: the caller's promise.
        let sends = self
            .sends
            .into_iter()
            .map(|(to, x)| (to, unsafe { x.outliving() }));
        let receives = self.receives.into_iter();
        // SAFETY: as above.
        let receives = receives.map(|(from, out)| (from, unsafe { out.outliving() }));
        Exchange {
            sends: sends.collect(),
            receives: receives.collect(),
        }
    }

    /// Refuses strided pieces, and pieces that this rank sends to itself but does not receive in the same sizes.
    pub(crate) fn check(&self, rank: usize) -> Result {
        let contiguous = self.sends.iter().all(|(_, x)| x.is_contiguous())
            && self.receives.iter().all(|(_, out)| out.is_contiguous());
        KernelError::unless(contiguous, EXCHANGE, || {
            "a piece is strided, expected contiguous".into()
        })?;
        let [own_sends, own_receives] = [self.own_sends(rank), self.own_receives(rank)];
        KernelError::unless(own_sends == own_receives, EXCHANGE, || {
            format!(
                "rank {rank} sends itself pieces of {own_sends:?} bytes and receives {own_receives:?}"
            )
        })
    }

    /// Refuses pieces whose bytes differ from those announced.
    pub(crate) fn check_bytes(&self, rank: usize, said: ExchangeBytes) -> Result {
        let listed = self.bytes(rank);
        let is_said = (listed.sent, listed.received) == (said.sent, said.received);
        KernelError::unless(is_said, EXCHANGE, || {
            format!("the pieces of rank {rank} have {listed:?}, expected {said:?}")
        })
    }

    fn own_sends(&self, rank: usize) -> Vec<usize> {
        let own = self.sends.iter().filter(|(to, _)| *to == rank);
        own.map(|(_, x)| x.bytes()).collect()
    }

    fn own_receives(&self, rank: usize) -> Vec<usize> {
        let own = self.receives.iter().filter(|(from, _)| *from == rank);
        own.map(|(_, out)| out.bytes()).collect()
    }

    /// Runs the exchange in this thread.
    ///
    /// # Safety
    /// The processor can reach the memory, and the promises of [`crate::Kernels::start_exchange`] hold.
    ///
    /// # Errors
    /// [`KernelError`] if there is no group or no such rank, or the exchange fails.
    pub unsafe fn carry_out(self, group: Option<&dyn Group>) -> Result {
        let group = group.ok_or_else(without_group)?;
        let (sends, receives) = self.pieces(group)?;
        // SAFETY: the caller's promise.
        unsafe { group.exchange(&sends, &receives) }.map_err(group_failed)
    }

    /// The pieces in the form that a group needs.
    ///
    /// # Errors
    /// [`KernelError`] if a piece is for a rank that the group does not have.
    pub(crate) fn pieces(&self, group: &dyn Group) -> Result<(Vec<Outgoing>, Vec<Incoming>)> {
        let ranks = self.sends.iter().map(|(to, _)| to);
        let ranks = ranks.chain(self.receives.iter().map(|(from, _)| from));
        let (last, size) = (ranks.max(), group.size());
        KernelError::unless(last.is_none_or(|last| *last < size), EXCHANGE, || {
            format!("there is no rank {}, there are {size}", last.unwrap_or(&0))
        })?;
        let sends = self.sends.iter().map(|(to, x)| Outgoing {
            to: *to,
            pointer: x.pointer(),
            bytes: x.bytes(),
        });
        let receives = self.receives.iter().map(|(from, out)| Incoming {
            from: *from,
            pointer: out.pointer(),
            bytes: out.bytes(),
        });
        Ok((sends.collect(), receives.collect()))
    }
}

/// The error of an exchange on a device without a group.
pub(crate) fn without_group() -> KernelError {
    KernelError::misfit(EXCHANGE, "the device was made without a group of ranks")
}

/// A failure of a group.
pub(crate) fn group_failed(error: GroupError) -> KernelError {
    KernelError {
        fault: Fault::Collective,
        ..KernelError::device(EXCHANGE, error.to_string())
    }
}
