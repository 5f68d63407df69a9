//! Decoded instructions.

use crate::error::{MistakeKind, Wrong};
use crate::memory::AddressSpace;
use crate::operands::{Constant, PtxOperands, by_lane};
use crate::phase::Mbarriers;
use crate::registers::{Condition, LANES, LaneMask, LaneValue, Register, Registers};
use crate::report::AccessCounts;
use crate::shadow::Who;
use crate::warp::{Wait, Warp};
use crate::warp_group::WarpGroups;

/// The state outside its warp that an instruction uses.
pub(crate) struct Outside<'a> {
    pub(crate) global: &'a mut AddressSpace,
    pub(crate) shared: &'a mut AddressSpace,
    /// Variables of the module.
    pub(crate) variables: &'a AddressSpace,
    pub(crate) parameters: &'a [u8],
    pub(crate) block: u64,
    /// The place of the instruction in the kernel.
    pub(crate) at: usize,
    pub(crate) mbarriers: &'a mut Mbarriers,
    pub(crate) groups: &'a mut WarpGroups,
    /// Filled by an instruction whose lanes have to wait before the next one.
    pub(crate) waits: &'a mut Vec<Wait>,
    /// Counts the cost of the instruction's accesses.
    pub(crate) counts: &'a mut AccessCounts,
}

impl Outside<'_> {
    /// A lane of a warp, as one that accesses memory.
    pub(crate) fn who<'w>(&self, warp: &'w Warp, lane: usize) -> Who<'w> {
        let thread = (self.block, warp.index * LANES + lane);
        let times = [warp.time, warp.met, warp.copies.over[lane]];
        Who::thread(thread, times, warp.clock_of(lane))
    }
}

type Compute = Box<dyn Fn(&mut Registers, LaneMask) + Send + Sync>;
type Access = Box<dyn Fn(&mut Warp, &mut Outside, LaneMask) -> Result<(), Wrong> + Send + Sync>;

/// The reduction of a barrier, if it has one.
#[derive(Clone, Copy)]
pub(crate) struct Barrier {
    /// Its number.
    pub(crate) number: Register<u32>,
    /// How many threads it waits for; all of the block if it does not say.
    pub(crate) threads: Option<Register<u32>>,
    /// Whether the condition holds in any thread, and where that goes.
    pub(crate) any: Option<(Register<bool>, Condition)>,
    /// Whether threads arrive there and go on.
    pub(crate) is_passed: bool,
}

/// The effect of an instruction on the lanes of a mask.
pub(crate) enum Executable {
    /// Computes in registers, and cannot fail.
    Compute(Compute),
    /// Everything else that a lane does without others.
    Access(Access),
    /// An effect that the lanes of a mask have together; without a mask, the whole warp.
    Together {
        members: Option<Register<u32>>,
        run: Access,
    },
    /// Goes on at a label; in a finished kernel, at an instruction.
    Branch(usize),
    Barrier(Barrier),
    /// Ends the thread.
    End,
}

/// The decoded instruction, or why its operands do not fit the opcode.
pub(crate) type Decoded = Result<Executable, String>;

/// Decodes the operands of one opcode.
pub(crate) type Decode = fn(&mut PtxOperands) -> Decoded;

/// Opcodes with all their modifiers, and who decodes their operands.
pub(crate) type Opcodes = &'static [(&'static str, Decode)];

impl Executable {
    pub(crate) fn compute(
        run: impl Fn(&mut Registers, LaneMask) + Send + Sync + 'static,
    ) -> Executable {
        Executable::Compute(Box::new(run))
    }

    pub(crate) fn access(
        run: impl Fn(&mut Warp, &mut Outside, LaneMask) -> Result<(), Wrong> + Send + Sync + 'static,
    ) -> Executable {
        Executable::Access(Box::new(run))
    }

    pub(crate) fn together(
        members: Option<Register<u32>>,
        run: impl Fn(&mut Warp, &mut Outside, LaneMask) -> Result<(), Wrong> + Send + Sync + 'static,
    ) -> Executable {
        let run = Box::new(run);
        Executable::Together { members, run }
    }
}

/// `d, a`: one function for every lane.
pub(crate) fn unary<A: Constant, R: LaneValue>(
    o: &mut PtxOperands,
    f: impl Fn(A) -> R + Send + Sync + 'static,
) -> Decoded {
    o.exactly(2)?;
    let (target, a) = (o.target::<R>(0)?, o.source::<A>(1)?);
    Ok(Executable::compute(move |registers, mask| {
        let a = registers.read(a);
        registers.write(target, mask, a.map(&f));
    }))
}

/// `d, a, b`.
pub(crate) fn binary<A: Constant, B: Constant, R: LaneValue>(
    o: &mut PtxOperands,
    f: impl Fn(A, B) -> R + Send + Sync + 'static,
) -> Decoded {
    o.exactly(3)?;
    let (target, a, b) = (o.target::<R>(0)?, o.source::<A>(1)?, o.source::<B>(2)?);
    Ok(Executable::compute(move |registers, mask| {
        let (a, b) = (registers.read(a), registers.read(b));
        registers.write(target, mask, by_lane(|lane| f(a[lane], b[lane])));
    }))
}

/// `d, a, b`, where `f` may be undefined: an active lane without a result is an error named `what`.
pub(crate) fn partial<A: Constant>(
    o: &mut PtxOperands,
    what: &'static str,
    f: impl Fn(A, A) -> Option<A> + Send + Sync + 'static,
) -> Decoded {
    o.exactly(3)?;
    let (target, a, b) = (o.target::<A>(0)?, o.source::<A>(1)?, o.source::<A>(2)?);
    Ok(Executable::access(move |warp, _, mask| {
        for lane in crate::registers::lanes(mask) {
            let (a, b) = (warp.registers.get(a, lane), warp.registers.get(b, lane));
            let result = f(a, b);
            let result =
                result.ok_or_else(|| Wrong::new(MistakeKind::Meaningless, what).of_lane(lane))?;
            warp.registers.set(target, lane, result);
        }
        Ok(())
    }))
}

/// `d, a, b, c`, for all lanes at once.
pub(crate) fn ternary_lanes<A: Constant, C: Constant>(
    o: &mut PtxOperands,
    f: impl Fn([A; LANES], [A; LANES], [C; LANES]) -> [C; LANES] + Send + Sync + 'static,
) -> Decoded {
    o.exactly(4)?;
    let (target, a, b) = (o.target::<C>(0)?, o.source::<A>(1)?, o.source::<A>(2)?);
    let c = o.source::<C>(3)?;
    Ok(Executable::compute(move |registers, mask| {
        let result = f(registers.read(a), registers.read(b), registers.read(c));
        registers.write(target, mask, result);
    }))
}

/// `d, a, b, c`.
pub(crate) fn ternary<A: Constant, C: Constant>(
    o: &mut PtxOperands,
    f: impl Fn(A, A, C) -> C + Send + Sync + 'static,
) -> Decoded {
    ternary_lanes(o, move |a, b, c| {
        by_lane(|lane| f(a[lane], b[lane], c[lane]))
    })
}
