//! A warp's registers: a value for each lane.

use std::array;
use std::marker::PhantomData;

/// Lanes of a warp.
pub(crate) const LANES: usize = 32;

/// A set of lanes: bit `l` stands for lane `l`.
pub(crate) type LaneMask = u32;

/// The lanes of a mask, in order.
pub(crate) fn lanes(mask: LaneMask) -> impl Iterator<Item = usize> {
    (0..LANES).filter(move |lane| mask >> lane & 1 == 1)
}

/// Which file of registers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum File {
    Words,
    Doubles,
    Predicates,
}

/// A register by its file and its place there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Numbered {
    pub(crate) file: File,
    pub(crate) index: usize,
}

/// Constants and special registers live here too; no instruction writes them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registers {
    /// Registers of 32 bits, and those of 16 bits, whose upper half is zero.
    pub(crate) words: Vec<[u32; LANES]>,
    /// Registers of 64 bits.
    pub(crate) doubles: Vec<[u64; LANES]>,
    /// Predicates.
    pub(crate) predicates: Vec<LaneMask>,
    /// By file, for each register the lanes that have a value in it.
    written: [Vec<LaneMask>; 3],
}

/// A register that holds a `T` for each lane.
pub(crate) struct Register<T> {
    pub(crate) index: usize,
    of: PhantomData<fn() -> T>,
}

impl<T> Register<T> {
    pub(crate) fn new(index: usize) -> Register<T> {
        let of = PhantomData;
        Register { index, of }
    }
}

impl<T> Clone for Register<T> {
    fn clone(&self) -> Register<T> {
        *self
    }
}

impl<T> Copy for Register<T> {}

/// A predicate that is read, or its opposite.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    pub(crate) index: usize,
    pub(crate) is_negated: bool,
}

impl Condition {
    /// The lanes in which it holds.
    pub(crate) fn lanes(self, registers: &Registers) -> LaneMask {
        let lanes = registers.predicates[self.index];
        if self.is_negated { !lanes } else { lanes }
    }
}

/// Types of values that a lane's register can hold.
pub(crate) trait LaneValue: Copy + 'static {
    /// The register's own type.
    type Bits: Copy + Default + 'static;
    fn of(bits: Self::Bits) -> Self;
    fn bits(self) -> Self::Bits;
    fn file(registers: &Registers) -> &[[Self::Bits; LANES]];
    fn file_mut(registers: &mut Registers) -> &mut Vec<[Self::Bits; LANES]>;
}

macro_rules! lane {
    ($($type:ty: $bits:ty, $file:ident, $of:expr, $to:expr;)*) => {
        $(impl LaneValue for $type {
            type Bits = $bits;
            #[inline(always)]
            fn of(bits: $bits) -> $type {
                $of(bits)
            }
            #[inline(always)]
            fn bits(self) -> $bits {
                $to(self)
            }
            fn file(registers: &Registers) -> &[[$bits; LANES]] {
                &registers.$file
            }
            fn file_mut(registers: &mut Registers) -> &mut Vec<[$bits; LANES]> {
                &mut registers.$file
            }
        })*
    };
}

lane! {
    u16: u32, words, |bits| bits as u16, |value: u16| u32::from(value);
    i16: u32, words, |bits| bits as i16, |value: i16| u32::from(value as u16);
    u32: u32, words, |bits| bits, |value: u32| value;
    i32: u32, words, |bits| bits as i32, |value: i32| value as u32;
    f32: u32, words, f32::from_bits, f32::to_bits;
    u64: u64, doubles, |bits| bits, |value: u64| value;
    i64: u64, doubles, |bits| bits as i64, |value: i64| value as u64;
    f64: u64, doubles, f64::from_bits, f64::to_bits;
}

impl Registers {
    /// Adds registers that no lane has written, and gives the place of the first.
    pub(crate) fn add(&mut self, file: File, count: usize) -> usize {
        let written = &mut self.written[file as usize];
        let (first, end) = (written.len(), written.len() + count);
        written.resize(end, 0);
        match file {
            File::Words => self.words.resize(end, [0; LANES]),
            File::Doubles => self.doubles.resize(end, [0; LANES]),
            File::Predicates => self.predicates.resize(end, 0),
        }
        first
    }

    /// From now on the lanes of a mask have values in these registers.
    #[inline]
    pub(crate) fn set_written(&mut self, registers: &[Numbered], mask: LaneMask) {
        for Numbered { file, index } in registers {
            self.written[*file as usize][*index] |= mask;
        }
    }

    /// The first of these registers that some lane of a mask has not written, and these lanes.
    #[inline]
    pub(crate) fn unwritten(
        &self,
        registers: &[Numbered],
        mask: LaneMask,
    ) -> Option<(Numbered, LaneMask)> {
        let mut lacking = registers.iter().map(|register| {
            let written = self.written[register.file as usize][register.index];
            (*register, mask & !written)
        });
        lacking.find(|(_, lanes)| *lanes != 0)
    }

    /// All lanes of a register.
    #[inline(always)]
    pub(crate) fn read<T: LaneValue>(&self, slot: Register<T>) -> [T; LANES] {
        T::file(self)[slot.index].map(T::of)
    }

    /// One lane of a register.
    #[inline(always)]
    pub(crate) fn get<T: LaneValue>(&self, slot: Register<T>, lane: usize) -> T {
        T::of(T::file(self)[slot.index][lane])
    }

    /// Writes the lanes of a mask.
    #[inline(always)]
    pub(crate) fn write<T: LaneValue>(
        &mut self,
        slot: Register<T>,
        mask: LaneMask,
        values: [T; LANES],
    ) {
        let values = values.map(T::bits);
        let register = &mut T::file_mut(self)[slot.index];
        *register = match mask {
            LaneMask::MAX => values,
            _ => array::from_fn(|lane| match mask >> lane & 1 {
                1 => values[lane],
                _ => register[lane],
            }),
        };
    }

    /// Writes one lane of a register.
    #[inline(always)]
    pub(crate) fn set<T: LaneValue>(&mut self, slot: Register<T>, lane: usize, value: T) {
        T::file_mut(self)[slot.index][lane] = value.bits();
    }

    /// Writes the lanes of a mask of a predicate.
    #[inline(always)]
    pub(crate) fn write_predicate(
        &mut self,
        slot: Register<bool>,
        mask: LaneMask,
        lanes: LaneMask,
    ) {
        let register = &mut self.predicates[slot.index];
        *register = *register & !mask | lanes & mask;
    }
}
