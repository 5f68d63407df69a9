//! Runs a grid: block after block, in each the warps in turn until they wait or end.
//!
//! The lanes of a warp run in lockstep. Where they part, those go first that are furthest behind in the text, until they come
//! to where others are; so they meet again at the end of a branch or loop. What lanes do together waits until all have come
//! that it names. When nobody can go on, that is an error.

use crate::barrier::{self, Passing};
use crate::clock::VectorClock;
use crate::error::{Mistake, MistakeKind, Wrong, refuse};
use crate::executable::{Barrier, Executable, Outside};
use crate::kernel::{PtxInstruction, PtxKernel};
use crate::memory::AddressSpace;
use crate::operands::by_lane;
use crate::phase::Mbarriers;
use crate::products::WarpProducts;
use crate::registers::{File, LANES, LaneMask, Numbered, Register, Registers, lanes};
use crate::report::{AccessCounts, LineCounts, Report};
use crate::warp::{LaneGroup, Wait, Warp};
use crate::warp_group::WarpGroups;
use std::collections::BTreeSet;

/// A block that executes more warp instructions than this counts as endless.
const INSTRUCTIONS_MAX: u64 = 1 << 28;

/// A launch that was checked.
pub(crate) struct Machine<'a> {
    pub(crate) text: &'a str,
    pub(crate) variables: &'a AddressSpace,
    pub(crate) kernel: &'a PtxKernel,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) parameters: Vec<u8>,
    pub(crate) global: &'a mut AddressSpace,
    pub(crate) shared: AddressSpace,
    pub(crate) counts: Vec<AccessCounts>,
    /// By instruction, whether some thread executed it.
    pub(crate) has_run: Vec<bool>,
    pub(crate) instructions: u64,
    /// Instructions that the warps of a block may still take.
    pub(crate) budget: u64,
}

/// The stop of a warp: its instruction, and the lanes that stopped.
struct Stopped {
    at: usize,
    lanes: LaneMask,
    wrong: Wrong,
}

/// The block that runs.
struct Running {
    index: [u32; 3],
    /// Its number in the grid.
    number: u64,
    /// Warps that came to a barrier and went on.
    passing: Vec<Passing>,
    mbarriers: Mbarriers,
    groups: WarpGroups,
    /// The running lanes wait for these after their instruction.
    waits: Vec<Wait>,
}

/// Where lanes go on after an instruction.
enum Next {
    Instruction,
    /// Where their branch went.
    Target,
    /// Here, when others have run.
    Later,
    /// Nowhere: they have ended.
    Nowhere,
}

impl Running {
    /// Whether a wait is over; then the registers that it was for are taken.
    fn is_over(&mut self, wait: Wait) -> bool {
        match wait {
            Wait::Phase(phase) => self.mbarriers.is_over(phase),
            Wait::Registers(more) => self.groups.take(more),
            Wait::Turn => true,
        }
    }

    /// Errors, with a warp and an instruction, if something is left undone when the block ends.
    fn check_end(&self) -> Result<(), (usize, usize, Wrong)> {
        self.groups.check_end()?;
        self.mbarriers.check_end()
    }

    /// Lanes come to a barrier. Returns whether they go on at once.
    fn meet(
        &mut self,
        warp: &mut Warp,
        barrier: &Barrier,
        group: &mut LaneGroup,
        mask: LaneMask,
    ) -> Result<bool, Wrong> {
        group.is_waiting = group.lanes != warp.whole;
        if group.is_waiting {
            return Ok(false);
        }
        let arrival = barrier::arrive(warp, self.groups.warps(), barrier, mask)?;
        if barrier.is_passed {
            let clock = warp.release(mask);
            self.passing.push(Passing { arrival, clock });
        } else {
            warp.arrival = Some(arrival);
        }
        Ok(barrier.is_passed)
    }
}

