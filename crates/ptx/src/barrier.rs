//! Barriers: which warps have arrived, and when they may continue.

use crate::clock::VectorClock;
use crate::error::{MistakeKind, Wrong, refuse};
use crate::executable::{Barrier, Executable};
use crate::kernel::PtxInstruction;
use crate::registers::{LANES, LaneMask, lanes};
use crate::warp::{Arrival, Warp};

/// Barriers of a block.
const BARRIERS: u32 = 16;

/// A warp that came to a barrier and did not wait there.
pub(crate) struct Passing {
    pub(crate) arrival: Arrival,
    pub(crate) clock: VectorClock,
}

/// A warp of a block of so many comes to a barrier with the lanes of a mask.
pub(crate) fn arrive(
    warp: &Warp,
    warps: usize,
    barrier: &Barrier,
    mask: LaneMask,
) -> Result<Arrival, Wrong> {
    let refuse = |message| refuse(MistakeKind::Barrier, message);
    if mask != warp.whole {
        return refuse(format!("of a warp only {mask:#010x} come to this barrier"));
    }
    let alike = |slot| {
        let values = warp.registers.read(slot);
        let is_alike = lanes(mask).all(|lane| values[lane] == values[0]);
        is_alike.then_some(values[0])
    };
    let block = (warps * LANES) as u32;
    let threads = barrier.threads.map_or(Some(block), alike);
    let (Some(number), Some(threads)) = (alike(barrier.number), threads) else {
        return refuse("lanes of a warp name different barriers".into());
    };
    if number >= BARRIERS || threads == 0 || threads % LANES as u32 != 0 || threads > block {
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

/// Lets those warps go on whose barrier is complete, when all others wait or have ended. Gives whether there were any; or a
/// warp at a barrier where others wait otherwise.
pub(crate) fn release(
    code: &[PtxInstruction],
    warps: &mut [Warp],
    passing: &mut Vec<Passing>,
) -> Result<bool, (usize, Wrong)> {
    let mut has_released = false;
    for number in 0..BARRIERS {
        let is_there =
            |warp: &&mut Warp| warp.arrival.is_some_and(|arrival| arrival.number == number);
        let mut there: Vec<&mut Warp> = warps.iter_mut().filter(is_there).collect();
        if there.is_empty() {
            continue;
        }
        let passed = passing
            .iter()
            .filter(|passing| passing.arrival.number == number);
        let arrivals = there.iter().filter_map(|warp| warp.arrival);
        let arrivals = arrivals.chain(passed.clone().map(|passing| passing.arrival));
        if is_complete(arrivals).map_err(|wrong| (there[0].index, wrong))? {
            let mut clock = VectorClock::default();
            passed.for_each(|passing| clock.join(&passing.clock));
            pass(code, &mut there, clock);
            passing.retain(|passing| passing.arrival.number != number);
            has_released = true;
        }
    }
    Ok(has_released)
}

/// Whether every thread that the barrier waits for has arrived.
fn is_complete(mut arrivals: impl Iterator<Item = Arrival>) -> Result<bool, Wrong> {
    let first = arrivals.next().expect("they are there");
    let (number, threads) = (first.number, first.threads);
    let mut arrived = LANES as u32;
    for other in arrivals {
        if (other.threads, other.any.is_some()) != (threads, first.any.is_some()) {
            let message = format!("barrier {number}: other threads wait there otherwise");
            return refuse(MistakeKind::Barrier, message);
        }
        arrived += LANES as u32;
    }
    match arrived > threads {
        true => refuse(
            MistakeKind::Barrier,
            format!("barrier {number}: {arrived} threads came, of {threads}"),
        ),
        false => Ok(arrived == threads),
    }
}

/// All warps of a barrier go on, and know of each other's accesses, and of those before `clock`.
fn pass(code: &[PtxInstruction], there: &mut [&mut Warp], mut clock: VectorClock) {
    let holds = |warp: &&mut Warp| {
        warp.arrival
            .is_some_and(|arrival| arrival.any == Some(true))
    };
    let any = if there.iter().any(holds) {
        LaneMask::MAX
    } else {
        0
    };
    for warp in there.iter_mut() {
        warp.synchronise();
        clock.join(&warp.clock);
    }
    for warp in there {
        warp.clock.clone_from(&clock);
        warp.arrival = None;
        let group = &mut warp.groups[0];
        if let Executable::Barrier(barrier) = &code[group.at].action
            && let Some((target, _)) = barrier.any
        {
            warp.registers.write_predicate(target, group.lanes, any);
        }
        group.at += 1;
    }
}

/// No barrier is complete, and nobody else can come to that of an arrival.
pub(crate) fn stuck(first: Arrival, warps: &[Warp], passing: &[Passing]) -> Wrong {
    let Arrival {
        number, threads, ..
    } = first;
    let waiting = warps.iter().filter_map(|warp| warp.arrival);
    let arrivals = waiting.chain(passing.iter().map(|passing| passing.arrival));
    let arrived = LANES * arrivals.filter(|arrival| arrival.number == number).count();
    let ended = LANES * warps.iter().filter(|warp| warp.groups.is_empty()).count();
    let message = format!(
        "a barrier that waits for ever: of {threads} threads {arrived} came to barrier {number}, {ended} ended"
    );
    Wrong::new(MistakeKind::Barrier, message)
}
