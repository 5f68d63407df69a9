//! Loads, stores and address-space conversions.

use crate::error::{MistakeKind, Wrong};
use crate::executable::{Decoded, Executable, Opcodes, Outside};
use crate::operands::{AnyRegister, PtxOperands, RegisterAddress, value_at};
use crate::registers::{LANES, LaneMask, Registers, lanes};
use crate::shadow::AccessKind;
use crate::warp::Warp;

/// The upper byte of a generic address selects its space. Module variables keep it in global addresses too.
const WINDOW: u32 = 56;
pub(crate) const SHARED_WINDOW: u64 = 1 << WINDOW;
pub(crate) const LOCAL_WINDOW: u64 = 2 << WINDOW;
pub(crate) const VARIABLES_WINDOW: u64 = 3 << WINDOW;

/// The space that an instruction names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Named {
    Generic,
    Global,
    /// Global memory that nothing writes during the launch (`ld.global.nc`).
    ReadOnly,
    Shared,
    Local,
    Constant,
}

/// One element of an access: bytes, and whether its sign spreads in a wider register.
#[derive(Clone, Copy)]
struct Element {
    bytes: usize,
    is_signed: bool,
}

const fn unsigned(bytes: usize) -> Element {
    let is_signed = false;
    Element { bytes, is_signed }
}

const SIGNED: Element = Element {
    bytes: 4,
    is_signed: true,
};

macro_rules! table {
    ($($name:literal: $f:ident $space:ident $element:expr, $count:literal;)*) => {
        &[$(($name, |o| $f(o, Named::$space, $element, $count)),)*]
    };
}

pub(crate) const OPCODES: Opcodes = table! {
    "ld.const.f32": load Constant unsigned(4), 1;
    "ld.const.u32": load Constant unsigned(4), 1;
    "ld.global.f32": load Global unsigned(4), 1;
    "ld.global.f64": load Global unsigned(8), 1;
    "ld.global.nc.f32": load ReadOnly unsigned(4), 1;
    "ld.global.nc.u32": load ReadOnly unsigned(4), 1;
    "ld.global.s32": load Global SIGNED, 1;
    "ld.global.u16": load Global unsigned(2), 1;
    "ld.global.u32": load Global unsigned(4), 1;
    "ld.global.u64": load Global unsigned(8), 1;
    "ld.global.u8": load Global unsigned(1), 1;
    "ld.global.v2.u32": load Global unsigned(4), 2;
    "ld.global.v4.f32": load Global unsigned(4), 4;
    "ld.global.v4.u32": load Global unsigned(4), 4;
    "ld.local.f32": load Local unsigned(4), 1;
    "ld.local.u32": load Local unsigned(4), 1;
    "ld.shared.f32": load Shared unsigned(4), 1;
    "ld.shared.f64": load Shared unsigned(8), 1;
    "ld.shared.u16": load Shared unsigned(2), 1;
    "ld.shared.u32": load Shared unsigned(4), 1;
    "ld.shared.u8": load Shared unsigned(1), 1;
    "ld.shared.v2.f32": load Shared unsigned(4), 2;
    "ld.shared.v4.f32": load Shared unsigned(4), 4;
    "ld.shared.v4.u32": load Shared unsigned(4), 4;
    "ld.v4.f32": load Generic unsigned(4), 4;
    "ld.v4.u32": load Generic unsigned(4), 4;
    "st.global.f32": store Global unsigned(4), 1;
    "st.global.f64": store Global unsigned(8), 1;
    "st.global.u16": store Global unsigned(2), 1;
    "st.global.u32": store Global unsigned(4), 1;
    "st.global.u64": store Global unsigned(8), 1;
    "st.global.u8": store Global unsigned(1), 1;
    "st.global.v2.f32": store Global unsigned(4), 2;
    "st.global.v2.u16": store Global unsigned(2), 2;
    "st.global.v2.u32": store Global unsigned(4), 2;
    "st.global.v4.f32": store Global unsigned(4), 4;
    "st.global.v4.u32": store Global unsigned(4), 4;
    "st.local.f32": store Local unsigned(4), 1;
    "st.local.u32": store Local unsigned(4), 1;
    "st.shared.f32": store Shared unsigned(4), 1;
    "st.shared.f64": store Shared unsigned(8), 1;
    "st.shared.u16": store Shared unsigned(2), 1;
    "st.shared.u32": store Shared unsigned(4), 1;
    "st.shared.u8": store Shared unsigned(1), 1;
    "st.shared.v2.f32": store Shared unsigned(4), 2;
    "st.shared.v4.f32": store Shared unsigned(4), 4;
    "st.shared.v4.u32": store Shared unsigned(4), 4;
};

