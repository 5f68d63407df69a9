//! Instructions on barriers in shared memory, and fences of what asynchronous instructions access.

use crate::access::check_alignment;
use crate::async_copy::deliver;
use crate::clock::{COPIES, VectorClock};
use crate::copies::AsyncCopy;
use crate::error::{MistakeKind, Wrong, refuse};
use crate::executable::{Decoded, Executable, Opcodes, Outside};
use crate::operands::{PtxOperand, PtxOperands};
use crate::phase::{BYTES, LateCopy, Mbarrier, PhaseArrival, PhaseWait};
use crate::registers::{LANES, LaneMask, Register, lanes};
use crate::shadow::AccessKind;
use crate::warp::{Wait, Warp};
use std::rc::Rc;

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
    ("mbarrier.inval.shared::cta.b64", invalidate),
    ("mbarrier.try_wait.parity.shared::cta.b64", try_wait),
];

/// A number of arrivals or bytes that a barrier can count.
fn counted(count: u32, least: u32) -> Result<u32, Wrong> {
    match count {
        count if (least..=COUNT_MAX).contains(&count) => Ok(count),
        count => refuse(
            MistakeKind::Barrier,
            format!("a barrier cannot count {count}"),
        ),
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
                    Some(_) => refuse(
                        MistakeKind::Barrier,
                        format!("there is a barrier at {at:#x} already"),
                    ),
                }
            });
            made.map_err(|wrong| wrong.of_lane(lane))?;
        }
        Ok(())
    }))
}

/// `[at]`: from here on there is no barrier.
fn invalidate(o: &mut PtxOperands) -> Decoded {
    o.exactly(1)?;
    let address = o.address(0)?;
    Ok(Executable::access(move |warp, outside, mask| {
        for lane in lanes(mask) {
            let at = address.of_lane(&warp.registers, lane);
            let ended = check_use(outside, warp, lane, at, AccessKind::Write);
            let ended = ended.and_then(|()| outside.mbarriers.remove(at));
            ended.map_err(|wrong| wrong.of_lane(lane))?;
        }
        Ok(())
    }))
}

/// Errors unless there is a barrier at an address that a lane uses.
fn check_use(
    outside: &mut Outside,
    warp: &Warp,
    lane: usize,
    at: u64,
    kind: AccessKind,
) -> Result<(), Wrong> {
    check_alignment(at, BYTES)?;
    let who = outside.who(warp, lane);
    outside.shared.note(at, BYTES, kind, &who)?;
    match outside.mbarriers.0.contains_key(&at) {
        true => Ok(()),
        false => refuse(
            MistakeKind::Barrier,
            format!("there is no barrier at {at:#x}"),
        ),
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
        let mut arrivals = Vec::new();
        for lane in lanes(mask) {
            let at = address.of_lane(&warp.registers, lane);
            let number = |slot: Option<Register<u32>>, least| {
                slot.map(|slot| counted(warp.registers.get(slot, lane), least))
                    .transpose()
            };
            let arrival = number(count, 1).and_then(|count| {
                Ok(LaneArrival {
                    lane,
                    at,
                    count: count.unwrap_or(1),
                    bytes: number(bytes, 0)?.unwrap_or(0).into(),
                })
            });
            arrivals.push(arrival.map_err(|wrong| wrong.of_lane(lane))?);
        }
        arrive(warp, outside, &arrivals, state, |warp, mask| {
            (warp.release(mask), Vec::new())
        })
    }))
}

/// `[at]`: arrives when the copies are made that the thread has asked for, and tells of nothing else.
fn arrive_with_copies(o: &mut PtxOperands) -> Decoded {
    o.exactly(1)?;
    let address = o.address(0)?;
    Ok(Executable::access(move |warp, outside, mask| {
        let arrival = |lane| LaneArrival {
            lane,
            at: address.of_lane(&warp.registers, lane),
            count: 1,
            bytes: 0,
        };
        let arrivals: Vec<LaneArrival> = lanes(mask).map(arrival).collect();
        arrive(warp, outside, &arrivals, None, |warp, mask| {
            let mut clock = VectorClock::default();
            let asked = warp.times(mask, [warp.copies.time; LANES]);
            clock.seen.raise(COPIES + warp.index, &asked);
            let copies = lanes(mask).flat_map(|lane| warp.copies.awaited(lane));
            (clock, copies.collect())
        })
    }))
}

