//! Instructions on barriers in shared memory, and fences of what asynchronous instructions access.

use crate::access::check_alignment;
use crate::async_copy::deliver;
use crate::error::{MistakeKind, Wrong};
use crate::executable::{Decoded, Executable, Opcodes, Outside};
use crate::operands::{PtxOperand, PtxOperands};
use crate::phase::{LateCopy, Mbarrier, PhaseArrival, PhaseWait};
use crate::registers::{LANES, LaneMask, Register, lanes};
use crate::shadow::{AccessKind, Who};
use crate::warp::Warp;
use std::rc::Rc;

/// Bytes of a barrier.
const BYTES: usize = 8;
/// Most arrivals, or bytes, of a phase.
const COUNT_MAX: u32 = (1 << 20) - 1;

pub(crate) const OPCODES: Opcodes = &[
    (
        "cp.async.mbarrier.arrive.noinc.shared::cta.b64",
        arrive_with_copies,
    ),
    // It tells other blocks of a cluster of barriers; here there are none, and a barrier of the block orders the rest.
    ("fence.mbarrier_init.release.cluster", |o| {
        o.exactly(0)?;
        Ok(Executable::access(|_, _, _| Ok(())))
    }),
    ("fence.proxy.async.shared::cta", |o| {
        o.exactly(0)?;
        Ok(Executable::access(|warp, _, mask| {
            warp.fence(mask);
            Ok(())
        }))
    }),
    ("mbarrier.arrive.expect_tx.shared::cta.b64", |o| {
        o.exactly(3)?;
        let bytes = o.source::<u32>(2)?;
        arrival(o, None, Some(bytes))
    }),
    ("mbarrier.arrive.shared::cta.b64", |o| {
        let count = match o.list.len() {
            2 => None,
            _ => Some(o.source::<u32>(2)?),
        };
        o.exactly(2 + usize::from(count.is_some()))?;
        arrival(o, count, None)
    }),
    ("mbarrier.init.shared::cta.b64", init),
    ("mbarrier.try_wait.parity.shared::cta.b64", try_wait),
];

fn refuse<T>(message: String) -> Result<T, Wrong> {
    Err(Wrong::new(MistakeKind::Barrier, message))
}

/// A number of arrivals or bytes that a barrier can count.
fn counted(count: u32, least: u32) -> Result<u32, Wrong> {
    match count {
        count if (least..=COUNT_MAX).contains(&count) => Ok(count),
        count => refuse(format!("a barrier cannot count {count}")),
    }
}

/// `[at], count`.
fn init(o: &mut PtxOperands) -> Decoded {
    o.exactly(2)?;
    let (address, count) = (o.address(0)?, o.source::<u32>(1)?);
    Ok(Executable::access(move |warp, outside, mask| {
        for lane in lanes(mask) {
            let at = address.of_lane(&warp.registers, lane);
            let made = check_alignment(at, BYTES).and_then(|()| {
                let who = outside.who(warp, lane);
                outside.shared.note(at, BYTES, AccessKind::Write, &who)?;
                outside.shared.forget(at, BYTES)?;
                let expected = counted(warp.registers.get(count, lane), 1)?;
                match outside.mbarriers.0.insert(at, Mbarrier::new(expected)) {
                    None => Ok(()),
                    Some(_) => refuse(format!("there is a barrier at {at:#x} already")),
                }
            });
            made.map_err(|wrong| wrong.of_lane(lane))?;
        }
        Ok(())
    }))
}

/// Errors unless there is a barrier at an address that a lane uses, whose bytes nobody has written since.
fn check_use(outside: &mut Outside, warp: &Warp, lane: usize, at: u64) -> Result<(), Wrong> {
    check_alignment(at, BYTES)?;
    let who = outside.who(warp, lane);
    outside.shared.note(at, BYTES, AccessKind::Read, &who)?;
    if !outside.mbarriers.0.contains_key(&at) {
        return refuse(format!("there is no barrier at {at:#x}"));
    }
    let mut halves = [at, at + 4].into_iter();
    match halves.any(|half| outside.shared.peek(half, 4).is_ok()) {
        true => refuse(format!("the barrier at {at:#x} was overwritten")),
        false => Ok(()),
    }
}

