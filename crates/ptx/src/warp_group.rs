//! Groups of four warps, whose instructions all four execute alike: each runs by itself, and its steps are compared.

use crate::error::{MistakeKind, Wrong};

/// Warps of a group.
pub(crate) const WARPS: usize = 4;

/// Registers of a multiprocessor, and the unit in which threads get them.
const REGISTERS: u32 = 65_536;
pub(crate) const UNIT: u32 = 8;

/// An instruction of a group, and the operands in which its warps agree.
type Step = (usize, [u64; 3]);

#[derive(Default)]
struct WarpGroup {
    steps: Vec<Step>,
    /// How many of these each warp has made.
    made: [usize; WARPS],
    /// Registers of a thread, if it asked for others than it was launched with.
    registers: Option<u32>,
}

/// The groups of a block.
pub(crate) struct WarpGroups {
    groups: Vec<WarpGroup>,
    warps: usize,
    /// Registers that a thread is launched with.
    launched: u32,
    /// The last warp that asked for other registers, and where.
    asked: (usize, usize),
}

fn refuse<T>(message: String) -> Result<T, Wrong> {
    Err(Wrong::new(MistakeKind::Group, message))
}

impl WarpGroups {
    /// For blocks of so many warps, of which so many fit on a multiprocessor.
    pub(crate) fn new(warps: usize, blocks: u32) -> WarpGroups {
        let threads = blocks.max(1) * 32 * warps as u32;
        WarpGroups {
            groups: (0..warps.div_ceil(WARPS))
                .map(|_| WarpGroup::default())
                .collect(),
            warps,
            launched: (REGISTERS / threads / UNIT * UNIT).min(256),
            asked: (0, 0),
        }
    }

    /// A warp executes an instruction of its group. Gives whether it is the first of the four.
    pub(crate) fn step(
        &mut self,
        warp: usize,
        at: usize,
        operands: [u64; 3],
    ) -> Result<bool, Wrong> {
        let first = warp / WARPS * WARPS;
        if first + WARPS > self.warps {
            return refuse(format!(
                "warps {first} to {} are no group of four",
                self.warps - 1
            ));
        }
        let group = &mut self.groups[warp / WARPS];
        let made = &mut group.made[warp % WARPS];
        let is_first = *made == group.steps.len();
        if is_first {
            group.steps.push((at, operands));
        }
        let (other, theirs) = group.steps[*made];
        *made += 1;
        match (other == at, theirs == operands) {
            (true, true) => Ok(is_first),
            (true, false) => refuse(format!(
                "the warps of a group disagree: operands {operands:x?} here, {theirs:x?} in another warp"
            )),
            (false, _) => {
                refuse("another warp of the group came to another instruction here".into())
            }
        }
    }

    /// A warp executes an instruction after which threads of its group have `count` registers: more or fewer than before.
    pub(crate) fn ask(
        &mut self,
        warp: usize,
        at: usize,
        (count, is_more): (u32, bool),
    ) -> Result<(), Wrong> {
        if !self.step(warp, at, [0; 3])? {
            return Ok(());
        }
        self.asked = (warp, at);
        let registers = &mut self.groups[warp / WARPS].registers;
        let before = registers.replace(count).unwrap_or(self.launched);
        let is_wrong = if is_more {
            count < before
        } else {
            count > before
        };
        match is_wrong {
            true => refuse(format!("{count} registers, after {before}")),
            false => Ok(()),
        }
    }

    /// Errors, with a warp and an instruction, if a warp ended without some step of its group, or there are not as many
    /// registers as the groups ask for.
    pub(crate) fn check_end(&self) -> Result<(), (usize, usize, Wrong)> {
        for (index, group) in self.groups.iter().enumerate() {
            let late = group.made.iter().position(|made| *made < group.steps.len());
            if let Some(warp) = late {
                let (at, _) = group.steps[group.made[warp]];
                let message = "not all warps of the group came to this instruction".into();
                let warp = WARPS * index + warp;
                return refuse(message).map_err(|wrong| (warp, at, wrong));
            }
        }
        let registers = self
            .groups
            .iter()
            .map(|group| group.registers.unwrap_or(self.launched));
        let (asked, there) = (
            registers.sum::<u32>(),
            self.launched * self.groups.len() as u32,
        );
        let (warp, at) = self.asked;
        if asked > there {
            let message = format!(
                "the groups of a block ask for {asked} registers of each of their threads, and were launched with {there}"
            );
            return refuse(message).map_err(|wrong| (warp, at, wrong));
        }
        Ok(())
    }
}
