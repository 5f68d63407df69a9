//! Sizes of memory as people write them, such as `24GiB`, `80GB`, `1500000`, `95%`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// An amount of memory, absolute or relative to a device.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "String")]
pub enum Size {
    /// This many bytes, at least 1.
    Bytes(u64),
    /// This share of the device's memory in percent, above 0 and at most 100.
    Percent(f64),
}

/// A text that is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// The number or its unit is unknown.
    #[error("`{0}` is not a size; write for example 24GiB, 80GB, 1500000 (bytes) or 95%")]
    Malformed(String),
    /// A size without bytes.
    #[error("`{0}` is not a size; it must be above 0")]
    NotPositive(String),
    /// More than the device has.
    #[error("`{0}` is not a size; a share of the device is at most 100%")]
    AboveWhole(String),
    /// More bytes than a size can count.
    #[error("`{0}` is not a size; it is more than 2^64 bytes")]
    TooLarge(String),
}

/// Units and their bytes. A size is shown in the first one that divides it without remainder.
const UNITS: [(&str, u64); 8] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
];

impl Size {
    /// The size in bytes on a device with `device_bytes` of memory.
    pub fn bytes_of(self, device_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => (device_bytes as f64 * percent / 100.0) as u64,
        }
    }
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let malformed = || SizeError::Malformed(text.to_owned());
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !matches!(c, '0'..='9' | '.' | '-' | '+' | '_'))
            .unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(digits);
        let number = number.replace('_', "");
        let amount: f64 = number.parse().map_err(|_| malformed())?;
        let unit = unit.trim();
        if amount <= 0.0 {
            return Err(SizeError::NotPositive(text.to_owned()));
        }
        if unit == "%" {
            return match amount <= 100.0 {
                true => Ok(Self::Percent(amount)),
                false => Err(SizeError::AboveWhole(text.to_owned())),
            };
        }
        let unit_bytes = match unit {
            "" | "B" => 1,
            _ => UNITS
                .iter()
                .find(|(name, _)| name.eq_ignore_ascii_case(unit))
                .map(|(_, bytes)| *bytes)
                .ok_or_else(malformed)?,
        };
        let too_large = || SizeError::TooLarge(text.to_owned());
        if !number.contains('.') {
            let count: u64 = number.parse().map_err(|_| too_large())?;
            return count
                .checked_mul(unit_bytes)
                .map(Self::Bytes)
                .ok_or_else(too_large);
        }
        let bytes = (amount * unit_bytes as f64).round();
        match bytes {
            _ if unit_bytes == 1 => Err(malformed()),
            _ if bytes < 1.0 => Err(SizeError::NotPositive(text.to_owned())),
            _ if bytes >= u64::MAX as f64 => Err(too_large()),
            _ => Ok(Self::Bytes(bytes as u64)),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Percent(percent) => f.pad(&format!("{percent}%")),
            Self::Bytes(bytes) => {
                let unit = UNITS
                    .iter()
                    .find(|(_, unit)| bytes != 0 && bytes.is_multiple_of(*unit));
                match unit {
                    Some((name, unit)) => f.pad(&format!("{}{name}", bytes / unit)),
                    None => f.pad(&bytes.to_string()),
                }
            }
        }
    }
}

/// A size in a file: a text, or bytes.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Bytes(i64),
}

impl TryFrom<Written> for Size {
    type Error = SizeError;

    fn try_from(written: Written) -> Result<Size, SizeError> {
        match written {
            Written::Text(text) => text.parse(),
            Written::Bytes(bytes) => bytes.to_string().parse(),
        }
    }
}

impl From<Size> for String {
    fn from(size: Size) -> String {
        size.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        let cases = [
            ("24GiB", Size::Bytes(24 << 30)),
            ("80GB", Size::Bytes(80_000_000_000)),
            ("1500000", Size::Bytes(1_500_000)),
            ("1_500_000B", Size::Bytes(1_500_000)),
            ("1.5 gib", Size::Bytes(3 << 29)),
            ("512MiB", Size::Bytes(512 << 20)),
            ("95%", Size::Percent(95.0)),
            ("12.5%", Size::Percent(12.5)),
            // An f64 does not have this integer, so it must be counted exactly.
            ("9007199254740993", Size::Bytes(9_007_199_254_740_993)),
        ];
        for (text, size) in cases {
            assert_eq!(text.parse(), Ok(size), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_the_reason() {
        let cases = [
            ("0", "above 0"),
            ("-5GiB", "above 0"),
            ("0%", "above 0"),
            ("0.0001KB", "above 0"),
            ("101%", "at most 100%"),
            ("1.5", "not a size"),
            ("24G", "24GiB"),
            ("lots", "not a size"),
            ("", "not a size"),
            ("99999999999999999999", "2^64"),
            ("99999999TiB", "2^64"),
            ("99999999.5TiB", "2^64"),
        ];
        for (text, reason) in cases {
            let error = text.parse::<Size>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn sizes_are_read_back_as_they_are_written() {
        let bytes = [1, 999, 1000, 1024, 1_500_000, 24 << 30, 80_000_000_000];
        for bytes in bytes.into_iter().chain([u64::MAX]) {
            let size = Size::Bytes(bytes);
            assert_eq!(size.to_string().parse(), Ok(size), "{size}");
        }
        assert_eq!(Size::Bytes(24 << 30).to_string(), "24GiB");
        assert_eq!(Size::Bytes(80_000_000_000).to_string(), "80GB");
        let share = Size::Percent(12.5);
        assert_eq!(share.to_string().parse(), Ok(share));
    }

    #[test]
    fn a_share_is_relative_to_the_device() {
        assert_eq!(Size::Percent(50.0).bytes_of(80), 40);
        assert_eq!(Size::Bytes(7).bytes_of(80), 7);
    }
}