/// `state, [at], ...`: of one arrival or a number, after which the phase waits for so many bytes more.
fn arrival(
    o: &mut PtxOperands,
    count: Option<Register<u32>>,
    bytes: Option<Register<u32>>,
) -> Decoded {
    let address = o.address(1)?;
    let state = match o.operand(0)? {
        PtxOperand::Name("_") => None,
        _ => Some(o.target::<u64>(0)?),
    };
    Ok(Executable::access(move |warp, outside, mask| {
        let clock = Rc::new(warp.release(mask));
        for lane in lanes(mask) {
            let at = address.of_lane(&warp.registers, lane);
            let number = |slot: Option<Register<u32>>, least| {
                slot.map(|slot| counted(warp.registers.get(slot, lane), least))
                    .transpose()
            };
            let arrived = check_use(outside, warp, lane, at).and_then(|()| {
                let arrival = PhaseArrival {
                    count: number(count, 1)?.unwrap_or(1),
                    bytes: number(bytes, 0)?.unwrap_or(0).into(),
                    clock: clock.clone(),
                    copies: Vec::new(),
                };
                arrive(outside, at, arrival)
            });
            let phase = arrived.map_err(|wrong| wrong.of_lane(lane))?;
            if let Some(state) = state {
                warp.registers.set(state, lane, phase.into());
            }
        }
        Ok(())
    }))
}

/// `[at]`: arrives when the copies are made that the thread has asked for.
fn arrive_with_copies(o: &mut PtxOperands) -> Decoded {
    o.exactly(1)?;
    let address = o.address(0)?;
    Ok(Executable::access(move |warp, outside, mask| {
        let time = warp.time;
        let clock = Rc::new(warp.release(mask));
        for lane in lanes(mask) {
            let at = address.of_lane(&warp.registers, lane);
            let copies = warp.copies.take(lane).into_iter();
            let copies = copies.map(|copy| LateCopy {
                copy,
                thread: warp.index * LANES + lane,
                time,
                met: warp.met,
                clock: clock.clone(),
            });
            let arrival = PhaseArrival {
                count: 1,
                bytes: 0,
                clock: clock.clone(),
                copies: copies.collect(),
            };
            let checked = check_use(outside, warp, lane, at);
            let arrived = checked.and_then(|()| arrive(outside, at, arrival));
            arrived.map_err(|wrong| wrong.of_lane(lane))?;
        }
        Ok(())
    }))
}

/// `p, [at], parity`: whether the phase of that parity is over. If not, it says no and the lanes go on when it is.
fn try_wait(o: &mut PtxOperands) -> Decoded {
    o.exactly(3)?;
    let (target, address) = (o.predicate_target(0)?, o.address(1)?);
    let parity = o.source::<u32>(2)?;
    Ok(Executable::Phase(Box::new(move |warp, outside, mask| {
        let (mut over, mut wait) = (0, None);
        let mut waits: Vec<(u64, bool, LaneMask)> = Vec::new();
        for lane in lanes(mask) {
            let at = address.of_lane(&warp.registers, lane);
            let parity = warp.registers.get(parity, lane);
            let checked = check_use(outside, warp, lane, at).and_then(|()| match parity {
                0 | 1 => Ok(()),
                _ => refuse(format!("{parity} is no parity")),
            });
            checked.map_err(|wrong| wrong.of_lane(lane))?;
            let parity = parity == 1;
            match waits
                .iter_mut()
                .find(|wait| (wait.0, wait.1) == (at, parity))
            {
                Some((_, _, lanes)) => *lanes |= 1 << lane,
                None => waits.push((at, parity, 1 << lane)),
            }
        }
        for (address, parity, lanes) in waits {
            match outside.mbarriers.0[&address].over(parity) {
                Some(clock) => {
                    warp.acquire(lanes, clock);
                    over |= lanes;
                }
                None => wait = Some(PhaseWait { address, parity }),
            }
        }
        warp.registers.write_predicate(target, mask, over);
        Ok(wait)
    })))
}

/// Arrives on a barrier, and makes the copies of its phase if that is over. Gives how many phases were over before.
fn arrive(outside: &mut Outside, address: u64, arrival: PhaseArrival) -> Result<u32, Wrong> {
    let (before, copies) = outside.mbarriers.arrive(address, arrival)?;
    for late in copies {
        make(outside, &late)?;
    }
    Ok(before)
}

fn make(outside: &mut Outside, late: &LateCopy) -> Result<(), Wrong> {
    let who = Who {
        block: outside.block,
        thread: late.thread,
        time: late.time,
        met: late.met,
        seen: &late.clock.seen,
    };
    deliver(outside, &late.copy, &who).map_err(|wrong| {
        let message = format!("a copy by thread number {}: {}", late.thread, wrong.message);
        Wrong::new(wrong.kind, message)
    })
}
