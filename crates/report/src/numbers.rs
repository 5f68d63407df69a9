//! Formats numbers for people.

/// A number with thousands separators.
pub(crate) fn grouped(value: f64, decimals: usize) -> String {
    let plain = format!("{value:.decimals$}");
    let (whole, fraction) = plain.split_at(plain.find('.').unwrap_or(plain.len()));
    let (sign, digits) = whole.split_at(usize::from(whole.starts_with('-')));
    let mut apart = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            apart.push(',');
        }
        apart.push(digit);
    }
    format!("{sign}{apart}{fraction}")
}

/// Bytes with all digits.
pub(crate) fn exact(bytes: u64) -> String {
    grouped(bytes as f64, 0)
}

/// `is` less `was`, with a sign.
pub(crate) fn difference(was: u64, is: u64) -> String {
    match is.cmp(&was) {
        std::cmp::Ordering::Equal => "0".into(),
        std::cmp::Ordering::Less => format!("-{}", exact(was - is)),
        std::cmp::Ordering::Greater => format!("+{}", exact(is - was)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_stand_apart() {
        for (value, decimals, text) in [
            (0.0, 0, "0"),
            (999.0, 0, "999"),
            (-20_782_080.0, 0, "-20,782,080"),
            (1234.5678, 2, "1,234.57"),
        ] {
            assert_eq!(grouped(value, decimals), text);
        }
    }
}
