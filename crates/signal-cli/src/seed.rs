//! Seeds on the command line.

use std::time::{SystemTime, UNIX_EPOCH};

/// Decimal, or hexadecimal with 0x as a run prints it.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.map_err(|error| error.to_string())
}

/// A seed from the clock's low bits: enough to have other data in each run.
pub(crate) fn from_clock() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_decimal_or_hexadecimal() {
        assert_eq!(["7", "0x2a", "18446744073709551615"].map(parse), [Ok(7), Ok(42), Ok(u64::MAX)]);
        for text in ["", "x", "0x", "-1", "1.5", "2a", "18446744073709551616"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
