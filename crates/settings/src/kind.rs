//! The kinds of values of keys: how they are read from the command line, checked, and described in errors.

use crate::Result;
use toml::Value;

use super::choices::AUTO;
use super::device::Device;
use super::error::ConfigError;
use super::size::{Size, SizeError};
use data::Inputs;

/// The kind of a key's value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    /// An integer of at least this.
    Whole(i64),
    /// An integer from the first to the second.
    WholeUpTo(i64, i64),
    /// `auto`, or an integer of at least this.
    WholeOrAuto(i64),
    /// A number in a range.
    Real(Range),
    /// `true` or `false`.
    Bool,
    /// Any text.
    Text,
    /// One of these names.
    Choice(&'static [&'static str]),
    /// One of these names, or the path of a folder.
    NameOrFolder(&'static [&'static str]),
    /// The name of a device.
    Device,
    /// A size of memory.
    Size,
    /// `auto`, or a size of memory.
    SizeOrAuto,
    /// Paths of data, either all with a weight or all without: a text or a list.
    Inputs,
    /// A list of texts.
    Texts,
    /// A list of integers of at least 0.
    Wholes,
    /// A list of this many finite numbers.
    Reals(usize),
    /// A list of finite numbers above 0.
    Positives,
    /// A list of two numbers above 0, the first of which may be `auto`.
    AutoAndReal,
    /// A table of texts with any keys.
    TextTable,
    /// A table of integers of at least this, with any keys.
    WholeTable(i64),
    /// A table of numbers in this range, with any keys.
    RealTable(Range),
}

/// The range of a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Range {
    /// Finite and above 0.
    Positive,
    /// Above 0, infinity included.
    PositiveOrInfinite,
    /// Finite and at least 0.
    NotNegative,
    /// At least 0 and below 1.
    BelowOne,
    /// At least 0 and at most 1.
    Share,
    /// Finite and at most 0.
    NotPositive,
}

/// Names that choices no longer have, and what to write instead.
const RETIRED: [(&str, &str); 1] = [(
    "cudnn",
    "cuDNN's attention is gone, since flash was faster wherever both were measured: write flash",
)];

impl Kind {
    /// Reads a value from the command line: as TOML if the kind allows it, else as the text itself.
    pub fn parse(self, text: &str) -> Value {
        let parsed = text.parse::<Value>().ok();
        match (self, parsed) {
            (
                Kind::Text | Kind::Choice(_) | Kind::NameOrFolder(_) | Kind::Device,
                Some(Value::String(quoted)),
            ) => Value::String(quoted),
            (Kind::Text | Kind::Choice(_) | Kind::NameOrFolder(_) | Kind::Device, _) => {
                Value::String(text.to_owned())
            }
            (Kind::Inputs, Some(value @ (Value::String(_) | Value::Array(_)))) => value,
            (Kind::Inputs, _) => Value::String(text.to_owned()),
            (_, Some(value)) => value,
            // TOML requires digits on both sides of the point.
            (Kind::Real(_), None) => text
                .parse()
                .map_or_else(|_| Value::String(text.to_owned()), Value::Float),
            (_, None) => Value::String(text.to_owned()),
        }
    }

    /// Checks a value.
    ///
    /// # Errors
    /// If it does not fit the kind. `place` says where it was given.
    pub fn check(self, key: &str, value: &Value, place: &str) -> Result {
        if self.allows(value) {
            return Ok(());
        }
        let is_fp16 = matches!(value.as_str(), Some("fp16" | "f16" | "float16" | "half"));
        if is_fp16 && key == "train.dtype" {
            return Err(ConfigError::Fp16 {
                key: key.to_owned(),
                place: place.to_owned(),
            });
        }
        Err(ConfigError::Value {
            key: key.to_owned(),
            value: value.to_string(),
            place: place.to_owned(),
            expected: self.expected(value),
        })
    }

    fn allows(self, value: &Value) -> bool {
        match self {
            Kind::Whole(least) => value.as_integer().is_some_and(|number| number >= least),
            Kind::WholeUpTo(least, most) => value
                .as_integer()
                .is_some_and(|number| (least..=most).contains(&number)),
            Kind::WholeOrAuto(least) => {
                value.as_str() == Some(AUTO) || Kind::Whole(least).allows(value)
            }
            Kind::Real(range) => {
                let whole = value.as_integer().map(|number| number as f64);
                whole
                    .or(value.as_float())
                    .is_some_and(|number| range.holds(number))
            }
            Kind::Bool => value.is_bool(),
            Kind::Text => value.is_str(),
            Kind::Choice(names) => value.as_str().is_some_and(|name| names.contains(&name)),
            Kind::NameOrFolder(names) => value
                .as_str()
                .is_some_and(|text| !text.trim().is_empty() && misspelt(text, names).is_none()),
            Kind::Device => value
                .as_str()
                .is_some_and(|name| name.parse::<Device>().is_ok()),
            Kind::Size => Self::size(value).is_some_and(|size| size.is_ok()),
            Kind::SizeOrAuto => value.as_str() == Some(AUTO) || Kind::Size.allows(value),
            Kind::Inputs => value.clone().try_into::<Inputs>().is_ok(),
            Kind::Texts => value
                .as_array()
                .is_some_and(|list| list.iter().all(Value::is_str)),
            Kind::Wholes => value
                .as_array()
                .is_some_and(|list| list.iter().all(|one| Kind::Whole(0).allows(one))),
            Kind::Reals(count) => value.as_array().is_some_and(|list| {
                let is_finite = |one: &Value| {
                    let whole = one.as_integer().map(|number| number as f64);
                    whole.or(one.as_float()).is_some_and(f64::is_finite)
                };
                list.len() == count && list.iter().all(is_finite)
            }),
            Kind::Positives => value.as_array().is_some_and(|list| {
                let mut list = list.iter();
                list.all(|one| Kind::Real(Range::Positive).allows(one))
            }),
            Kind::AutoAndReal => value.as_array().is_some_and(|list| match &list[..] {
                [first, second] => {
                    let above = |one: &Value| Kind::Real(Range::Positive).allows(one);
                    (first.as_str() == Some(AUTO) || above(first)) && above(second)
                }
                _ => false,
            }),
            Kind::TextTable => value
                .as_table()
                .is_some_and(|table| table.values().all(Value::is_str)),
            Kind::WholeTable(least) => Kind::Whole(least).allows_all_of(value),
            Kind::RealTable(range) => Kind::Real(range).allows_all_of(value),
        }
    }