pub(crate) const PARAMETERS: Opcodes = &[
    ("ld.param.f32", |o| parameter(o, 4)),
    ("ld.param.u32", |o| parameter(o, 4)),
    ("ld.param.u64", |o| parameter(o, 8)),
];

pub(crate) const WINDOWS: Opcodes = &[
    ("cvta.local.u64", |o| into_window(o, LOCAL_WINDOW)),
    ("cvta.shared.u64", |o| into_window(o, SHARED_WINDOW)),
    ("cvta.to.global.u64", |o| out_of_window(o, Named::Global)),
    ("cvta.to.local.u64", |o| out_of_window(o, Named::Local)),
    ("cvta.to.shared.u64", |o| out_of_window(o, Named::Shared)),
];

/// The space of an address in a space, and the address there.
fn resolve(space: Named, address: u64) -> Result<(Named, u64), Wrong> {
    let window = address >> WINDOW << WINDOW;
    let inside = address - window;
    let is_fitting = match space {
        Named::Constant => window == VARIABLES_WINDOW,
        Named::Generic => true,
        Named::Global | Named::ReadOnly => window == 0 || window == VARIABLES_WINDOW,
        Named::Shared | Named::Local => window == 0,
    };
    match (window, space) {
        _ if !is_fitting => {
            let message = format!("out of bounds: {address:#x} is no {space:?} address");
            Err(Wrong::new(MistakeKind::OutOfBounds, message))
        }
        (VARIABLES_WINDOW, _) => Ok((Named::Constant, address)),
        (SHARED_WINDOW, _) => Ok((Named::Shared, inside)),
        (LOCAL_WINDOW, _) => Ok((Named::Local, inside)),
        (0, Named::Generic) => Ok((Named::Global, address)),
        (0, space) => Ok((space, address)),
        _ => {
            let message = format!("out of bounds: {address:#x} is no generic address");
            Err(Wrong::new(MistakeKind::OutOfBounds, message))
        }
    }
}

/// Errors unless the address is a multiple of the access size.
pub(crate) fn check_alignment(address: u64, bytes: usize) -> Result<(), Wrong> {
    if address.is_multiple_of(bytes as u64) {
        return Ok(());
    }
    let message = format!("not aligned: {bytes} bytes at {address:#x}");
    Err(Wrong::new(MistakeKind::Misaligned, message))
}

/// Where each lane of a mask accesses.
pub(crate) fn addresses(
    address: RegisterAddress,
    registers: &Registers,
    mask: LaneMask,
) -> [u64; LANES] {
    let mut addresses = [0; LANES];
    for lane in lanes(mask) {
        addresses[lane] = address.of_lane(registers, lane);
    }
    addresses
}

/// Counts what an access of all lanes of a mask costs.
fn count(
    outside: &mut Outside,
    space: Named,
    addresses: &[u64; LANES],
    mask: LaneMask,
    bytes: usize,
) {
    match space {
        Named::Global | Named::ReadOnly => outside.counts.count_global(addresses, mask, bytes),
        Named::Shared => outside.counts.count_shared(addresses, mask, bytes),
        Named::Generic | Named::Local | Named::Constant => {}
    }
}

fn load(o: &mut PtxOperands, space: Named, element: Element, elements: usize) -> Decoded {
    o.exactly(2)?;
    let (places, address) = (o.target_places(0, elements)?, o.address(1)?);
    Ok(Executable::access(move |warp, outside, mask| {
        let addresses = addresses(address, &warp.registers, mask);
        count(outside, space, &addresses, mask, element.bytes * elements);
        for lane in lanes(mask) {
            let value = load_lane(
                warp,
                outside,
                space,
                addresses[lane],
                (lane, mask),
                element.bytes * elements,
            )
            .map_err(|wrong| wrong.of_lane(lane))?;
            let mut rest = value.as_slice();
            for place in &places {
                let (now, after) = rest.split_at(element.bytes);
                set(&mut warp.registers, *place, lane, element, now);
                rest = after;
            }
        }
        Ok(())
    }))
}

