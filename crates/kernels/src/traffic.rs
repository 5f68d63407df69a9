//! Bytes that cross between disk, host, device and other ranks. [`crate::Kernels`] counts them where it starts a copy or an
//! exchange, to the account that its caller has named.

use crate::Queue;
use std::cell::Cell;
use std::rc::Rc;

/// Bytes that crossed between disk, host, device and other ranks since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes from the host to the device.
    pub h2d_bytes: u64,
    /// Bytes from the device to the host.
    pub d2h_bytes: u64,
    /// Bytes from this rank to others.
    pub sent_bytes: u64,
    /// Bytes from files to the host.
    pub disk_read_bytes: u64,
    /// Bytes from the host to files.
    pub disk_written_bytes: u64,
}

impl Traffic {
    /// The bytes that crossed since an earlier count.
    pub fn since(self, earlier: Traffic) -> Traffic {
        self.with(earlier, |now, earlier| now - earlier)
    }

    /// The bytes of this many equal parts.
    pub fn times(self, parts: usize) -> Traffic {
        self.with(self, |bytes, _| bytes * parts as u64)
    }

    /// The sum of both counts.
    pub fn plus(self, other: Traffic) -> Traffic {
        self.with(other, |bytes, more| bytes + more)
    }

    /// This many bytes in a queue of copies.
    ///
    /// # Panics
    /// If the queue copies nothing.
    pub fn of(queue: Queue, bytes: u64) -> Traffic {
        let mut traffic = Traffic::default();
        match queue {
            Queue::Upload => traffic.h2d_bytes = bytes,
            Queue::Download => traffic.d2h_bytes = bytes,
            Queue::Collective => traffic.sent_bytes = bytes,
            Queue::DiskRead => traffic.disk_read_bytes = bytes,
            Queue::DiskWrite => traffic.disk_written_bytes = bytes,
            Queue::Compute | Queue::Update => unreachable!("nothing is copied there"),
        }
        traffic
    }

    fn with(self, other: Traffic, count: impl Fn(u64, u64) -> u64) -> Traffic {
        Traffic {
            h2d_bytes: count(self.h2d_bytes, other.h2d_bytes),
            d2h_bytes: count(self.d2h_bytes, other.d2h_bytes),
            sent_bytes: count(self.sent_bytes, other.sent_bytes),
            disk_read_bytes: count(self.disk_read_bytes, other.disk_read_bytes),
            disk_written_bytes: count(self.disk_written_bytes, other.disk_written_bytes),
        }
    }
}

/// The purpose of a transfer, under which its bytes are counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Account {
    /// Units of weights: they are fetched for their use, and sent back after an update.
    Weights,
    /// Units of gradients between micro-batches, and sums over ranks.
    Gradients,
    /// The rest of an update: states, and gradients that are fetched for it.
    Update,
    /// Everything else: tokens, and offloaded activations.
    #[default]
    Passes,
}

/// Bytes that crossed, by account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTraffic {
    /// [`Account::Weights`].
    pub weights: Traffic,
    /// [`Account::Gradients`].
    pub gradients: Traffic,
    /// [`Account::Update`].
    pub update: Traffic,
    /// [`Account::Passes`].
    pub passes: Traffic,
}

impl StepTraffic {
    /// The sum of all accounts.
    pub fn total(&self) -> Traffic {
        self.weights
            .plus(self.gradients)
            .plus(self.update)
            .plus(self.passes)
    }

    /// The sum of both, account by account.
    pub fn plus(self, other: StepTraffic) -> StepTraffic {
        self.with(other, Traffic::plus)
    }

    /// The bytes that were counted after `earlier`.
    pub fn since(self, earlier: StepTraffic) -> StepTraffic {
        self.with(earlier, Traffic::since)
    }

    /// This traffic, `count` times.
    pub fn times(self, count: usize) -> StepTraffic {
        self.with(self, |one, _| one.times(count))
    }

    fn with(
        self,
        other: StepTraffic,
        combine: impl Fn(Traffic, Traffic) -> Traffic,
    ) -> StepTraffic {
        StepTraffic {
            weights: combine(self.weights, other.weights),
            gradients: combine(self.gradients, other.gradients),
            update: combine(self.update, other.update),
            passes: combine(self.passes, other.passes),
        }
    }

    fn of(&mut self, account: Account) -> &mut Traffic {
        match account {
            Account::Weights => &mut self.weights,
            Account::Gradients => &mut self.gradients,
            Account::Update => &mut self.update,
            Account::Passes => &mut self.passes,
        }
    }
}

/// The counts of a device. An update that a step leaves to the next one belongs to the step before: it is counted apart.
#[derive(Default)]
pub(crate) struct Counts {
    step: Cell<StepTraffic>,
    step_before: Cell<StepTraffic>,
    account: Cell<Account>,
    is_of_step_before: Cell<bool>,
}

impl Counts {
    pub(crate) fn add(&self, queue: Queue, bytes: u64) {
        let counts = match self.is_of_step_before.get() {
            true => &self.step_before,
            false => &self.step,
        };
        let mut all = counts.get();
        let own = all.of(self.account.get());
        *own = own.plus(Traffic::of(queue, bytes));
        counts.set(all);
    }

    pub(crate) fn step(&self) -> StepTraffic {
        self.step.get()
    }

    pub(crate) fn step_before(&self) -> StepTraffic {
        self.step_before.get()
    }

    pub(crate) fn count_to(self: &Rc<Counts>, account: Account) -> AccountScope {
        AccountScope {
            account: self.account.replace(account),
            is_of_step_before: self.is_of_step_before.get(),
            counts: self.clone(),
        }
    }

    pub(crate) fn count_to_step_before(self: &Rc<Counts>, account: Account) -> AccountScope {
        let scope = self.count_to(account);
        self.is_of_step_before.set(true);
        scope
    }
}

/// Counts bytes to an account until it is dropped, then to the one before.
#[must_use = "bytes are counted to the account while this lives"]
pub struct AccountScope {
    counts: Rc<Counts>,
    account: Account,
    is_of_step_before: bool,
}

impl Drop for AccountScope {
    fn drop(&mut self) {
        self.counts.account.set(self.account);
        self.counts.is_of_step_before.set(self.is_of_step_before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_count_until_they_end_and_keep_whose_step_it_is() {
        let counts: Rc<Counts> = Rc::default();
        let add = |bytes| counts.add(Queue::Upload, bytes);
        add(1);
        {
            let _update = counts.count_to_step_before(Account::Update);
            add(2);
            {
                let _weights = counts.count_to(Account::Weights);
                add(4);
            }
            add(8);
        }
        add(16);
        let uploaded = |bytes| Traffic::of(Queue::Upload, bytes);
        let own = StepTraffic {
            passes: uploaded(1 + 16),
            ..StepTraffic::default()
        };
        let of_step_before = StepTraffic {
            update: uploaded(2 + 8),
            weights: uploaded(4),
            ..StepTraffic::default()
        };
        assert_eq!((counts.step(), counts.step_before()), (own, of_step_before));
    }
}