    /// Whether a value is a table of allowed values.
    fn allows_all_of(self, value: &Value) -> bool {
        let table = value.as_table();
        table.is_some_and(|table| table.values().all(|one| self.allows(one)))
    }

    fn size(value: &Value) -> Option<Result<Size, SizeError>> {
        match value {
            Value::String(text) => Some(text.parse()),
            Value::Integer(bytes) => Some(bytes.to_string().parse()),
            _ => None,
        }
    }

    /// What the value must be, to follow "it must be" in a sentence.
    fn expected(self, value: &Value) -> String {
        match self {
            Kind::Whole(0) => "a whole number, 0 or more".to_owned(),
            Kind::Whole(least) => format!("a whole number of at least {least}"),
            Kind::WholeUpTo(least, most) => format!("a whole number from {least} to {most}"),
            Kind::WholeOrAuto(least) => format!("{AUTO}, or a whole number of at least {least}"),
            Kind::Real(range) => range.expected().to_owned(),
            Kind::Bool => "true or false".to_owned(),
            Kind::Text => "a text in quotes".to_owned(),
            Kind::Choice(names) => {
                let retired = RETIRED
                    .iter()
                    .find(|(name, _)| value.as_str() == Some(*name));
                let why = retired.map_or(String::new(), |(_, why)| format!("; {why}"));
                format!("one of {}{why}", names.join(", "))
            }
            Kind::NameOrFolder(names) => {
                let folder = value.as_str().filter(|text| !text.is_empty());
                let folder = folder.map_or_else(String::new, |text| format!(" (such as ./{text})"));
                format!("{}, or the path of a folder{folder}", names.join(", "))
            }
            Kind::Device => "cpu, cuda or cuda:N".to_owned(),
            Kind::SizeOrAuto => format!("{AUTO}, or {}", Kind::Size.expected(value)),
            Kind::Size => match Self::size(value) {
                Some(Err(SizeError::NotPositive(_))) => "a size of memory above 0".to_owned(),
                Some(Err(SizeError::AboveWhole(_))) => "at most 100%".to_owned(),
                Some(Err(SizeError::TooLarge(_))) => "below 2^64 bytes".to_owned(),
                _ => "a size of memory, for example 24GiB, 80GB, 1500000 or 95%".to_owned(),
            },
            Kind::Inputs => {
                "a path, or several as a list; all with a weight above 0 (PATH:WEIGHT), or none"
                    .to_owned()
            }
            Kind::Texts => "a list of texts in quotes".to_owned(),
            Kind::Wholes => "a list of whole numbers, such as [0, 1]".to_owned(),
            Kind::Reals(count) => format!("a list of {count} finite numbers"),
            Kind::Positives => "a list of numbers above 0, such as [1.0, 2.5]".to_owned(),
            Kind::AutoAndReal => {
                format!("a list of two numbers above 0, the first of which may be \"{AUTO}\"")
            }
            Kind::TextTable => "a table whose values are texts".to_owned(),
            Kind::WholeTable(least) => {
                format!("a table whose values are whole numbers of at least {least}")
            }
            Kind::RealTable(range) => format!("a table whose values are each {}", range.expected()),
        }
    }
}

/// The name that a misspelt text was probably meant to be. A text with a `/` or a `.` is a path.
fn misspelt<'a>(text: &str, names: &[&'a str]) -> Option<&'a str> {
    let lower = text.to_lowercase();
    let is_meant = |name: &&&str| strsim::damerau_levenshtein(&lower, name) <= 2;
    let is_name = names.contains(&text) || text.contains(['/', '.']);
    // Names that DeepSpeed uses, and words that mean yes or no elsewhere.
    let is_of_others =
        ["cpu", "host", "nvme", "true", "false", "off", "auto"].contains(&&lower[..]);
    let of_others = || {
        let mut pinned = names.iter().filter(|name| **name == "pinned");
        is_of_others.then(|| pinned.next().copied())?
    };
    let meant = || names.iter().find(is_meant).copied().or_else(of_others);
    (!is_name).then(meant)?
}

impl Range {
    fn holds(self, number: f64) -> bool {
        match self {
            Range::Positive => number.is_finite() && number > 0.0,
            Range::PositiveOrInfinite => number > 0.0,
            Range::NotNegative => number.is_finite() && number >= 0.0,
            Range::BelowOne => (0.0..1.0).contains(&number),
            Range::Share => (0.0..=1.0).contains(&number),
            Range::NotPositive => number.is_finite() && number <= 0.0,
        }
    }

    fn expected(self) -> &'static str {
        match self {
            Range::Positive => "a finite number above 0",
            Range::PositiveOrInfinite => "a number above 0, or inf",
            Range::NotNegative => "a finite number, 0 or more",
            Range::BelowOne => "a number from 0 to below 1",
            Range::Share => "a number from 0 to 1",
            Range::NotPositive => "a finite number, 0 or less",
        }
    }
}
