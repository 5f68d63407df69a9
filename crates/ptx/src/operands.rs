//! An instruction's operands, and the registers and constants that they stand for.

use crate::registers::{
    Condition, File, LANES, LaneMask, LaneValue, Numbered, Register, Registers,
};
use std::array;
use std::collections::HashMap;

/// An operand as it is written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum PtxOperand<'t> {
    /// A register, a special register, a variable or a label.
    Name(&'t str),
    /// `!%p1`.
    Not(&'t str),
    Integer(u64),
    Float(u32),
    Double(u64),
    /// `{%f1, %f2}`.
    Vector(Vec<PtxOperand<'t>>),
    /// `%r1|%p1`.
    Pair(&'t str, &'t str),
    /// `[%rd1+16]`.
    Indirect(&'t str, i64),
}

/// Special registers, stored first among the words, in this order.
pub(crate) const SPECIAL: [&str; 13] = [
    "%tid.x",
    "%tid.y",
    "%tid.z",
    "%ntid.x",
    "%ntid.y",
    "%ntid.z",
    "%ctaid.x",
    "%ctaid.y",
    "%ctaid.z",
    "%nctaid.x",
    "%nctaid.y",
    "%nctaid.z",
    "%laneid",
];

/// Registers that are declared together: `%f<36>`, or one.
struct Family {
    file: File,
    first: usize,
    count: Option<usize>,
}

/// A place for a value of either width.
#[derive(Clone, Copy)]
pub(crate) enum AnyRegister {
    Word(Register<u32>),
    Double(Register<u64>),
}

/// An address in a register plus a constant.
#[derive(Clone, Copy)]
pub(crate) struct RegisterAddress {
    base: AnyRegister,
    offset: i64,
}

impl RegisterAddress {
    pub(crate) fn of_lane(self, registers: &Registers, lane: usize) -> u64 {
        let base = match self.base {
            AnyRegister::Word(slot) => u64::from(registers.get(slot, lane)),
            AnyRegister::Double(slot) => registers.get(slot, lane),
        };
        base.wrapping_add_signed(self.offset)
    }
}

/// The names of a kernel, and its registers as they are before its first instruction.
pub(crate) struct Names<'t> {
    scopes: Vec<HashMap<&'t str, Family>>,
    constants: HashMap<(bool, u64), usize>,
    pub(crate) registers: Registers,
    /// Addresses of variables.
    pub(crate) variables: HashMap<&'t str, u64>,
    /// Offsets of parameters.
    pub(crate) parameters: HashMap<&'t str, usize>,
    /// Numbers of labels, in the order in which they are met.
    pub(crate) labels: HashMap<&'t str, usize>,
}

impl<'t> Names<'t> {
    pub(crate) fn new(variables: HashMap<&'t str, u64>) -> Names<'t> {
        let mut names = Names {
            scopes: Vec::new(),
            constants: HashMap::new(),
            registers: Registers::default(),
            variables,
            parameters: HashMap::new(),
            labels: HashMap::new(),
        };
        for _ in SPECIAL {
            names.add_constant(0u32);
        }
        names
    }

    /// A register that has a value before the first instruction.
    fn add_constant<T: LaneValue>(&mut self, value: T) -> usize {
        let file = file_of::<T>();
        let index = self.registers.add(file, 1);
        self.registers
            .write(Register::new(index), LaneMask::MAX, [value; LANES]);
        self.registers
            .set_written(&[Numbered { file, index }], LaneMask::MAX);
        index
    }

    pub(crate) fn open_scope(&mut self) {
        self.scopes.push(HashMap::new());
    }

    /// Leaves the innermost scope; true if it was the last.
    pub(crate) fn close_scope(&mut self) -> bool {
        self.scopes.pop();
        self.scopes.is_empty()
    }

    /// Declares one register, or `name0` to `name{count-1}`.
    pub(crate) fn declare(&mut self, kind: &str, name: &'t str, count: Option<usize>) {
        let file = match kind {
            ".pred" => File::Predicates,
            kind if kind.ends_with("64") => File::Doubles,
            _ => File::Words,
        };
        let first = self.registers.add(file, count.unwrap_or(1));
        let family = Family { file, first, count };
        let scope = self.scopes.last_mut().expect("a body is a scope");
        scope.insert(name, family);
    }

    /// A register by its name.
    fn register(&self, name: &str) -> Option<Numbered> {
        let numbered = |file, index| Some(Numbered { file, index });
        if let Some(index) = SPECIAL.iter().position(|special| *special == name) {
            return numbered(File::Words, index);
        }
        let prefix = name.trim_end_matches(|end: char| end.is_ascii_digit());
        let number = name[prefix.len()..].parse().ok();
        self.scopes.iter().rev().find_map(|scope| {
            if let Some(family) = scope.get(name).filter(|family| family.count.is_none()) {
                return numbered(family.file, family.first);
            }
            let family = scope.get(prefix)?;
            let number = number.filter(|number| Some(*number) < family.count)?;
            numbered(family.file, family.first + number)
        })
    }

    fn constant<T: LaneValue<Bits: Into<u64>>>(&mut self, value: T) -> Register<T> {
        let key = (size_of::<T::Bits>() == 8, value.bits().into());
        if let Some(index) = self.constants.get(&key) {
            return Register::new(*index);
        }
        let index = self.add_constant(value);
        self.constants.insert(key, index);
        Register::new(index)
    }

    /// The number of a label.
    pub(crate) fn label(&mut self, name: &'t str) -> usize {
        let next = self.labels.len();
        *self.labels.entry(name).or_insert(next)
    }
}

/// The operands of one instruction.
pub(crate) struct PtxOperands<'a, 't> {
    pub(crate) names: &'a mut Names<'t>,
    pub(crate) list: Vec<PtxOperand<'t>>,
    /// The registers that the instruction reads and writes, as far as they have been asked for.
    pub(crate) read: Vec<Numbered>,
    pub(crate) written: Vec<Numbered>,
}

/// The file that holds values of a type.
fn file_of<T: LaneValue>() -> File {
    match size_of::<T::Bits>() {
        8 => File::Doubles,
        _ => File::Words,
    }
}

/// Types of lanes whose constants can be written.
pub(crate) trait Constant: LaneValue<Bits: Into<u64>> {
    /// A written integer.
    fn of_integer(value: u64) -> Option<Self>;
    /// A written float, by its bits.
    fn of_float(_bits: u32) -> Option<Self> {
        None
    }
    /// A written double, by its bits.
    fn of_double(_bits: u64) -> Option<Self> {
        None
    }
}

macro_rules! integers {
    ($($type:ty),*) => {
        $(impl Constant for $type {
            fn of_integer(value: u64) -> Option<$type> {
                Some(value as $type)
            }
        })*
    };
}

integers!(u16, i16, i32, i64);

impl Constant for u32 {
    fn of_integer(value: u64) -> Option<u32> {
        Some(value as u32)
    }
    fn of_float(bits: u32) -> Option<u32> {
        Some(bits)
    }
}

impl Constant for u64 {
    fn of_integer(value: u64) -> Option<u64> {
        Some(value)
    }
    fn of_double(bits: u64) -> Option<u64> {
        Some(bits)
    }
}

impl Constant for f32 {
    fn of_integer(_value: u64) -> Option<f32> {
        None
    }
    fn of_float(bits: u32) -> Option<f32> {
        Some(f32::from_bits(bits))
    }
}

impl Constant for f64 {
    fn of_integer(_value: u64) -> Option<f64> {
        None
    }
    fn of_double(bits: u64) -> Option<f64> {
        Some(f64::from_bits(bits))
    }
}

impl<'t> PtxOperands<'_, 't> {
    /// Refuses any other number of operands.
    pub(crate) fn exactly(&self, count: usize) -> Result<(), String> {
        match self.list.len() {
            found if found == count => Ok(()),
            found => Err(format!("{found} operands in place of {count}")),
        }
    }

    pub(crate) fn operand(&self, index: usize) -> Result<PtxOperand<'t>, String> {
        let operand = self.list.get(index).cloned();
        operand.ok_or_else(|| format!("operand {} is missing", index + 1))
    }

    fn slot<T: LaneValue>(&self, name: &str) -> Result<Register<T>, String> {
        let wanted = file_of::<T>();
        match self.names.register(name) {
            Some(Numbered { file, index }) if file == wanted => Ok(Register::new(index)),
            Some(Numbered { file, .. }) => Err(format!(
                "`{name}` is one of the {file:?}, not the {wanted:?}"
            )),
            None => Err(format!("`{name}` is not declared")),
        }
    }

    /// Where a result goes.
    pub(crate) fn target<T: LaneValue>(&mut self, index: usize) -> Result<Register<T>, String> {
        let name = match self.operand(index)? {
            PtxOperand::Name(name) => name,
            other => return Err(format!("{other:?} is no register")),
        };
        self.written(name)
    }

    /// Where the result of a shuffle goes: a register, and the predicate behind its `|`, if there is one.
    pub(crate) fn shuffle_target(
        &mut self,
        index: usize,
    ) -> Result<(Register<u32>, Option<Register<bool>>), String> {
        match self.operand(index)? {
            PtxOperand::Pair(name, predicate) => {
                let predicate = self.written_predicate(predicate)?;
                Ok((self.written(name)?, Some(predicate)))
            }
            _ => Ok((self.target(index)?, None)),
        }
    }

    /// The predicate behind `_|`, where an election says who is elected.
    pub(crate) fn elected_target(&mut self, index: usize) -> Result<Register<bool>, String> {
        match self.operand(index)? {
            PtxOperand::Pair("_", predicate) => self.written_predicate(predicate),
            other => Err(format!("{other:?} is no `_|` and a predicate")),
        }
    }

    fn written<T: LaneValue>(&mut self, name: &str) -> Result<Register<T>, String> {
        if SPECIAL.contains(&name) {
            return Err(format!("`{name}` cannot be written"));
        }
        self.written.extend(self.names.register(name));
        self.slot(name)
    }

    fn written_predicate(&mut self, name: &str) -> Result<Register<bool>, String> {
        self.written.extend(self.names.register(name));
        self.predicate(name).map(Register::new)
    }

    /// A source operand: a register, a constant or a variable's address.
    pub(crate) fn source<T: Constant>(&mut self, index: usize) -> Result<Register<T>, String> {
        let operand = self.operand(index)?;
        self.source_of(&operand)
    }

    fn source_of<T: Constant>(&mut self, operand: &PtxOperand<'t>) -> Result<Register<T>, String> {
        let constant = match *operand {
            PtxOperand::Name(name) => match self.names.variables.get(name) {
                Some(address) => T::of_integer(*address),
                None => {
                    self.read.extend(self.names.register(name));
                    return self.slot(name);
                }
            },
            PtxOperand::Integer(value) => T::of_integer(value),
            PtxOperand::Float(bits) => T::of_float(bits),
            PtxOperand::Double(bits) => T::of_double(bits),
            _ => None,
        };
        let constant = constant.ok_or_else(|| format!("{operand:?} has another type"))?;
        Ok(self.names.constant(constant))
    }

    fn vector(&self, index: usize) -> Result<Vec<PtxOperand<'t>>, String> {
        match self.operand(index)? {
            PtxOperand::Vector(elements) => Ok(elements),
            other => Err(format!("{other:?} is no vector")),
        }
    }

    /// The sources of a vector of `N`.
    pub(crate) fn sources<T: Constant, const N: usize>(
        &mut self,
        index: usize,
    ) -> Result<[Register<T>; N], String> {
        let elements = self.elements(index, N)?;
        let mut slots = [Register::new(0); N];
        for (slot, element) in slots.iter_mut().zip(&elements) {
            *slot = self.source_of(element)?;
        }
        Ok(slots)
    }

    /// The registers of a vector of `N` where results go.
    pub(crate) fn targets<T: LaneValue, const N: usize>(
        &mut self,
        index: usize,
    ) -> Result<[Register<T>; N], String> {
        let elements = self.elements(index, N)?;
        let mut slots = [Register::new(0); N];
        for (slot, element) in slots.iter_mut().zip(&elements) {
            *slot = self.written(self.target_name(element)?)?;
        }
        Ok(slots)
    }

    /// The name of a register that an element of a destination is.
    fn target_name(&self, element: &PtxOperand<'t>) -> Result<&'t str, String> {
        match element {
            PtxOperand::Name(name) if !self.names.variables.contains_key(name) => Ok(name),
            _ => Err(format!("{element:?} cannot be written")),
        }
    }

    /// The elements of a vector of so many, or one element alone.
    fn elements(&self, index: usize, count: usize) -> Result<Vec<PtxOperand<'t>>, String> {
        let elements = match count {
            1 => vec![self.operand(index)?],
            _ => self.vector(index)?,
        };
        match elements.len() {
            found if found == count => Ok(elements),
            found => Err(format!("{found} elements in place of {count}")),
        }
    }

    /// The places of a vector of so many elements, or of one element alone, which are read.
    pub(crate) fn places(
        &mut self,
        index: usize,
        count: usize,
    ) -> Result<Vec<AnyRegister>, String> {
        let elements = self.elements(index, count)?;
        elements.iter().map(|element| self.place(element)).collect()
    }

    /// The same of those that are written.
    pub(crate) fn target_places(
        &mut self,
        index: usize,
        count: usize,
    ) -> Result<Vec<AnyRegister>, String> {
        let elements = self.elements(index, count)?;
        let place = |element: &PtxOperand<'t>| {
            let name = self.target_name(element)?;
            match self.any_register(name)? {
                AnyRegister::Word(_) => self.written(name).map(AnyRegister::Word),
                AnyRegister::Double(_) => self.written(name).map(AnyRegister::Double),
            }
        };
        elements.iter().map(place).collect()
    }

    fn any_register(&self, name: &str) -> Result<AnyRegister, String> {
        match self.names.register(name) {
            Some(Numbered {
                file: File::Words,
                index,
            }) => Ok(AnyRegister::Word(Register::new(index))),
            Some(Numbered {
                file: File::Doubles,
                index,
            }) => Ok(AnyRegister::Double(Register::new(index))),
            _ => Err(format!("`{name}` is no register that memory takes")),
        }
    }

    fn place(&mut self, element: &PtxOperand<'t>) -> Result<AnyRegister, String> {
        match element {
            PtxOperand::Name(name) => {
                self.read.extend(self.names.register(name));
                self.any_register(name)
            }
            PtxOperand::Double(_) => self.source_of(element).map(AnyRegister::Double),
            constant => self.source_of(constant).map(AnyRegister::Word),
        }
    }

    /// Where a predicate goes.
    pub(crate) fn predicate_target(&mut self, index: usize) -> Result<Register<bool>, String> {
        match self.operand(index)? {
            PtxOperand::Name(name) => self.written_predicate(name),
            other => Err(format!("{other:?} is no predicate")),
        }
    }

    /// A predicate that is read.
    pub(crate) fn condition(&mut self, index: usize) -> Result<Condition, String> {
        let (name, is_negated) = match self.operand(index)? {
            PtxOperand::Name(name) => (name, false),
            PtxOperand::Not(name) => (name, true),
            PtxOperand::Integer(value) => {
                let registers = &mut self.names.registers;
                let index = registers.add(File::Predicates, 1);
                registers.predicates[index] = if value == 0 { 0 } else { LaneMask::MAX };
                let is_negated = false;
                return Ok(Condition { index, is_negated });
            }
            other => return Err(format!("{other:?} is no predicate")),
        };
        self.read.extend(self.names.register(name));
        let index = self.predicate(name)?;
        Ok(Condition { index, is_negated })
    }

    fn predicate(&self, name: &str) -> Result<usize, String> {
        match self.names.register(name) {
            Some(Numbered {
                file: File::Predicates,
                index,
            }) => Ok(index),
            _ => Err(format!("`{name}` is no predicate")),
        }
    }

    /// A place in memory.
    pub(crate) fn address(&mut self, index: usize) -> Result<RegisterAddress, String> {
        let PtxOperand::Indirect(name, offset) = self.operand(index)? else {
            return Err(format!("operand {} is no address", index + 1));
        };
        let variable = self.names.variables.get(name).copied();
        let base = match variable {
            Some(address) => AnyRegister::Double(self.names.constant(address)),
            None => self.place(&PtxOperand::Name(name))?,
        };
        Ok(RegisterAddress { base, offset })
    }

    /// The offset of a parameter.
    pub(crate) fn parameter(&self, index: usize) -> Result<usize, String> {
        match self.operand(index)? {
            PtxOperand::Indirect(name, offset) => match self.names.parameters.get(name) {
                Some(start) => Ok(start.wrapping_add_signed(offset as isize)),
                None => Err(format!("`{name}` is no parameter")),
            },
            other => Err(format!("{other:?} is no parameter")),
        }
    }

    /// An integer that is written out.
    pub(crate) fn integer(&self, index: usize) -> Result<u64, String> {
        match self.operand(index)? {
            PtxOperand::Integer(value) => Ok(value),
            other => Err(format!("{other:?} is no integer constant")),
        }
    }

    /// The number of a label.
    pub(crate) fn label(&mut self, index: usize) -> Result<usize, String> {
        match self.operand(index)? {
            PtxOperand::Name(name) => Ok(self.names.label(name)),
            other => Err(format!("{other:?} is no label")),
        }
    }
}

/// The value of a lane's place, of either width.
pub(crate) fn value_at(registers: &Registers, place: AnyRegister, lane: usize) -> u64 {
    match place {
        AnyRegister::Word(slot) => registers.get(slot, lane).into(),
        AnyRegister::Double(slot) => registers.get(slot, lane),
    }
}

/// One value for every lane.
pub(crate) fn by_lane<T>(value: impl FnMut(usize) -> T) -> [T; LANES] {
    array::from_fn(value)
}