/// A lane arrives on a barrier.
struct LaneArrival {
    lane: usize,
    at: u64,
    count: u32,
    bytes: u64,
}

/// Lanes arrive, and leave in `state` how many phases were over before. `told` gives what precedes those who learn that the lanes of
/// a mask arrived, and the copies for which these do. Makes the copies of a phase that is over.
fn arrive(
    warp: &mut Warp,
    outside: &mut Outside,
    mut arrivals: &[LaneArrival],
    state: Option<Register<u64>>,
    told: impl Fn(&mut Warp, LaneMask) -> (VectorClock, Vec<Rc<AsyncCopy>>),
) -> Result<(), Wrong> {
    for LaneArrival { lane, at, .. } in arrivals {
        let checked = check_use(outside, warp, *lane, *at, AccessKind::Read);
        checked.map_err(|wrong| wrong.of_lane(*lane))?;
    }
    while let Some(LaneArrival { lane, at, .. }) = arrivals.first() {
        let at = *at;
        // Lanes of one phase arrive together.
        let mut left = outside.mbarriers.missing(at);
        let fits = |next: &&LaneArrival| {
            let is_fitting = next.at == at && next.count <= left;
            left = left.saturating_sub(next.count);
            is_fitting
        };
        let together = arrivals.iter().take_while(fits).count().max(1);
        let (now, later) = arrivals.split_at(together);
        arrivals = later;
        let mask = now.iter().fold(0, |mask, one| mask | 1 << one.lane);
        let (clock, copies) = told(warp, mask);
        let late = |copy| LateCopy {
            copy,
            warp: warp.index,
            at: outside.at,
        };
        let arrival = PhaseArrival {
            count: now.iter().map(|one| one.count).sum(),
            bytes: now.iter().map(|one| one.bytes).sum(),
            clock,
            copies: copies.into_iter().map(late).collect(),
        };
        let arrived = outside.mbarriers.arrive(at, arrival);
        let (before, is_over) = arrived.map_err(|wrong| wrong.of_lane(*lane))?;
        if is_over {
            let made: Vec<Rc<AsyncCopy>> = outside.mbarriers.made(at).cloned().collect();
            made.iter().try_for_each(|copy| deliver(outside, copy))?;
        }
        if let Some(state) = state {
            lanes(mask).for_each(|lane| warp.registers.set(state, lane, before.into()));
        }
    }
    Ok(())
}

/// `p, [at], parity`: whether the phase of that parity is over. Lanes that hear no go on when it is.
fn try_wait(o: &mut PtxOperands) -> Decoded {
    o.exactly(3)?;
    let (target, address) = (o.predicate_target(0)?, o.address(1)?);
    let parity = o.source::<u32>(2)?;
    Ok(Executable::access(move |warp, outside, mask| {
        let mut waits: Vec<(u64, bool, LaneMask)> = Vec::new();
        for lane in lanes(mask) {
            let at = address.of_lane(&warp.registers, lane);
            let parity = warp.registers.get(parity, lane);
            let checked = check_use(outside, warp, lane, at, AccessKind::Read);
            let checked = checked.and_then(|()| match parity {
                0 | 1 => Ok(()),
                _ => refuse(MistakeKind::Barrier, format!("{parity} is no parity")),
            });
            checked.map_err(|wrong| wrong.of_lane(lane))?;
            let parity = parity == 1;
            let mut others = waits.iter_mut();
            match others.find(|wait| (wait.0, wait.1) == (at, parity)) {
                Some((_, _, lanes)) => *lanes |= 1 << lane,
                None => waits.push((at, parity, 1 << lane)),
            }
        }
        let mut over = 0;
        for (address, parity, lanes) in waits {
            let barrier = outside.mbarriers.0.get_mut(&address);
            match barrier.and_then(|barrier| barrier.wait(parity)) {
                Some(clock) => {
                    warp.acquire(lanes, clock);
                    over |= lanes;
                }
                None => outside
                    .waits
                    .push(Wait::Phase(PhaseWait { address, parity })),
            }
        }
        // Those that heard yes go on at once.
        if over != 0 && over != mask {
            outside.waits.push(Wait::Turn);
        }
        warp.registers.write_predicate(target, mask, over);
        Ok(())
    }))
}
