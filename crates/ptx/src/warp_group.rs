//! Groups of four warps, whose instructions all four execute alike: each runs by itself, and its steps are compared.

use crate::error::{MistakeKind, Wrong, refuse};

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
}

/// The groups of a block.
pub(crate) struct WarpGroups {
    groups: Vec<WarpGroup>,
    /// By warp, the registers of each of its threads.
    registers: Vec<u32>,
    /// Those that warps have given back, for one thread of each.
    free: u32,
}

impl WarpGroups {
    /// For blocks of so many warps, whose kernel is compiled for so many threads of a multiprocessor.
    pub(crate) fn new(warps: usize, threads: u32) -> WarpGroups {
        let groups = warps.div_ceil(WARPS);
        let launched = (REGISTERS / threads / UNIT * UNIT).min(256);
        WarpGroups {
            groups: (0..groups).map(|_| WarpGroup::default()).collect(),
            registers: vec![launched; warps],
            free: 0,
        }
    }

    /// Warps of the block.
    pub(crate) fn warps(&self) -> usize {
        self.registers.len()
    }

    /// A warp executes an instruction of its group.
    pub(crate) fn step(&mut self, warp: usize, at: usize, operands: [u64; 3]) -> Result<(), Wrong> {
        let refuse = |message| refuse(MistakeKind::Group, message);
        let (first, last) = (warp / WARPS * WARPS, self.warps() - 1);
        if first + WARPS > self.warps() {
            return refuse(format!("warps {first} to {last} are no group of four"));
        }
        let group = &mut self.groups[warp / WARPS];
        let made = &mut group.made[warp % WARPS];
        if *made == group.steps.len() {
            group.steps.push((at, operands));
        }
        let (other, theirs) = group.steps[*made];
        *made += 1;
        match (other == at, theirs == operands) {
            (true, true) => Ok(()),
            (true, false) => refuse(format!(
                "the warps of a group disagree: operands {operands:x?} here, {theirs:x?} in another warp"
            )),
            (false, _) => {
                refuse("another warp of the group came to another instruction here".into())
            }
        }
    }

    /// A warp executes an instruction after which each of its threads has `count` registers: more or fewer than before. Gives how
    /// many it has to take.
    pub(crate) fn ask(
        &mut self,
        warp: usize,
        at: usize,
        (count, is_more): (u32, bool),
    ) -> Result<u32, Wrong> {
        self.step(warp, at, [0; 3])?;
        let before = std::mem::replace(&mut self.registers[warp], count);
        let (more, fewer) = (count.saturating_sub(before), before.saturating_sub(count));
        if is_more && fewer > 0 || !is_more && more > 0 {
            let message = format!("{count} registers, after {before}");
            return refuse(MistakeKind::Group, message);
        }
        self.free += fewer;
        Ok(more)
    }

    /// Takes so many registers for each thread of a warp, if there are as many.
    pub(crate) fn take(&mut self, more: u32) -> bool {
        let is_there = more <= self.free;
        self.free -= if is_there { more } else { 0 };
        is_there
    }

    /// Nobody can go on, and a warp waits for so many registers.
    pub(crate) fn stuck(&self, more: u32) -> Wrong {
        let message = format!(
            "a wait for ever: a warp asks for {more} more registers of each thread, and others gave back {}",
            self.free
        );
        Wrong::new(MistakeKind::Group, message)
    }

    /// Errors, with a warp and an instruction, if a warp ended without some step of its group.
    pub(crate) fn check_end(&self) -> Result<(), (usize, usize, Wrong)> {
        for (index, group) in self.groups.iter().enumerate() {
            let late = group.made.iter().position(|made| *made < group.steps.len());
            if let Some(warp) = late {
                let (at, _) = group.steps[group.made[warp]];
                let message = "not all warps of the group came to this instruction";
                let wrong = Wrong::new(MistakeKind::Group, message);
                return Err((WARPS * index + warp, at, wrong));
            }
        }
        Ok(())
    }
}
