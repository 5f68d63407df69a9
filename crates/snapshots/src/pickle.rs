//! Reads pickles of protocols 0 to 5, builds no objects and runs nothing.
//!
//! Opcodes are those of Python's `pickletools`. Each that would import, call or look up something is refused by name.

use crate::tree::{PickleTree, PickleValue, TextRange};
use std::collections::HashMap;
use std::io::{BufRead, Read};

/// Bytes that the values of one pickle may take. With what a table takes that grows, this stays below 1 GiB.
pub(crate) const HELD_BYTES_MAX: u64 = 768 << 20;

/// The longest line of an opcode whose operand is a line and no text.
const LINE_BYTES_MAX: u64 = 1 << 10;

/// The bytes of an entry of the memo, with its share of the table's free places.
const MEMO_ENTRY_BYTES: u64 = 64;

/// Why a pickle was not read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "each message says what its fields are")]
pub enum PickleError {
    /// It would do something.
    #[error(
        "at byte {at} it asks Python to {wish}, and a snapshot is only dictionaries, lists, texts and numbers; nothing was \
         run, and no other program should load this file unless you trust who wrote it"
    )]
    Active { wish: String, at: u64 },
    /// It ends too early.
    #[error("it ends in the middle, after {at} bytes: write it again, or copy it whole")]
    CutOff { at: u64 },
    /// It takes too much memory.
    #[error(
        "its values take more than {} MiB: record fewer steps, or give `_record_memory_history` a smaller max_entries",
        HELD_BYTES_MAX >> 20
    )]
    TooLarge,
    /// It is no pickle.
    #[error("it is no pickle: {what} at byte {at}")]
    Foreign { what: &'static str, at: u64 },
    /// The file cannot be read.
    #[error("{0}")]
    Read(#[from] std::io::Error),
}

/// Reads one pickle.
///
/// # Errors
/// [`PickleError`].
pub(crate) fn read_pickle(
    input: impl BufRead,
    held_bytes_max: u64,
) -> Result<PickleTree, PickleError> {
    let mut reader = Reader {
        input,
        at: 0,
        tree: PickleTree {
            root: PickleValue::None,
            texts: Vec::new(),
            containers: Vec::new(),
        },
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        room: held_bytes_max,
    };
    while !reader.step()? {}
    reader.tree.root = reader.pop()?;
    Ok(reader.tree)
}

struct Reader<R> {
    input: R,
    at: u64,
    tree: PickleTree,
    stack: Vec<PickleValue>,
    /// Heights of the stack below which nothing is popped until a mark's opcode comes.
    marks: Vec<usize>,
    memo: HashMap<u32, PickleValue>,
    /// Bytes that values may still take.
    room: u64,
}

/// Bytes by which a vector grows when elements are added.
fn growth<T>(vector: &Vec<T>, more: usize) -> u64 {
    let needed = vector.len() + more;
    match needed <= vector.capacity() {
        true => 0,
        false => {
            let capacity = needed.max(2 * vector.capacity());
            ((capacity - vector.capacity()) * size_of::<T>()) as u64
        }
    }
}

impl<R: BufRead> Reader<R> {
    fn step(&mut self) -> Result<bool, PickleError> {
        let [opcode] = self.bytes()?;
        match opcode {
            b'.' => return Ok(true),
            0x80 => drop(self.bytes::<1>()?),
            0x95 => drop(self.bytes::<8>()?),
            0x98 => {}
            b'N' => self.push(PickleValue::None)?,
            0x88 | 0x89 => self.push(PickleValue::Bool(opcode == 0x88))?,
            b'J' => self.signed(4)?,
            b'K' => self.unsigned(1)?,
            b'M' => self.unsigned(2)?,
            0x8a => {
                let [len] = self.bytes()?;
                self.signed(len.into())?;
            }
            0x8b => {
                let len = self.length(4)?;
                self.signed(len)?;
            }
            b'I' | b'L' | b'F' => self.number_line(opcode)?,
            b'G' => {
                let number = f64::from_be_bytes(self.bytes()?);
                self.push(PickleValue::Float(number))?;
            }
            b'X' | b'T' => self.text(4)?,
            b'U' | 0x8c => self.text(1)?,
            0x8d => self.text(8)?,
            b'B' => self.raw(4)?,
            b'C' => self.raw(1)?,
            0x8e | 0x96 => self.raw(8)?,
            b'V' | b'S' => self.text_line(opcode == b'S')?,
            b']' | 0x8f => self.container(0, PickleValue::List)?,
            b')' => self.container(0, PickleValue::List)?,
            b'}' => self.container(0, PickleValue::Dict)?,
            0x85..=0x87 => self.container(usize::from(opcode - 0x84), PickleValue::List)?,
            b'(' => {
                self.take_room(growth(&self.marks, 1))?;
                self.marks.push(self.stack.len());
            }
            b'l' | b't' | 0x91 => {
                let count = self.above_mark()?;
                self.container(count, PickleValue::List)?;
            }
            b'd' => {
                let count = self.above_mark()?;
                self.container(self.pairs(count)?, PickleValue::Dict)?;
            }
            b'a' => self.append(1)?,
            b'e' | 0x90 => {
                let count = self.above_mark()?;
                self.append(count)?;
            }
            b's' => self.append_to_dict(2)?,
            b'u' => {
                let count = self.above_mark()?;
                self.append_to_dict(count)?;
            }
            b'0' => drop(self.pop()?),
            b'1' => {
                let count = self.above_mark()?;
                self.stack.truncate(self.stack.len() - count);
            }
            b'2' => {
                let top = self.pop()?;
                self.stack.push(top);
                self.push(top)?;
            }
            b'p' | b'q' | b'r' | 0x94 => self.remember(opcode)?,
            b'g' | b'h' | b'j' => self.recall(opcode)?,
            _ => return Err(self.refusal(opcode)?),
        }
        Ok(false)
    }

    /// Names the action of an opcode that is refused.
    fn refusal(&mut self, opcode: u8) -> Result<PickleError, PickleError> {
        let at = self.at - 1;
        let wish = match opcode {
            b'c' | b'i' => {
                let [module, name] = [self.line(LINE_BYTES_MAX)?, self.line(LINE_BYTES_MAX)?];
                let verb = if opcode == b'i' { "call" } else { "import" };
                format!("{verb} `{}.{}`", shown(&module), shown(&name))
            }
            0x93 => {
                let [name, module] = [self.pop()?, self.pop()?];
                let text = |value| shown(self.tree.text(value).unwrap_or("?").as_bytes());
                format!("import `{}.{}`", text(module), text(name))
            }
            b'R' => "call a function".into(),
            b'o' | 0x81 | 0x92 => "make an object".into(),
            b'b' => "set the state of an object".into(),
            0x82..=0x84 => {
                let code = self.length(1 << (opcode - 0x82))?;
                format!("look up what is registered as extension {code}")
            }
            b'P' => {
                let id = self.line(LINE_BYTES_MAX)?;
                format!("look up the persistent object `{}`", shown(&id))
            }
            b'Q' => "look up a persistent object".into(),
            0x97 => "take a buffer that is not in the file".into(),
            _ => return Ok(self.foreign("an unknown opcode")),
        };
        Ok(PickleError::Active { wish, at })
    }

    fn foreign(&self, what: &'static str) -> PickleError {
        PickleError::Foreign { what, at: self.at }
    }

    fn take_room(&mut self, bytes: u64) -> Result<(), PickleError> {
        self.room = self.room.checked_sub(bytes).ok_or(PickleError::TooLarge)?;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let mut bytes = [0; N];
        let cut_off = PickleError::CutOff { at: self.at };
        self.input
            .read_exact(&mut bytes)
            .map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => cut_off,
                _ => error.into(),
            })?;
        self.at += N as u64;
        Ok(bytes)
    }

    /// An unsigned number of `width` bytes.
    fn length(&mut self, width: usize) -> Result<u64, PickleError> {
        let mut length = 0;
        for place in 0..width {
            let [byte] = self.bytes()?;
            length |= u64::from(byte) << (8 * place);
        }
        Ok(length)
    }

    fn unsigned(&mut self, width: usize) -> Result<(), PickleError> {
        let number = self.length(width)?;
        self.push(PickleValue::Int(number as i64))
    }

    /// A number in two's complement; of more than eight bytes only that it is large.
    fn signed(&mut self, width: u64) -> Result<(), PickleError> {
        if width == 0 {
            return self.push(PickleValue::Int(0));
        }
        if width > 8 {
            let held = self.tree.texts.len();
            self.read_texts(width)?;
            self.tree.texts.truncate(held);
            return self.push(PickleValue::Float(f64::INFINITY));
        }
        let shift = 64 - 8 * width as u32;
        let number = self.length(width as usize)?;
        self.push(PickleValue::Int((number << shift) as i64 >> shift))
    }

    /// Bytes up to the end of the line, without it.
    fn line(&mut self, most: u64) -> Result<Vec<u8>, PickleError> {
        let mut line = Vec::new();
        let most = most.min(self.room);
        let read = self
            .input
            .by_ref()
            .take(most)
            .read_until(b'\n', &mut line)? as u64;
        self.at += read;
        match line.pop() {
            Some(b'\n') => Ok(line),
            _ if read == most => Err(self.foreign("a line without an end")),
            _ => Err(PickleError::CutOff { at: self.at }),
        }
    }

    fn number_line(&mut self, opcode: u8) -> Result<(), PickleError> {
        let line = self.line(LINE_BYTES_MAX)?;
        let text = std::str::from_utf8(&line).map_or("", str::trim);
        let text = text.strip_suffix('L').unwrap_or(text);
        let value = match (opcode, text) {
            (b'I', "00" | "01") => Some(PickleValue::Bool(text == "01")),
            (b'F', _) => text.parse().ok().map(PickleValue::Float),
            _ => match text.parse() {
                Ok(number) => Some(PickleValue::Int(number)),
                Err(_) => text.parse().ok().map(PickleValue::Float),
            },
        };
        self.push(value.ok_or_else(|| self.foreign("a line that is no number"))?)
    }

    /// Adds bytes of the input to the texts.
    fn read_texts(&mut self, len: u64) -> Result<TextRange, PickleError> {
        let start = self.tree.texts.len();
        // A length that the file does not have takes no memory: only what there is, is read.
        if len > self.room {
            return Err(PickleError::TooLarge);
        }
        self.take_room(growth(&self.tree.texts, len as usize))?;
        let read = self
            .input
            .by_ref()
            .take(len)
            .read_to_end(&mut self.tree.texts)? as u64;
        self.at += read;
        match read == len {
            true => self.range(start),
            false => Err(PickleError::CutOff { at: self.at }),
        }
    }

    /// The texts from a place on.
    fn range(&self, start: usize) -> Result<TextRange, PickleError> {
        let range = |start: usize| u32::try_from(start).map_err(|_| PickleError::TooLarge);
        Ok(TextRange {
            start: range(start)?,
            len: range(self.tree.texts.len() - start)?,
        })
    }

    fn text(&mut self, width: usize) -> Result<(), PickleError> {
        let len = self.length(width)?;
        let range = self.read_texts(len)?;
        self.push(PickleValue::Text(range))
    }

    fn raw(&mut self, width: usize) -> Result<(), PickleError> {
        let len = self.length(width)?;
        let range = self.read_texts(len)?;
        self.push(PickleValue::Bytes(range))
    }

    /// A text of protocol 0, in quotes if it is one of Python 2.
    fn text_line(&mut self, is_quoted: bool) -> Result<(), PickleError> {
        let line = self.line(HELD_BYTES_MAX / 4)?;
        let inner = match line.as_slice() {
            [b'\'', inner @ .., b'\''] | [b'"', inner @ .., b'"'] if is_quoted => inner,
            line => line,
        };
        // Unicode in latin-1 is at most twice as long in UTF-8.
        self.take_room(growth(&self.tree.texts, 2 * inner.len()))?;
        let start = self.tree.texts.len();
        let text = without_escapes(inner);
        self.tree.texts.extend_from_slice(text.as_bytes());
        let range = self.range(start)?;
        self.push(PickleValue::Text(range))
    }

    fn push(&mut self, value: PickleValue) -> Result<(), PickleError> {
        self.take_room(growth(&self.stack, 1))?;
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<PickleValue, PickleError> {
        self.below(1)?;
        Ok(self
            .stack
            .pop()
            .expect("the stack has a value above its mark"))
    }

    /// The height below the topmost values, which all lie above the last mark.
    fn below(&self, count: usize) -> Result<usize, PickleError> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let height = self.stack.len().checked_sub(count);
        let height = height.filter(|height| *height >= floor);
        height.ok_or_else(|| self.foreign("an opcode without its values"))
    }

    /// The number of values above the last mark, which goes.
    fn above_mark(&mut self) -> Result<usize, PickleError> {
        let mark = self.marks.pop();
        let mark = mark.ok_or_else(|| self.foreign("an opcode without its mark"))?;
        Ok(self.stack.len() - mark)
    }

    fn pairs(&self, count: usize) -> Result<usize, PickleError> {
        match count % 2 {
            0 => Ok(count),
            _ => Err(self.foreign("a key without its value")),
        }
    }

    /// Makes a container of the topmost values.
    fn container(&mut self, count: usize, kind: fn(u32) -> PickleValue) -> Result<(), PickleError> {
        let from = self.below(count)?;
        let number = self.tree.containers.len() as u32;
        let elements = (count * size_of::<PickleValue>()) as u64;
        self.take_room(growth(&self.tree.containers, 1) + elements)?;
        self.tree
            .containers
            .push(self.stack.drain(from..).collect());
        self.push(kind(number))
    }

    /// Adds the topmost values to the list below them.
    fn append(&mut self, count: usize) -> Result<(), PickleError> {
        let from = self.below(count + 1)? + 1;
        match self.stack[from - 1] {
            PickleValue::List(number) => self.extend(number, from),
            _ => Err(self.foreign("an element of what is no list")),
        }
    }

    fn append_to_dict(&mut self, count: usize) -> Result<(), PickleError> {
        let from = self.below(self.pairs(count)? + 1)? + 1;
        match self.stack[from - 1] {
            PickleValue::Dict(number) => self.extend(number, from),
            _ => Err(self.foreign("a field of what is no dictionary")),
        }
    }

    fn extend(&mut self, number: u32, from: usize) -> Result<(), PickleError> {
        let more = self.stack.len() - from;
        self.take_room(growth(&self.tree.containers[number as usize], more))?;
        self.tree.containers[number as usize].extend(self.stack.drain(from..));
        Ok(())
    }

    fn memo_key(&mut self, opcode: u8) -> Result<u32, PickleError> {
        let key = match opcode {
            b'q' | b'h' => self.length(1)?,
            b'r' | b'j' => self.length(4)?,
            0x94 => self.memo.len() as u64,
            _ => {
                let line = self.line(LINE_BYTES_MAX)?;
                let text = std::str::from_utf8(&line).unwrap_or("");
                let key = text.trim().parse();
                key.map_err(|_| self.foreign("a line that is no number"))?
            }
        };
        u32::try_from(key).map_err(|_| self.foreign("a place that no memo has"))
    }

    fn remember(&mut self, opcode: u8) -> Result<(), PickleError> {
        let key = self.memo_key(opcode)?;
        self.take_room(MEMO_ENTRY_BYTES)?;
        let top = self.pop()?;
        self.stack.push(top);
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, opcode: u8) -> Result<(), PickleError> {
        let key = self.memo_key(opcode)?;
        let value = self.memo.get(&key).copied();
        self.push(value.ok_or_else(|| self.foreign("a place of the memo with nothing in it"))?)
    }
}

/// Foreign bytes as a text for a message: short, and without control characters.
fn shown(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let printed = text.chars().map(|letter| match letter.is_control() {
        true => '?',
        false => letter,
    });
    printed.take(80).collect()
}

/// A text of protocol 0, whose characters are bytes, with Unicode escapes (four digits after `\u`, eight after `\U`) replaced. Other escapes,
/// which only Python 2 wrote, stay.
fn without_escapes(line: &[u8]) -> String {
    let mut text = String::with_capacity(line.len());
    let mut at = 0;
    while at < line.len() {
        let digits = match &line[at..] {
            [b'\\', b'u', ..] => 4,
            [b'\\', b'U', ..] => 8,
            _ => 0,
        };
        let hex = line
            .get(at + 2..at + 2 + digits)
            .filter(|hex| !hex.is_empty());
        let code = hex.and_then(|hex| u32::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match code.and_then(char::from_u32) {
            Some(letter) => {
                text.push(letter);
                at += 2 + digits;
            }
            None => {
                text.push(char::from(line[at]));
                at += 1;
            }
        }
    }
    text
}
