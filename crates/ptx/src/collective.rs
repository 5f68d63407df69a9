//! Instructions that the lanes of a warp execute together: shuffles, votes, and waiting for each other.

use crate::error::{MistakeKind, Wrong};
use crate::executable::{Decoded, Executable, Opcodes};
use crate::operands::PtxOperands;
use crate::registers::{LaneMask, lanes};

pub(crate) const OPCODES: Opcodes = &[
    ("bar.warp.sync", |o| {
        o.exactly(1)?;
        let members = o.source::<u32>(0)?;
        Ok(Executable::together(Some(members), |warp, _, mask| {
            if mask == warp.whole {
                warp.synchronise();
            } else {
                let clock = warp.release(mask);
                warp.acquire(mask, &clock);
            }
            Ok(())
        }))
    }),
    // PTX leaves open which lane it is; here it is the lowest.
    ("elect.sync", |o| {
        o.exactly(2)?;
        let (target, members) = (o.elected_target(0)?, o.source::<u32>(1)?);
        Ok(Executable::together(Some(members), move |warp, _, mask| {
            let elected = mask & mask.wrapping_neg();
            warp.registers.write_predicate(target, mask, elected);
            Ok(())
        }))
    }),
    ("shfl.sync.bfly.b32", |o| {
        shuffle(o, |s| (s.lane ^ s.by, (s.lane ^ s.by) <= s.last))
    }),
    ("shfl.sync.down.b32", |o| {
        shuffle(o, |s| (s.lane + s.by, s.lane + s.by <= s.last))
    }),
    ("shfl.sync.idx.b32", |o| {
        shuffle(o, |s| {
            let source = s.first | s.by & !s.segments;
            (source, source <= s.last)
        })
    }),
    ("shfl.sync.up.b32", |o| {
        shuffle(o, |s| {
            (
                s.lane.wrapping_sub(s.by),
                s.lane as i32 - s.by as i32 >= s.last as i32,
            )
        })
    }),
    ("vote.sync.any.pred", |o| {
        vote_predicate(o, |votes, _| votes != 0)
    }),
    ("vote.sync.all.pred", |o| {
        vote_predicate(o, |votes, members| votes == members)
    }),
    ("vote.sync.ballot.b32", |o| {
        o.exactly(3)?;
        let (target, condition) = (o.target::<u32>(0)?, o.condition(1)?);
        let members = o.source::<u32>(2)?;
        Ok(Executable::together(Some(members), move |warp, _, mask| {
            let votes = condition.lanes(&warp.registers) & mask;
            warp.exchange(mask);
            warp.registers.write(target, mask, [votes; 32]);
            Ok(())
        }))
    }),
];

/// The numbers from which a shuffle finds the lane that a lane reads, as the manual calls them.
struct Shuffle {
    lane: u32,
    /// `b`.
    by: u32,
    /// `segmask`: the bits of a lane's number that choose its segment.
    segments: u32,
    /// `minLane`.
    first: u32,
    /// `maxLane`.
    last: u32,
}

/// `d|p, a, b, c, members`: each lane reads the lane that `source` names, or itself where that says no.
fn shuffle(
    o: &mut PtxOperands,
    source: impl Fn(Shuffle) -> (u32, bool) + Send + Sync + 'static,
) -> Decoded {
    o.exactly(5)?;
    let ((target, found), a) = (o.shuffle_target(0)?, o.source::<u32>(1)?);
    let (b, c) = (o.source::<u32>(2)?, o.source::<u32>(3)?);
    let members = o.source::<u32>(4)?;
    Ok(Executable::together(Some(members), move |warp, _, mask| {
        let values = warp.registers.read(a);
        let (mut results, mut holds) = (values, 0);
        for lane in lanes(mask) {
            let clamp = warp.registers.get(c, lane);
            let (segments, clamp) = (clamp >> 8 & 0x1f, clamp & 0x1f);
            let own = lane as u32;
            let (from, is_inside) = source(Shuffle {
                lane: own,
                by: warp.registers.get(b, lane) & 0x1f,
                segments,
                first: own & segments,
                last: own & segments | clamp & !segments,
            });
            let from = if is_inside { from } else { own };
            if mask >> from & 1 == 0 {
                let message = format!(
                    "lane {lane} reads lane {from}, which does not take part ({mask:#010x} do)"
                );
                return Err(Wrong::new(MistakeKind::Lanes, message).of_lane(lane));
            }
            results[lane] = values[from as usize];
            holds |= LaneMask::from(is_inside) << lane;
        }
        warp.exchange(mask);
        warp.registers.write(target, mask, results);
        if let Some(found) = found {
            warp.registers.write_predicate(found, mask, holds);
        }
        Ok(())
    }))
}

fn vote_predicate(
    o: &mut PtxOperands,
    holds: impl Fn(LaneMask, LaneMask) -> bool + Send + Sync + 'static,
) -> Decoded {
    o.exactly(3)?;
    let (target, condition) = (o.predicate_target(0)?, o.condition(1)?);
    let members = o.source::<u32>(2)?;
    Ok(Executable::together(Some(members), move |warp, _, mask| {
        let votes = condition.lanes(&warp.registers) & mask;
        warp.exchange(mask);
        let result = if holds(votes, mask) { LaneMask::MAX } else { 0 };
        warp.registers.write_predicate(target, mask, result);
        Ok(())
    }))
}