impl Machine<'_> {
    /// Runs all blocks.
    pub(crate) fn run(mut self) -> Result<Report, Box<Mistake>> {
        self.global.begin_launch();
        let threads = self.block.iter().product::<u32>() as usize;
        let mut warps: Vec<Warp> = (0..threads.div_ceil(LANES))
            .map(|index| self.warp(index, threads))
            .collect();
        let [x, y, z] = self.grid;
        let blocks = (0..z).flat_map(|z| (0..y).flat_map(move |y| (0..x).map(move |x| [x, y, z])));
        for (number, index) in blocks.enumerate() {
            let mut running = Running {
                index,
                number: number as u64,
                passing: Vec::new(),
                mbarriers: Mbarriers::default(),
                groups: WarpGroups::new(warps.len(), self.kernel.threads_of_multiprocessor()),
                waits: Vec::new(),
            };
            self.shared.begin_block();
            self.budget = INSTRUCTIONS_MAX;
            for warp in &mut warps {
                self.begin(warp, index);
            }
            self.run_block(&mut running, &mut warps)?;
            let ended = running.check_end();
            ended.map_err(|(warp, at, wrong)| {
                let lanes = LaneMask::MAX;
                self.fault(&running, warp, Stopped { at, lanes, wrong })
            })?;
        }
        Ok(self.report())
    }

    fn report(self) -> Report {
        let code = &self.kernel.code;
        let run = code.iter().zip(&self.has_run).filter(|(_, run)| **run);
        let opcodes = run.map(|(instruction, _)| instruction.opcode).collect();
        let lines = code.iter().zip(self.counts);
        let lines = lines.filter(|(_, counts)| *counts != AccessCounts::default());
        Report {
            instructions: self.instructions,
            opcodes,
            lines: lines
                .map(|(instruction, counts)| LineCounts {
                    line: instruction.line,
                    counts,
                })
                .collect(),
        }
    }

    fn warp(&self, index: usize, threads: usize) -> Warp {
        let threads_here = (threads - index * LANES).min(LANES);
        Warp {
            index,
            registers: self.kernel.registers.clone(),
            whole: LaneMask::MAX >> (LANES - threads_here),
            groups: Vec::new(),
            arrival: None,
            copies: Default::default(),
            products: None,
            local: Vec::new(),
            time: 0,
            met: 0,
            clock: VectorClock::default(),
            ahead: vec![None; LANES],
        }
    }

    /// A warp as it is before its first instruction.
    fn begin(&self, warp: &mut Warp, block: [u32; 3]) {
        warp.registers.clone_from(&self.kernel.registers);
        let [width, height, _] = self.block;
        let first = (warp.index * LANES) as u32;
        let thread = |lane: usize| first + lane as u32;
        let words = &mut warp.registers.words;
        words[0] = by_lane(|lane| thread(lane) % width);
        words[1] = by_lane(|lane| thread(lane) / width % height);
        words[2] = by_lane(|lane| thread(lane) / (width * height));
        for axis in 0..3 {
            words[3 + axis] = [self.block[axis]; LANES];
            words[6 + axis] = [block[axis]; LANES];
            words[9 + axis] = [self.grid[axis]; LANES];
        }
        words[12] = by_lane(|lane| lane as u32);
        warp.groups = vec![LaneGroup::new(0, warp.whole)];
        warp.copies = Default::default();
        let words = self.kernel.registers.words.len();
        warp.products = self.kernel.has_products.then(|| WarpProducts::new(words));
        warp.clock = VectorClock::default();
        warp.ahead.fill(None);
        warp.time = 0;
        warp.met = 0;
        if self.kernel.local_bytes > 0 {
            warp.local.clear();
            warp.local.resize_with(LANES, || {
                let mut local = AddressSpace::default();
                local.add(0, "local memory", self.kernel.local_bytes);
                local
            });
        }
    }

    fn run_block(&mut self, running: &mut Running, warps: &mut [Warp]) -> Result<(), Box<Mistake>> {
        loop {
            let before = self.budget;
            for warp in warps.iter_mut().filter(|warp| warp.arrival.is_none()) {
                for group in &mut warp.groups {
                    if group.waits.iter().any(|wait| running.is_over(*wait)) {
                        group.waits.clear();
                    }
                }
                let ran = self.run_warp(running, warp);
                ran.map_err(|stopped| self.fault(running, warp.index, stopped))?;
            }
            if warps.iter().all(|warp| warp.groups.is_empty()) {
                return Ok(());
            }
            if self.budget < before {
                continue;
            }
            let released = barrier::release(&self.kernel.code, warps, &mut running.passing);
            let released = released.map_err(|(index, wrong)| {
                let warp = &warps[index];
                let (at, lanes) = (warp.groups[0].at, warp.whole);
                self.fault(running, index, Stopped { at, lanes, wrong })
            })?;
            if !released {
                return Err(self.deadlock(running, warps));
            }
        }
    }

    /// Every warp waits: the first of those that wait for registers, or else for phases, or else at barriers.
    fn deadlock(&self, running: &Running, warps: &[Warp]) -> Box<Mistake> {
        let (mut registers, mut phases, mut addresses) = (None, None, BTreeSet::new());
        for (warp, group) in warps
            .iter()
            .flat_map(|warp| warp.groups.iter().map(move |group| (warp, group)))
        {
            let place = (warp.index, group.at.saturating_sub(1), group.lanes);
            for wait in &group.waits {
                match wait {
                    Wait::Registers(more) => registers = registers.or(Some((place, *more))),
                    Wait::Phase(phase) => {
                        phases = phases.or(Some(place));
                        addresses.insert(phase.address);
                    }
                    Wait::Turn => {}
                }
            }
        }
        let registers = registers.map(|(place, more)| (place, running.groups.stuck(more)));
        let phases = phases.map(|place| (place, running.mbarriers.stuck(&addresses)));
        if let Some(((warp, at, lanes), wrong)) = registers.or(phases) {
            return self.fault(running, warp, Stopped { at, lanes, wrong });
        }
        let mut arrivals = warps
            .iter()
            .filter_map(|warp| warp.arrival.map(|arrival| (warp, arrival)));
        let (warp, arrival) = arrivals.next().expect("who does not run waits");
        let (at, lanes) = (warp.groups[0].at, warp.whole);
        let wrong = barrier::stuck(arrival, warps, &running.passing);
        self.fault(running, warp.index, Stopped { at, lanes, wrong })
    }

    fn fault(&self, running: &Running, warp: usize, stopped: Stopped) -> Box<Mistake> {
        let Stopped { at, lanes, wrong } = stopped;
        let lane = wrong.lane.unwrap_or(lanes.trailing_zeros() as usize);
        let thread = (warp * LANES + lane) as u32;
        let [width, height, _] = self.block;
        let line = self.kernel.code[at].line;
        Box::new(Mistake {
            kernel: self.kernel.name.clone(),
            line,
            text: line_of(self.text, line).into(),
            place: None,
            block: running.index,
            thread: [
                thread % width,
                thread / width % height,
                thread / (width * height),
            ],
            kind: wrong.kind,
            message: wrong.message,
        })
    }

    /// Runs a warp until it ends or is at a barrier, or all its lanes wait for others.
    fn run_warp(&mut self, running: &mut Running, warp: &mut Warp) -> Result<(), Stopped> {
        while !warp.groups.is_empty() && warp.arrival.is_none() {
            warp.merge();
            // They are in the order of the text.
            let Some(next) = warp.groups.iter().position(LaneGroup::is_ready) else {
                return match warp.groups.iter().any(|group| !group.waits.is_empty()) {
                    true => Ok(()),
                    false => Err(stuck(warp)),
                };
            };
            let stop = warp
                .groups
                .get(next + 1)
                .map_or(usize::MAX, |group| group.at);
            let group = warp.groups.swap_remove(next);
            self.run_group(running, warp, group, stop)?;
        }
        Ok(())
    }

    /// Runs lanes that are together, until they part, wait, end, or come to `stop`, where others are.
    fn run_group(
        &mut self,
        running: &mut Running,
        warp: &mut Warp,
        mut group: LaneGroup,
        stop: usize,
    ) -> Result<(), Stopped> {
        let kernel = self.kernel;
        let is_alone = warp.groups.is_empty();
        while group.at != stop {
            let instruction = &kernel.code[group.at];
            let mask = match instruction.guard {
                None => group.lanes,
                Some(guard) => group.lanes & guard.lanes(&warp.registers),
            };
            let (at, lanes) = (group.at, mask);
            let next = self
                .prepare(warp, &group, mask)
                .and_then(|()| self.execute(running, warp, &mut group, mask));
            match next.map_err(|wrong| Stopped { at, lanes, wrong })? {
                Next::Instruction => group.at += 1,
                Next::Target if is_alone => {}
                // The jump may have passed other groups, so return and pick again.
                Next::Target | Next::Later => break,
                Next::Nowhere => return Ok(()),
            }
        }
        warp.groups.push(group);
        Ok(())
    }

    /// Counts an instruction that the lanes of a mask are about to execute, and checks its registers.
    #[inline]
    fn prepare(&mut self, warp: &mut Warp, group: &LaneGroup, mask: LaneMask) -> Result<(), Wrong> {
        let instruction = &self.kernel.code[group.at];
        self.budget -= 1;
        if self.budget == 0 {
            return refuse(MistakeKind::Endless, "it does not end");
        }
        self.instructions += u64::from(mask.count_ones());
        self.has_run[group.at] |= mask != 0;
        check_registers(instruction, &warp.registers, group.lanes, mask)?;
        if let Some(products) = warp.products.as_mut().filter(|_| mask != 0) {
            products.touch(&instruction.read, &instruction.written)?;
        }
        // Nobody reads a result before the instruction is through, even if that waits for other lanes.
        warp.registers.set_written(&instruction.written, mask);
        Ok(())
    }

    #[inline]
    fn execute(
        &mut self,
        running: &mut Running,
        warp: &mut Warp,
        group: &mut LaneGroup,
        mask: LaneMask,
    ) -> Result<Next, Wrong> {
        let kernel = self.kernel;
        match &kernel.code[group.at].action {
            Executable::Compute(run) => run(&mut warp.registers, mask),
            Executable::Access(run) => run(warp, &mut self.outside(running, group.at), mask)?,
            Executable::Together { members, run } => {
                let Some(sets) = sets(warp, *members, mask)? else {
                    group.is_waiting = true;
                    return Ok(Next::Later);
                };
                let mut outside = self.outside(running, group.at);
                for set in sets {
                    run(warp, &mut outside, set)?;
                }
            }
            Executable::Branch(target) => {
                return Ok(match branch(warp, group, *target, mask) {
                    true => Next::Later,
                    false => Next::Target,
                });
            }
            // No lane comes: its predicate is false in all of them.
            Executable::Barrier(_) if mask == 0 => {}
            Executable::Barrier(barrier) => {
                if !running.meet(warp, barrier, group, mask)? {
                    return Ok(Next::Later);
                }
            }
            Executable::End => {
                check_end(warp, mask)?;
                group.lanes &= !mask;
                if group.lanes == 0 {
                    return Ok(Next::Nowhere);
                }
            }
        }
        if running.waits.is_empty() {
            return Ok(Next::Instruction);
        }
        std::mem::swap(&mut group.waits, &mut running.waits);
        group.at += 1;
        Ok(Next::Later)
    }

    fn outside<'b>(&'b mut self, running: &'b mut Running, at: usize) -> Outside<'b> {
        Outside {
            global: self.global,
            shared: &mut self.shared,
            variables: self.variables,
            parameters: &self.parameters,
            block: running.number,
            at,
            mbarriers: &mut running.mbarriers,
            groups: &mut running.groups,
            waits: &mut running.waits,
            counts: &mut self.counts[at],
        }
    }
}

