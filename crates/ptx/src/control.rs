//! Branches, barriers, ends, and the registers of groups of warps.

use crate::executable::{Barrier, Decode, Decoded, Executable, Opcodes};
use crate::operands::PtxOperands;
use crate::warp::Wait;
use crate::warp_group::UNIT;

pub(crate) const OPCODES: Opcodes = &[
    ("bar.arrive", |o| {
        o.exactly(2)?;
        Ok(Executable::Barrier(Barrier {
            number: o.source::<u32>(0)?,
            threads: Some(o.source::<u32>(1)?),
            any: None,
            is_passed: true,
        }))
    }),
    ("bar.red.or.pred", |o| {
        let number = o.source::<u32>(1)?;
        let counted = o.list.len() == 4;
        o.exactly(3 + usize::from(counted))?;
        let threads = match counted {
            true => Some(o.source::<u32>(2)?),
            false => None,
        };
        let condition = o.condition(2 + usize::from(counted))?;
        let any = Some((o.predicate_target(0)?, condition));
        Ok(Executable::Barrier(Barrier {
            number,
            threads,
            any,
            is_passed: false,
        }))
    }),
    ("bar.sync", |o| {
        let number = o.source::<u32>(0)?;
        let counted = o.list.len() == 2;
        o.exactly(1 + usize::from(counted))?;
        let threads = match counted {
            true => Some(o.source::<u32>(1)?),
            false => None,
        };
        let any = None;
        Ok(Executable::Barrier(Barrier {
            number,
            threads,
            any,
            is_passed: false,
        }))
    }),
    ("bra", BRANCH),
    ("bra.uni", BRANCH),
    ("exit", END),
    ("ret", END),
    ("setmaxnreg.dec.sync.aligned.u32", |o| {
        set_registers(o, false)
    }),
    ("setmaxnreg.inc.sync.aligned.u32", |o| {
        set_registers(o, true)
    }),
];

const BRANCH: Decode = |o: &mut PtxOperands| {
    o.exactly(1)?;
    o.label(0).map(Executable::Branch)
};

const END: Decode = |o: &mut PtxOperands| {
    o.exactly(0)?;
    Ok(Executable::End)
};

/// `count`: the registers that threads of the group have from here on.
fn set_registers(o: &mut PtxOperands, is_more: bool) -> Decoded {
    o.exactly(1)?;
    let count = o.integer(0)? as u32;
    if !(24..=256).contains(&count) || !count.is_multiple_of(UNIT) {
        return Err(format!(
            "{count} registers; possible are 24 to 256, by {UNIT}"
        ));
    }
    Ok(Executable::together(None, move |warp, outside, _| {
        let (warp, at) = (warp.index, outside.at);
        let more = outside.groups.ask(warp, at, (count, is_more))?;
        if !outside.groups.take(more) {
            outside.waits.push(Wait::Registers(more));
        }
        Ok(())
    }))
}
