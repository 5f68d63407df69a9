//! Asynchronous copies from global to shared memory.
//!
//! A copy reads its source and writes its target at any time until its thread waits for it: so both accesses are noted when
//! it is asked for. It is made at the wait, and in between nobody has written the target. Copies with which a thread arrives on a
//! barrier in shared memory are made when its phase ends.

use crate::access::{addresses, check_alignment};
use crate::copies::AsyncCopy;
use crate::error::{MistakeKind, Wrong};
use crate::executable::{Decoded, Executable, Opcodes, Outside};
use crate::operands::PtxOperands;
use crate::registers::{LaneMask, lanes};
use crate::shadow::{AccessKind, Who};
use crate::warp::Warp;
use std::cell::Cell;
use std::rc::Rc;

pub(crate) const OPCODES: Opcodes = &[
    ("cp.async.ca.shared.global", |o| copy(o, &[4, 8, 16])),
    ("cp.async.cg.shared.global", |o| copy(o, &[16])),
    ("cp.async.commit_group", |o| {
        o.exactly(0)?;
        Ok(Executable::access(|warp, _, mask| {
            for lane in lanes(mask) {
                warp.copies.commit(lane);
            }
            Ok(())
        }))
    }),
    ("cp.async.wait_all", |o| {
        o.exactly(0)?;
        Ok(Executable::access(|warp, outside, mask| {
            for lane in lanes(mask) {
                warp.copies.commit(lane);
            }
            finish(warp, outside, mask, 0)
        }))
    }),
    ("cp.async.wait_group", |o| {
        o.exactly(1)?;
        let under_way = o.integer(0)? as u32;
        Ok(Executable::access(move |warp, outside, mask| {
            finish(warp, outside, mask, under_way)
        }))
    }),
];

/// `[to], [from], bytes`, and how many of them are read.
fn copy(o: &mut PtxOperands, sizes: &'static [u64]) -> Decoded {
    let (to, from, bytes) = (o.address(0)?, o.address(1)?, o.integer(2)?);
    let read_bytes = match o.list.len() {
        3 => None,
        _ => Some(o.source::<u32>(3)?),
    };
    o.exactly(3 + usize::from(read_bytes.is_some()))?;
    if !sizes.contains(&bytes) {
        return Err(format!("a copy of {bytes} bytes; possible are {sizes:?}"));
    }
    let bytes = bytes as usize;
    Ok(Executable::access(move |warp, outside, mask| {
        let targets = addresses(to, &warp.registers, mask);
        outside.counts.count_shared(&targets, mask, bytes);
        let mut readers = 0;
        let time = warp.copies.time;
        warp.copies.time += 1;
        for lane in lanes(mask) {
            let asked = read_bytes.map_or(bytes, |slot| warp.registers.get(slot, lane) as usize);
            if asked > bytes {
                let message = format!("a copy of {bytes} bytes that reads {asked}");
                return Err(Wrong::new(MistakeKind::Meaningless, message).of_lane(lane));
            }
            let copy = AsyncCopy {
                lane,
                time,
                group: Cell::new(None),
                from: from.of_lane(&warp.registers, lane),
                to: targets[lane],
                bytes,
                read_bytes: asked,
                is_made: Cell::new(false),
                is_awaited: Cell::new(false),
                is_over: Cell::new(false),
            };
            readers |= LaneMask::from(copy.read_bytes > 0) << lane;
            let who = outside.who(warp, lane).copying(time);
            begin(outside, &copy, &who).map_err(|wrong| wrong.of_lane(lane))?;
            warp.copies.under_way.push(Rc::new(copy));
        }
        let sources = addresses(from, &warp.registers, readers);
        outside.counts.count_global(&sources, readers, bytes);
        Ok(())
    }))
}

/// Notes what a copy accesses.
fn begin(outside: &mut Outside, copy: &AsyncCopy, who: &Who) -> Result<(), Wrong> {
    check_alignment(copy.to, copy.bytes)?;
    check_alignment(copy.from, copy.bytes)?;
    outside.mbarriers.check_write(copy.to, copy.bytes)?;
    let global = &mut *outside.global;
    read(copy, |from, bytes| {
        global.load(from, bytes, AccessKind::Read, who)
    })?;
    outside
        .shared
        .note(copy.to, copy.bytes, AccessKind::Write, who)?;
    outside.shared.forget(copy.to, copy.bytes)
}

/// The source bytes of a copy; the rest of the destination becomes 0.
fn read(
    copy: &AsyncCopy,
    mut load: impl FnMut(u64, usize) -> Result<[u8; 16], Wrong>,
) -> Result<[u8; 16], Wrong> {
    let mut value = [0; 16];
    let mut at = 0;
    while at < copy.read_bytes {
        // The largest power of two that is left, so that every piece is aligned.
        let piece = 1 << (copy.read_bytes - at).ilog2();
        let read = load(copy.from + at as u64, piece)?;
        value[at..at + piece].copy_from_slice(&read[..piece]);
        at += piece;
    }
    Ok(value)
}

/// Completes all committed groups except each lane's `newest`.
fn finish(
    warp: &mut Warp,
    outside: &mut Outside,
    mask: LaneMask,
    newest: u32,
) -> Result<(), Wrong> {
    for copy in warp.copies.wait(mask, newest) {
        deliver(outside, &copy).map_err(|wrong| wrong.of_lane(copy.lane))?;
        copy.is_over.set(true);
    }
    Ok(())
}

/// Makes a copy, if that is not done.
pub(crate) fn deliver(outside: &mut Outside, copy: &AsyncCopy) -> Result<(), Wrong> {
    if copy.is_made.replace(true) {
        return Ok(());
    }
    let value = read(copy, |from, bytes| outside.global.peek(from, bytes))?;
    outside.shared.poke(copy.to, &value[..copy.bytes])
}