/// A line of a text, by its number from 1.
fn line_of(text: &str, line: u32) -> &str {
    let found = text.lines().nth(line as usize - 1);
    found.unwrap_or_default().trim()
}

/// Sends the lanes of `mask` to `target` and the others to the next instruction; returns whether the group split.
fn branch(warp: &mut Warp, group: &mut LaneGroup, target: usize, mask: LaneMask) -> bool {
    let stays = group.lanes & !mask;
    if stays == 0 {
        group.at = target;
        return false;
    }
    if mask != 0 {
        warp.groups.push(LaneGroup::new(target, mask));
    }
    group.lanes = stays;
    group.at += 1;
    mask != 0
}

/// Errors if one of the lanes of `mask`, which execute an instruction, or of `all`, which read its guard, reads a register that it
/// never wrote.
#[inline]
fn check_registers(
    instruction: &PtxInstruction,
    registers: &Registers,
    all: LaneMask,
    mask: LaneMask,
) -> Result<(), Wrong> {
    let guard = instruction.guard.map(|guard| Numbered {
        file: File::Predicates,
        index: guard.index,
    });
    let of_guard = registers.unwritten(guard.as_slice(), all);
    let Some((register, lanes)) = of_guard.or_else(|| registers.unwritten(&instruction.read, mask))
    else {
        return Ok(());
    };
    let what = match register.file {
        File::Words => "register of 32 or 16 bits",
        File::Doubles => "register of 64 bits",
        File::Predicates => "predicate",
    };
    let message = format!("reads a {what} that the lanes {lanes:#010x} never wrote");
    let wrong = Wrong::new(MistakeKind::Unwritten, message);
    Err(wrong.of_lane(lanes.trailing_zeros() as usize))
}

