//! The values that a pickle holds.
//!
//! Containers lie beside each other and refer to each other by number. So a value that is used a million times is held
//! once, deep nesting takes no stack when it is dropped, and a container may lie within itself.

/// Fields that a dictionary may have. No part of a snapshot has more, and each look-up goes through all of them.
const FIELDS_MAX: usize = 64;

/// A plain value. Tuples and sets are lists.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum PickleValue {
    None,
    Bool(bool),
    Int(i64),
    /// Also an integer of more than 64 bits.
    Float(f64),
    Text(TextRange),
    /// Bytes, which no part of a snapshot is.
    Bytes(TextRange),
    List(u32),
    Dict(u32),
}

/// Where a string lies among all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TextRange {
    pub(crate) start: u32,
    pub(crate) len: u32,
}

/// All values of a pickle.
#[derive(Debug)]
pub(crate) struct PickleTree {
    pub(crate) root: PickleValue,
    pub(crate) texts: Vec<u8>,
    /// Elements of lists; keys and values of dictionaries, one after another.
    pub(crate) containers: Vec<Vec<PickleValue>>,
}

impl PickleTree {
    /// The elements, if it is a list.
    pub(crate) fn list(&self, value: PickleValue) -> Option<&[PickleValue]> {
        match value {
            PickleValue::List(number) => Some(&self.containers[number as usize]),
            _ => None,
        }
    }

    /// A field of a dictionary; of two with one name the last, as in Python.
    pub(crate) fn field(&self, value: PickleValue, name: &str) -> Option<PickleValue> {
        let PickleValue::Dict(number) = value else {
            return None;
        };
        let fields = &self.containers[number as usize];
        let mut pairs = fields[..fields.len().min(2 * FIELDS_MAX)].chunks_exact(2);
        let named = |pair: &&[PickleValue]| self.text(pair[0]) == Some(name);
        pairs.rfind(named).map(|pair| pair[1])
    }

    pub(crate) fn text(&self, value: PickleValue) -> Option<&str> {
        let PickleValue::Text(TextRange { start, len }) = value else {
            return None;
        };
        let bytes = &self.texts[start as usize..][..len as usize];
        std::str::from_utf8(bytes).ok()
    }

    pub(crate) fn int(&self, value: PickleValue) -> Option<i64> {
        match value {
            PickleValue::Int(number) => Some(number),
            _ => None,
        }
    }

    pub(crate) fn text_field(&self, value: PickleValue, name: &str) -> Option<&str> {
        self.text(self.field(value, name)?)
    }

    pub(crate) fn int_field(&self, value: PickleValue, name: &str) -> Option<i64> {
        self.int(self.field(value, name)?)
    }

    pub(crate) fn list_field(&self, value: PickleValue, name: &str) -> Option<&[PickleValue]> {
        self.list(self.field(value, name)?)
    }
}
