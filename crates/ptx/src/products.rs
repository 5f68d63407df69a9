//! A warp's products that are under way, and the registers that these use until they are waited for.

use crate::error::{MistakeKind, Wrong, refuse};
use crate::registers::{File, Numbered};

/// What a product uses.
struct Product {
    /// The registers that it adds to, and those of its left factor.
    sums: Box<[Numbered]>,
    left: Box<[Numbered]>,
    /// The number of its group.
    group: u32,
}

/// A register, as products see it.
#[derive(Clone, Copy, Default)]
struct Use {
    /// A product under way adds to it, or reads it.
    is_sum: bool,
    is_left: bool,
    /// No fence came since another instruction read or wrote it.
    is_touched: bool,
}

/// A warp's products under way.
pub(crate) struct WarpProducts {
    under_way: Vec<Product>,
    /// How many groups are committed.
    groups: u32,
    /// By word.
    uses: Vec<Use>,
}

fn words(registers: &[Numbered]) -> impl Iterator<Item = usize> + '_ {
    let words = registers
        .iter()
        .filter(|register| register.file == File::Words);
    words.map(|register| register.index)
}

impl WarpProducts {
    /// Before a warp's first instruction.
    pub(crate) fn new(words: usize) -> WarpProducts {
        let untouched = Use::default();
        WarpProducts {
            under_way: Vec::new(),
            groups: 0,
            uses: vec![
                Use {
                    is_touched: true,
                    ..untouched
                };
                words
            ],
        }
    }

    /// Another instruction than a product reads and writes registers.
    pub(crate) fn touch(&mut self, read: &[Numbered], written: &[Numbered]) -> Result<(), Wrong> {
        for index in words(read) {
            if self.uses[index].is_sum {
                return refuse(
                    MistakeKind::UnderWay,
                    "reads a sum of a product that was not waited for",
                );
            }
            self.uses[index].is_touched = true;
        }
        for index in words(written) {
            let Use {
                is_sum, is_left, ..
            } = self.uses[index];
            if is_sum || is_left {
                return refuse(
                    MistakeKind::UnderWay,
                    "writes a register of a product that was not waited for",
                );
            }
            self.uses[index].is_touched = true;
        }
        Ok(())
    }

    /// Orders what other instructions did to registers before the products that follow.
    pub(crate) fn fence(&mut self) {
        self.uses.iter_mut().for_each(|one| one.is_touched = false);
    }

    /// Errors unless a product may begin that adds to some registers and reads others.
    pub(crate) fn check(&self, sums: &[Numbered], left: &[Numbered]) -> Result<(), Wrong> {
        // Products of one shape add to the same sums one after the other.
        let others = self.under_way.iter().filter(|other| *other.sums != *sums);
        let others: Vec<&Product> = others.collect();
        let is_used = |register: &Numbered| {
            self.uses[register.index].is_left
                || others.iter().any(|other| other.sums.contains(register))
        };
        if sums.iter().any(is_used) {
            return refuse(
                MistakeKind::UnderWay,
                "adds to a register of another product that was not waited for",
            );
        }
        if words(left).any(|index| self.uses[index].is_sum) {
            return refuse(
                MistakeKind::UnderWay,
                "multiplies a sum of a product that was not waited for",
            );
        }
        match words(sums)
            .chain(words(left))
            .any(|index| self.uses[index].is_touched)
        {
            true => refuse(
                MistakeKind::Unfenced,
                "a product of registers that were read or written since the last wgmma.fence",
            ),
            false => Ok(()),
        }
    }

    /// When a product is asked for: its group is the next to be committed.
    pub(crate) fn time(&self) -> u32 {
        self.groups
    }

    pub(crate) fn begin(&mut self, sums: &[Numbered], left: &[Numbered]) {
        words(sums).for_each(|index| self.uses[index].is_sum = true);
        words(left).for_each(|index| self.uses[index].is_left = true);
        self.under_way.push(Product {
            sums: sums.into(),
            left: left.into(),
            group: self.groups,
        });
    }

    /// Closes a group.
    pub(crate) fn commit(&mut self) {
        self.groups += 1;
    }

    /// Errors if lanes end before their products.
    pub(crate) fn check_end(&self) -> Result<(), Wrong> {
        match self.under_way.len() {
            0 => Ok(()),
            count => {
                let message = format!("ended with {count} products that were not waited for");
                Err(Wrong::new(MistakeKind::Unfinished, message))
            }
        }
    }

    /// Waits for all committed groups except the `newest`. Gives the time before which products are over.
    pub(crate) fn wait(&mut self, newest: u32) -> u32 {
        let over = self.groups.saturating_sub(newest);
        let due: Vec<Product> = self
            .under_way
            .extract_if(.., |product| product.group < over)
            .collect();
        for product in &due {
            words(&product.sums).for_each(|index| self.uses[index].is_sum = false);
            words(&product.left).for_each(|index| self.uses[index].is_left = false);
        }
        for product in &self.under_way {
            words(&product.sums).for_each(|index| self.uses[index].is_sum = true);
            words(&product.left).for_each(|index| self.uses[index].is_left = true);
        }
        over
    }
}
