//! Forms of values (`int`, `uuid`, `lower`), which convert all spellings of a value to one.

use uuid::Uuid;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Int,
    Uuid,
    Lower,
}

impl Form {
    pub(super) fn named(name: &str) -> Option<Self> {
        Some(match name {
            "int" => Self::Int,
            "uuid" => Self::Uuid,
            "lower" => Self::Lower,
            _ => return None,
        })
    }

    /// Returns the value in its one spelling, or `None` if it is not of this form.
    pub(super) fn apply(self, value: &str) -> Option<String> {
        match self {
            // Parses as `i128`, which is wide enough for every integer type of handlers. Their parsers accept the same
            // spellings.
            Self::Int => value.parse::<i128>().ok().map(|number| number.to_string()),
            Self::Uuid => Uuid::try_parse(value).ok().map(|uuid| uuid.to_string()),
            Self::Lower => Some(value.to_lowercase()),
        }
    }

    pub(super) const fn expected(self) -> &'static str {
        match self {
            Self::Int => "an integer",
            Self::Uuid => "a UUID",
            Self::Lower => "text",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_of_a_value_are_one() {
        for spelling in ["42", "042", "+42", "00042"] {
            assert_eq!(Form::Int.apply(spelling).as_deref(), Some("42"), "{spelling}");
        }
        assert_eq!(Form::Int.apply("-0").as_deref(), Some("0"));
        for wrong in ["", "4 2", "42.0", "0x2a", "\u{0664}", "4_2", &"9".repeat(60)] {
            assert_eq!(Form::Int.apply(wrong), None, "{wrong}");
        }
        let uuid = "6fa459ea-ee8a-3ca4-894e-db77e160355e";
        for spelling in [
            uuid.to_owned(),
            uuid.to_uppercase(),
            uuid.replace('-', ""),
            format!("{{{uuid}}}"),
            format!("urn:uuid:{uuid}"),
        ] {
            assert_eq!(Form::Uuid.apply(&spelling).as_deref(), Some(uuid), "{spelling}");
        }
        assert_eq!(Form::Lower.apply("ÀB").as_deref(), Some("àb"));
    }
}