fn load_lane(
    warp: &mut Warp,
    outside: &mut Outside,
    space: Named,
    address: u64,
    (lane, mask): (usize, LaneMask),
    bytes: usize,
) -> Result<[u8; 16], Wrong> {
    check_alignment(address, bytes)?;
    let who = outside.who(warp, lane).of(mask);
    match resolve(space, address)? {
        (Named::Shared, address) => outside.shared.load(address, bytes, AccessKind::Read, &who),
        (Named::Local, address) => warp.local[lane].peek(address, bytes),
        (Named::Constant, address) => outside.variables.peek(address, bytes),
        (Named::ReadOnly, address) => {
            outside
                .global
                .load(address, bytes, AccessKind::ReadOnly, &who)
        }
        (_, address) => outside.global.load(address, bytes, AccessKind::Read, &who),
    }
}

/// Writes an element into a register, which may be wider.
fn set(registers: &mut Registers, place: AnyRegister, lane: usize, element: Element, bytes: &[u8]) {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let mut value = u64::from_le_bytes(wide);
    if element.is_signed {
        let unused = 64 - 8 * element.bytes as u32;
        value = ((value << unused) as i64 >> unused) as u64;
    }
    match place {
        AnyRegister::Word(slot) => registers.set(slot, lane, value as u32),
        AnyRegister::Double(slot) => registers.set(slot, lane, value),
    }
}

fn store(o: &mut PtxOperands, space: Named, element: Element, elements: usize) -> Decoded {
    o.exactly(2)?;
    let (address, places) = (o.address(0)?, o.places(1, elements)?);
    Ok(Executable::access(move |warp, outside, mask| {
        let addresses = addresses(address, &warp.registers, mask);
        let bytes = element.bytes * elements;
        count(outside, space, &addresses, mask, bytes);
        for lane in lanes(mask) {
            let mut value = [0; 16];
            for (place, value) in places.iter().zip(value.chunks_exact_mut(element.bytes)) {
                let wide = value_at(&warp.registers, *place, lane).to_le_bytes();
                value.copy_from_slice(&wide[..element.bytes]);
            }
            store_lane(warp, outside, space, addresses[lane], lane, &value[..bytes])
                .map_err(|wrong| wrong.of_lane(lane))?;
        }
        Ok(())
    }))
}

fn store_lane(
    warp: &mut Warp,
    outside: &mut Outside,
    space: Named,
    address: u64,
    lane: usize,
    value: &[u8],
) -> Result<(), Wrong> {
    check_alignment(address, value.len())?;
    let who = outside.who(warp, lane);
    match resolve(space, address)? {
        (Named::Shared, address) => {
            outside.mbarriers.check_write(address, value.len())?;
            outside.shared.store(address, value, &who)
        }
        (Named::Local, address) => warp.local[lane].poke(address, value),
        (Named::Global, address) => outside.global.store(address, value, &who),
        (space, address) => {
            let message = format!("out of bounds: a write to {address:#x}, which is {space:?}");
            Err(Wrong::new(MistakeKind::OutOfBounds, message))
        }
    }
}

/// A parameter, whose place the parser has found.
fn parameter(o: &mut PtxOperands, bytes: usize) -> Decoded {
    o.exactly(2)?;
    let (place, offset) = (o.target_places(0, 1)?[0], o.parameter(1)?);
    Ok(Executable::access(move |warp, outside, mask| {
        check_alignment(offset as u64, bytes)?;
        let found = offset
            .checked_add(bytes)
            .and_then(|end| outside.parameters.get(offset..end));
        let value = found.ok_or_else(|| {
            let message =
                format!("out of bounds: {bytes} bytes at byte {offset} of the parameters");
            Wrong::new(MistakeKind::OutOfBounds, message)
        })?;
        for lane in lanes(mask) {
            set(&mut warp.registers, place, lane, unsigned(bytes), value);
        }
        Ok(())
    }))
}

fn into_window(o: &mut PtxOperands, window: u64) -> Decoded {
    crate::executable::unary(o, move |address: u64| address | window)
}

fn out_of_window(o: &mut PtxOperands, space: Named) -> Decoded {
    o.exactly(2)?;
    let (target, a) = (o.target::<u64>(0)?, o.source::<u64>(1)?);
    Ok(Executable::access(move |warp, _, mask| {
        for lane in lanes(mask) {
            let address = warp.registers.get(a, lane);
            let converted = match (address, resolve(Named::Generic, address)) {
                // Null stays null.
                (0, _) => 0,
                (_, Ok((Named::Constant, address))) if space == Named::Global => address,
                (_, Ok((found, address))) if found == space => address,
                _ if space == Named::Global && address >> WINDOW == 0 => address,
                _ => {
                    let message = format!("{address:#x} is no address in {space:?} memory");
                    return Err(Wrong::new(MistakeKind::OutOfBounds, message).of_lane(lane));
                }
            };
            warp.registers.set(target, lane, converted);
        }
        Ok(())
    }))
}