/// Errors if lanes end before their products, or their copies.
fn check_end(warp: &Warp, mask: LaneMask) -> Result<(), Wrong> {
    let copies = warp.copies.count(mask);
    if copies > 0 {
        let message = format!("ended with {copies} asynchronous copies that were not waited for");
        return refuse(MistakeKind::Unfinished, message);
    }
    match warp.products.as_ref().filter(|_| mask != 0) {
        Some(products) => products.check_end(),
        None => Ok(()),
    }
}

/// Splits the arrived lanes by member mask; `None` while some member is missing.
fn sets(
    warp: &Warp,
    members: Option<Register<u32>>,
    mask: LaneMask,
) -> Result<Option<Vec<LaneMask>>, Wrong> {
    let (mut sets, mut left) = (Vec::new(), mask);
    while left != 0 {
        let together = members_of(warp, members, left)?;
        if together & mask != together {
            return Ok(None);
        }
        sets.push(together);
        left &= !together;
    }
    Ok(Some(sets))
}

/// The lanes with which the first lane of a mask does something together.
fn members_of(
    warp: &Warp,
    members: Option<Register<u32>>,
    mask: LaneMask,
) -> Result<LaneMask, Wrong> {
    let Some(members) = members else {
        return Ok(LaneMask::MAX);
    };
    let first = mask.trailing_zeros() as usize;
    let together = warp.registers.get(members, first);
    if together >> first & 1 == 1 {
        let same =
            |lane: &usize| mask >> lane & 1 == 0 || warp.registers.get(members, *lane) == together;
        if lanes(together).all(|lane| same(&lane)) {
            return Ok(together);
        }
    }
    let message = format!(
        "the mask {together:#010x} of lane {first} leaves it out, or is not that of all its lanes"
    );
    Err(Wrong::new(MistakeKind::Lanes, message).of_lane(first))
}

/// Every group of a warp waits for lanes that will not come.
fn stuck(warp: &Warp) -> Stopped {
    let LaneGroup { at, lanes, .. } = warp.groups[0];
    let others: Vec<String> = warp.groups[1..]
        .iter()
        .map(|group| format!("{:#010x} wait elsewhere", group.lanes))
        .collect();
    let ended = warp.whole & !warp.running();
    let message = format!(
        "lanes {lanes:#010x} wait here for lanes that do not come: {ended:#010x} ended{}{}",
        if others.is_empty() { "" } else { ", " },
        others.join(", ")
    );
    let wrong = Wrong::new(MistakeKind::Lanes, message);
    Stopped { at, lanes, wrong }
}
