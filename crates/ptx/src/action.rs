//! What a decoded instruction does.

use crate::error::{FaultKind, Wrong};
use crate::memory::Space;
use crate::operands::{Constant, Operands, by_lane};
use crate::registers::{Condition, LANES, Lane, Mask, Registers, Slot};
use crate::report::Traffic;
use crate::shadow::Who;
use crate::warp::Warp;

/// What an instruction reaches beside its warp.
pub(crate) struct Reach<'a> {
    pub(crate) global: &'a mut Space,
    pub(crate) shared: &'a mut Space,
    /// Variables of the module.
    pub(crate) variables: &'a Space,
    pub(crate) parameters: &'a [u8],
    pub(crate) block: u64,
    pub(crate) barriers: u32,
    /// What the instruction's accesses cost.
    pub(crate) traffic: &'a mut Traffic,
}

impl Reach<'_> {
    /// A lane of a warp, as one that accesses memory.
    pub(crate) fn who<'w>(&self, warp: &'w Warp, lane: usize) -> Who<'w> {
        Who {
            block: self.block,
            thread: warp.index * LANES + lane,
            seen: &warp.seen,
            barriers: self.barriers,
        }
    }
}

type Compute = Box<dyn Fn(&mut Registers, Mask) + Send + Sync>;
type Access = Box<dyn Fn(&mut Warp, &mut Reach, Mask) -> Result<(), Wrong> + Send + Sync>;

/// What a barrier does beside waiting.
#[derive(Clone, Copy)]
pub(crate) struct Barrier {
    /// Its number.
    pub(crate) number: Slot<u32>,
    /// How many threads it waits for; all of the block if it does not say.
    pub(crate) threads: Option<Slot<u32>>,
    /// Whether the condition holds in any thread, and where that goes.
    pub(crate) any: Option<(Slot<bool>, Condition)>,
}

/// What an instruction does, for the lanes of a mask.
pub(crate) enum Action {
    /// Computes in registers, and cannot fail.
    Compute(Compute),
    /// Everything else that a lane does without others.
    Access(Access),
    /// What the lanes do together that a mask names: all of the warp if there is none.
    Together {
        members: Option<Slot<u32>>,
        run: Access,
    },
    /// Goes on at a label; in a finished kernel, at an instruction.
    Branch(usize),
    Barrier(Barrier),
    /// Ends the thread.
    End,
}

/// An action, or why the operands are none of the opcode's.
pub(crate) type Decoded = Result<Action, String>;

/// Decodes the operands of one opcode.
pub(crate) type Decode = fn(&mut Operands) -> Decoded;

/// Opcodes with all their modifiers, and who decodes their operands.
pub(crate) type Opcodes = &'static [(&'static str, Decode)];

impl Action {
    pub(crate) fn compute(run: impl Fn(&mut Registers, Mask) + Send + Sync + 'static) -> Action {
        Action::Compute(Box::new(run))
    }

    pub(crate) fn access(
        run: impl Fn(&mut Warp, &mut Reach, Mask) -> Result<(), Wrong> + Send + Sync + 'static,
    ) -> Action {
        Action::Access(Box::new(run))
    }

    pub(crate) fn together(
        members: Option<Slot<u32>>,
        run: impl Fn(&mut Warp, &mut Reach, Mask) -> Result<(), Wrong> + Send + Sync + 'static,
    ) -> Action {
        let run = Box::new(run);
        Action::Together { members, run }
    }
}

/// `d, a`: one function for every lane.
pub(crate) fn unary<A: Constant, R: Lane>(
    o: &mut Operands,
    f: impl Fn(A) -> R + Send + Sync + 'static,
) -> Decoded {
    o.exactly(2)?;
    let (target, a) = (o.target::<R>(0)?, o.source::<A>(1)?);
    Ok(Action::compute(move |registers, mask| {
        let a = registers.read(a);
        registers.write(target, mask, a.map(&f));
    }))
}

/// `d, a, b`.
pub(crate) fn binary<A: Constant, B: Constant, R: Lane>(
    o: &mut Operands,
    f: impl Fn(A, B) -> R + Send + Sync + 'static,
) -> Decoded {
    o.exactly(3)?;
    let (target, a, b) = (o.target::<R>(0)?, o.source::<A>(1)?, o.source::<B>(2)?);
    Ok(Action::compute(move |registers, mask| {
        let (a, b) = (registers.read(a), registers.read(b));
        registers.write(target, mask, by_lane(|lane| f(a[lane], b[lane])));
    }))
}

/// `d, a, b`, where some operands have no result: for those of the active lanes, `what` is an error.
pub(crate) fn partial<A: Constant>(
    o: &mut Operands,
    what: &'static str,
    f: impl Fn(A, A) -> Option<A> + Send + Sync + 'static,
) -> Decoded {
    o.exactly(3)?;
    let (target, a, b) = (o.target::<A>(0)?, o.source::<A>(1)?, o.source::<A>(2)?);
    Ok(Action::access(move |warp, _, mask| {
        for lane in crate::registers::lanes(mask) {
            let (a, b) = (warp.registers.get(a, lane), warp.registers.get(b, lane));
            let result = f(a, b);
            let result =
                result.ok_or_else(|| Wrong::new(FaultKind::Operand, what).of_lane(lane))?;
            warp.registers.set(target, lane, result);
        }
        Ok(())
    }))
}

/// `d, a, b, c`, for all lanes at once.
pub(crate) fn ternary_lanes<A: Constant, C: Constant>(
    o: &mut Operands,
    f: impl Fn([A; LANES], [A; LANES], [C; LANES]) -> [C; LANES] + Send + Sync + 'static,
) -> Decoded {
    o.exactly(4)?;
    let (target, a, b) = (o.target::<C>(0)?, o.source::<A>(1)?, o.source::<A>(2)?);
    let c = o.source::<C>(3)?;
    Ok(Action::compute(move |registers, mask| {
        let result = f(registers.read(a), registers.read(b), registers.read(c));
        registers.write(target, mask, result);
    }))
}

/// `d, a, b, c`.
pub(crate) fn ternary<A: Constant, C: Constant>(
    o: &mut Operands,
    f: impl Fn(A, A, C) -> C + Send + Sync + 'static,
) -> Decoded {
    ternary_lanes(o, move |a, b, c| {
        by_lane(|lane| f(a[lane], b[lane], c[lane]))
    })
}
