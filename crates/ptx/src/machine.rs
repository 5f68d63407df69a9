//! Runs a grid: block after block, in each the warps in turn until they wait or end.
//!
//! The lanes of a warp run in lockstep. Where they part, those go first that are furthest behind in the text, until they come
//! to where others are; so they meet again at the end of a branch or loop. What lanes do together waits until all have come
//! that it names. When nobody can go on, that is an error.

use crate::error::{Mistake, MistakeKind, Wrong};
use crate::executable::{Barrier, Executable, Outside};
use crate::kernel::PtxKernel;
use crate::memory::AddressSpace;
use crate::operands::by_lane;
use crate::registers::{LANES, LaneMask, Register, lanes};
use crate::report::{AccessCounts, LineCounts, Report};
use crate::warp::{Arrival, LaneGroup, Warp};

/// Instructions of a warp before it counts as endless.
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
    pub(crate) instructions: u64,
}

/// What stopped a warp: at which instruction, and for which lanes.
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
    /// How many barriers of all its threads there were.
    barriers: u32,
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
                barriers: 0,
            };
            self.shared.begin_block();
            for warp in &mut warps {
                self.begin(warp, index);
            }
            self.run_block(&mut running, &mut warps)?;
        }
        Ok(self.report())
    }

    fn report(self) -> Report {
        let lines = self.kernel.code.iter().zip(self.counts);
        let lines = lines.filter(|(_, counts)| *counts != AccessCounts::default());
        Report {
            instructions: self.instructions,
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
            local: Vec::new(),
            seen: vec![0; threads.div_ceil(LANES)],
        }
    }

    /// A warp as it is before its first instruction. Clocks start at 1: what precedes time 0 is nothing.
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
        warp.groups = vec![LaneGroup {
            at: 0,
            lanes: warp.whole,
            is_waiting: false,
        }];
        warp.copies = Default::default();
        warp.seen.fill(0);
        warp.seen[warp.index] = 1;
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
            for warp in warps.iter_mut() {
                if warp.arrival.is_none() {
                    let ran = self.run_warp(running, warp);
                    ran.map_err(|stopped| self.fault(running, warp.index, stopped))?;
                }
            }
            if warps.iter().all(|warp| warp.groups.is_empty()) {
                return Ok(());
            }
            self.release(running, warps)?;
        }
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

    /// Lets those warps go on whose barrier is complete: at least one, when all others wait or have ended.
    fn release(&self, running: &mut Running, warps: &mut [Warp]) -> Result<(), Box<Mistake>> {
        let mut has_released = false;
        for number in 0..16 {
            let is_there =
                |warp: &&mut Warp| warp.arrival.is_some_and(|arrival| arrival.number == number);
            let count = warps.len();
            let mut there: Vec<&mut Warp> = warps.iter_mut().filter(is_there).collect();
            let Some(first) = there.first() else { continue };
            let (index, arrival) = (first.index, first.arrival.expect("it is there"));
            let refuse = |message: String| {
                let wrong = Wrong::new(MistakeKind::Barrier, message);
                let (at, lanes) = (first.groups[0].at, first.whole);
                Err(self.fault(running, index, Stopped { at, lanes, wrong }))
            };
            let like = |other: &Arrival| {
                (other.threads, other.any.is_some()) == (arrival.threads, arrival.any.is_some())
            };
            if !there
                .iter()
                .filter_map(|warp| warp.arrival.as_ref())
                .all(like)
            {
                return refuse(format!(
                    "barrier {number}: other threads wait there otherwise"
                ));
            }
            let arrived = (there.len() * LANES) as u32;
            if arrived > arrival.threads {
                let threads = arrival.threads;
                return refuse(format!(
                    "barrier {number}: {arrived} threads came, of {threads}"
                ));
            }
            if arrived < arrival.threads {
                continue;
            }
            let is_whole = there.len() == count;
            self.pass(&mut there);
            running.barriers += u32::from(is_whole);
            has_released = true;
        }
        if has_released {
            return Ok(());
        }
        let waiting = warps.iter().find(|warp| warp.arrival.is_some());
        let first = waiting.expect("a warp that has not ended is at a barrier");
        let arrival = first.arrival.expect("it is there");
        let arrived = warps.iter().filter(|warp| {
            warp.arrival
                .is_some_and(|other| other.number == arrival.number)
        });
        let (arrived, ended) = (
            arrived.count(),
            warps.iter().filter(|warp| warp.groups.is_empty()).count(),
        );
        let message = format!(
            "a barrier that waits for ever: of {} threads {} came to barrier {}, {} ended",
            arrival.threads,
            arrived * LANES,
            arrival.number,
            ended * LANES,
        );
        let stopped = Stopped {
            at: first.groups[0].at,
            lanes: first.whole,
            wrong: Wrong::new(MistakeKind::Barrier, message),
        };
        Err(self.fault(running, first.index, stopped))
    }

    /// All warps of a barrier go on, and know of each other's accesses.
    fn pass(&self, there: &mut [&mut Warp]) {
        let any = there.iter().any(|warp| {
            warp.arrival
                .is_some_and(|arrival| arrival.any == Some(true))
        });
        let mut seen = vec![0; there[0].seen.len()];
        for warp in there.iter_mut() {
            warp.seen[warp.index] += 1;
            for (all, one) in seen.iter_mut().zip(&warp.seen) {
                *all = (*all).max(*one);
            }
        }
        for warp in there {
            warp.seen.clone_from(&seen);
            warp.arrival = None;
            let group = &mut warp.groups[0];
            if let Executable::Barrier(Barrier {
                any: Some((target, _)),
                ..
            }) = self.kernel.code[group.at].action
            {
                let lanes = if any { LaneMask::MAX } else { 0 };
                warp.registers.write_predicate(target, group.lanes, lanes);
            }
            group.at += 1;
        }
    }

    /// Runs a warp until it ends or is at a barrier.
    fn run_warp(&mut self, running: &Running, warp: &mut Warp) -> Result<(), Stopped> {
        while !warp.groups.is_empty() && warp.arrival.is_none() {
            warp.merge();
            // They are in the order of the text.
            let Some(next) = warp.groups.iter().position(|group| !group.is_waiting) else {
                return Err(stuck(warp));
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
        running: &Running,
        warp: &mut Warp,
        mut group: LaneGroup,
        stop: usize,
    ) -> Result<(), Stopped> {
        let kernel = self.kernel;
        let is_alone = warp.groups.is_empty();
        let mut budget = INSTRUCTIONS_MAX;
        while group.at != stop {
            let instruction = &kernel.code[group.at];
            let mask = match instruction.guard {
                None => group.lanes,
                Some(guard) => group.lanes & guard.lanes(&warp.registers),
            };
            let stopped = |wrong| Stopped {
                at: group.at,
                lanes: mask,
                wrong,
            };
            budget -= 1;
            if budget == 0 {
                return Err(stopped(Wrong::new(MistakeKind::Endless, "it does not end")));
            }
            self.instructions += u64::from(mask.count_ones());
            match &instruction.action {
                Executable::Compute(run) => run(&mut warp.registers, mask),
                Executable::Access(run) => {
                    let mut outside = self.outside(running, group.at);
                    run(warp, &mut outside, mask).map_err(stopped)?;
                }
                Executable::Together { members, run } => {
                    let mut left = mask;
                    while left != 0 {
                        let together = members_of(warp, *members, left).map_err(stopped)?;
                        if together & mask != together {
                            group.is_waiting = true;
                            warp.groups.push(group);
                            return Ok(());
                        }
                        left &= !together;
                    }
                    self.run_together(running, warp, group.at, mask, *members, run.as_ref())
                        .map_err(stopped)?;
                }
                Executable::Branch(target) => {
                    let stays = group.lanes & !mask;
                    if stays == 0 {
                        group.at = *target;
                    } else {
                        group.at += 1;
                        if mask != 0 {
                            warp.groups.push(LaneGroup {
                                lanes: mask,
                                at: *target,
                                ..group
                            });
                            group.lanes = stays;
                            break;
                        }
                    }
                    match is_alone {
                        true => continue,
                        false => break,
                    }
                }
                Executable::Barrier(barrier) => {
                    match group.lanes == warp.whole {
                        true => {
                            warp.arrival = Some(self.arrival(warp, barrier, mask).map_err(stopped)?)
                        }
                        false => group.is_waiting = true,
                    }
                    warp.groups.push(group);
                    return Ok(());
                }
                Executable::End => {
                    let copies = warp.copies.count(mask);
                    if copies > 0 {
                        let message = format!(
                            "ended with {copies} asynchronous copies that were not waited for"
                        );
                        return Err(stopped(Wrong::new(MistakeKind::Unfinished, message)));
                    }
                    group.lanes &= !mask;
                    if group.lanes == 0 {
                        return Ok(());
                    }
                }
            }
            group.at += 1;
        }
        warp.groups.push(group);
        Ok(())
    }

    fn outside(&mut self, running: &Running, at: usize) -> Outside<'_> {
        Outside {
            global: self.global,
            shared: &mut self.shared,
            variables: self.variables,
            parameters: &self.parameters,
            block: running.number,
            barriers: running.barriers,
            counts: &mut self.counts[at],
        }
    }

    /// Runs what lanes do together, for each set of lanes that does it together.
    fn run_together(
        &mut self,
        running: &Running,
        warp: &mut Warp,
        at: usize,
        mask: LaneMask,
        members: Option<Register<u32>>,
        run: &dyn Fn(&mut Warp, &mut Outside, LaneMask) -> Result<(), Wrong>,
    ) -> Result<(), Wrong> {
        let sets: Vec<LaneMask> = match members {
            None => vec![mask],
            Some(members) => {
                let mut sets: Vec<LaneMask> = lanes(mask)
                    .map(|lane| warp.registers.get(members, lane))
                    .collect();
                sets.sort_unstable();
                sets.dedup();
                sets
            }
        };
        let mut outside = self.outside(running, at);
        sets.into_iter()
            .filter(|set| *set != 0)
            .try_for_each(|set| run(warp, &mut outside, set))
    }

    fn arrival(&self, warp: &Warp, barrier: &Barrier, mask: LaneMask) -> Result<Arrival, Wrong> {
        let refuse = |message: String| Err(Wrong::new(MistakeKind::Barrier, message));
        if mask != warp.whole {
            return refuse(format!("of a warp only {mask:#010x} come to this barrier"));
        }
        let alike = |slot| {
            let values = warp.registers.read(slot);
            lanes(mask)
                .all(|lane| values[lane] == values[0])
                .then_some(values[0])
        };
        let block = (warp.seen.len() * LANES) as u32;
        let threads = barrier.threads.map_or(Some(block), alike);
        let (Some(number), Some(threads)) = (alike(barrier.number), threads) else {
            return refuse("lanes of a warp name different barriers".into());
        };
        if number >= 16 || threads == 0 || threads % LANES as u32 != 0 || threads > block {
            return refuse(format!(
                "there is no barrier {number} of {threads} threads in a block of {block}"
            ));
        }
        let any = barrier
            .any
            .map(|(_, condition)| condition.lanes(&warp.registers) & mask != 0);
        Ok(Arrival {
            number,
            threads,
            any,
        })
    }
}

/// A line of a text, by its number from 1.
fn line_of(text: &str, line: u32) -> &str {
    let found = text.lines().nth(line as usize - 1);
    found.unwrap_or_default().trim()
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
