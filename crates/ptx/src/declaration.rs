//! Declared variables, and where arrays lie in shared memory.

/// The gap between two variables or shared arrays: a whole row of banks, so that it does not change which lanes conflict.
pub(crate) const GAP_BYTES: u64 = 128;

/// An array in shared memory that asks for no alignment may have any below this, by luck.
const LUCK_BYTES: u64 = 1024;

/// Alignment of dynamic shared memory, if a kernel does not name it.
const DYNAMIC_ALIGNMENT: u64 = 16;

/// Bytes of a type such as `.f32`.
pub(crate) fn type_bytes(name: &str) -> Option<usize> {
    let digits = name.trim_start_matches(|first: char| !first.is_ascii_digit());
    digits.parse().ok().map(|bits: usize| bits / 8)
}

/// A declared variable: alignment, bytes of an element, its name, and how many elements if it is an array.
#[derive(Clone, Copy)]
pub(crate) struct Variable<'t> {
    pub(crate) alignment: u64,
    pub(crate) element_bytes: usize,
    pub(crate) name: &'t str,
    pub(crate) elements: Option<usize>,
}

impl Variable<'_> {
    pub(crate) fn bytes(&self) -> usize {
        self.element_bytes * self.elements.unwrap_or(1)
    }
}

/// A kernel's arrays in shared memory.
#[derive(Default)]
pub(crate) struct SharedArrays {
    /// Address, name, bytes.
    pub(crate) fixed: Vec<(u64, String, usize)>,
    /// Where dynamic shared memory lies.
    pub(crate) dynamic: u64,
}

impl SharedArrays {
    /// Places arrays one behind the other. Those without elements are dynamic, and lie behind all others.
    pub(crate) fn new(declared: &[Variable]) -> SharedArrays {
        let mut shared = SharedArrays::default();
        let mut alignment = None;
        for array in declared {
            if array.elements == Some(0) {
                alignment = alignment.max(Some(array.alignment));
                continue;
            }
            let base = shared.behind(array.alignment);
            shared.fixed.push((base, array.name.into(), array.bytes()));
        }
        shared.dynamic = shared.behind(alignment.unwrap_or(DYNAMIC_ALIGNMENT));
        shared
    }

    /// The address behind all arrays: no better aligned than it has to be, so that an access that asks for more shows.
    fn behind(&self, alignment: u64) -> u64 {
        let last = self.fixed.last();
        let end = last.map_or(0, |(base, _, bytes)| base + *bytes as u64);
        let multiple = 2 * alignment.max(LUCK_BYTES);
        (end + GAP_BYTES + alignment).next_multiple_of(multiple) - alignment
    }

    /// The address of an array.
    pub(crate) fn address(&self, array: &Variable) -> u64 {
        let found = self.fixed.iter().find(|(_, name, _)| name == array.name);
        found.map_or(self.dynamic, |(address, _, _)| *address)
    }
}
