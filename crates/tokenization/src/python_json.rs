//! `tojson` as transformers has it: Python's `json.dumps` with `ensure_ascii=False`.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io::{self, Write};

/// How Python writes JSON.
struct Python {
    /// What lines begin with for each level; none: everything is on one line.
    indent: Option<String>,
    level: usize,
    item_separator: String,
    key_separator: String,
    ascii: bool,
    /// Whether the list or object that ends has something in it.
    is_filled: bool,
}

impl Python {
    fn begin(&mut self, out: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.is_filled = false;
        out.write_all(bracket)
    }

    fn next(&mut self, out: &mut (impl Write + ?Sized), first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item_separator.as_bytes())?;
        }
        self.is_filled = true;
        self.line(out)
    }

    fn end(&mut self, out: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.is_filled {
            self.line(out)?;
        }
        self.is_filled = true;
        out.write_all(bracket)
    }

    fn line(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        match &self.indent {
            None => Ok(()),
            Some(indent) => write!(out, "\n{}", indent.repeat(self.level)),
        }
    }
}

impl Formatter for Python {
    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, value: f64) -> io::Result<()> {
        out.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        out: &mut W,
        text: &str,
    ) -> io::Result<()> {
        for piece in text.split_inclusive(|char: char| self.ascii && !(' '..='~').contains(&char)) {
            let last = piece.chars().next_back().unwrap_or(' ');
            if !self.ascii || (' '..='~').contains(&last) {
                out.write_all(piece.as_bytes())?;
                continue;
            }
            out.write_all(&piece.as_bytes()[..piece.len() - last.len_utf8()])?;
            for unit in last.encode_utf16(&mut [0; 2]) {
                write!(out, "\\u{unit:04x}")?;
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.next(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key_separator.as_bytes())
    }
}

/// The fewest digits that are the number; with an exponent below 1e-4 and from 1e16 on, of two digits at least.
pub(crate) fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse() {
        Ok(exponent @ (..-4 | 16..)) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", i32::abs(exponent))
        }
        _ => format!("{value:?}"),
    }
}

/// The filter `tojson`, with the options of Python's `json.dumps` that transformers passes on: `ensure_ascii`, `indent`,
/// `separators`, `sort_keys`.
pub(crate) fn tojson(
    value: &Value,
    indent: Option<String>,
    [ascii, separators, sort_keys]: [Option<Value>; 3],
) -> Result<String, Error> {
    let usual_item = if indent.is_some() { "," } else { ", " };
    let failed =
        |reason: String| Error::new(ErrorKind::BadSerialization, format!("tojson: {reason}"));
    let separators = match separators.filter(|separators| !separators.is_none()) {
        Some(separators) => separators.try_iter()?.map(|one| one.to_string()).collect(),
        None => vec![usual_item.into(), ": ".into()],
    };
    let [item_separator, key_separator]: [String; 2] = separators
        .try_into()
        .map_err(|_| failed("`separators` are two texts".into()))?;
    let is_true = |option: Option<Value>| option.is_some_and(|option| option.is_true());
    let mut json = json_of(value)?;
    if is_true(sort_keys) {
        json.sort_all_objects();
    }
    let formatter = Python {
        indent,
        level: 0,
        item_separator,
        key_separator,
        ascii: is_true(ascii),
        is_filled: false,
    };
    let mut out = Vec::new();
    json.serialize(&mut Serializer::with_formatter(&mut out, formatter))
        .map_err(|error| failed(error.to_string()))?;
    String::from_utf8(out)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// The value as JSON; undefined ones, functions and what is only gone through are refused, as Python refuses them.
fn json_of(value: &Value) -> Result<serde_json::Value, Error> {
    let items = || value.try_iter().map(|items| items.collect::<Vec<Value>>());
    Ok(match value.kind() {
        ValueKind::Seq => {
            let items: Result<Vec<_>, Error> = items()?.iter().map(json_of).collect();
            items?.into()
        }
        ValueKind::Map if is_dictionary(value) => {
            let entry = |key: &Value| {
                let name = match key.kind() {
                    ValueKind::None => "null".into(),
                    ValueKind::Bool => key.is_true().to_string(),
                    _ => key.to_string(),
                };
                Ok((name, json_of(&value.get_item(key)?)?))
            };
            let entries: Result<serde_json::Map<_, _>, Error> =
                items()?.iter().map(entry).collect();
            entries?.into()
        }
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::String => {
            serde_json::to_value(value).map_err(|error| {
                Error::new(ErrorKind::BadSerialization, format!("tojson: {error}"))
            })?
        }
        kind => {
            let reason = format!("tojson: there is no JSON for a value of type {kind}");
            return Err(Error::new(ErrorKind::BadSerialization, reason));
        }
    })
}

/// Whether a value is a plain dictionary: a loop or a namespace has attributes, and is none.
pub(crate) fn is_dictionary(value: &Value) -> bool {
    let name = value.as_object().map_or("", |object| object.type_name());
    value.kind() == ValueKind::Map && !name.ends_with("::Namespace") && !name.ends_with("::Loop")
}
