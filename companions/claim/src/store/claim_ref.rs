//! References to claims, which later calls take, and their text form for use outside the process.

use std::borrow::Cow;
use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::Arc;

use uuid::Uuid;

use crate::error::ClaimError;
use crate::spec::Inner;
use crate::spec::ids::{OwnerToken, RowId, RowKey};

/// The prefix of the text, with the version of the format.
const FORM: &str = "lc1";

/// The longest text that is parsed, in bytes.
const LONGEST: usize = 1 << 20;

/// A reference to a claim, which later calls take. Cheap to clone.
///
/// Its text form outlives the process. A system that can store a few bytes per row can settle the claim later, or
/// in another process, through any store of the same table.
///
/// ```
/// use leasehold_claim::{ClaimError, ClaimRef, ClaimStore, Claimed, Outcome};
///
/// /// The receipt that a broker sends along with a message ..
/// fn receipt(claimed: &Claimed) -> String {
///     claimed.claim.to_string()
/// }
///
/// /// .. and gets back as its acknowledgement. `Superseded`: too late, another worker has the message.
/// async fn acknowledge(store: &dyn ClaimStore, receipt: &str) -> Result<(), ClaimError> {
///     let claim: ClaimRef = receipt.parse()?;
///     store.settle_one(&claim, Outcome::Done).await.map(drop)
/// }
/// ```
///
/// The text consists of ASCII letters, digits and `-`, `.`, `_`, `~`, so it needs no escaping in a URL or a
/// header. It begins with the version of the format. A row takes its id, its queue and up to 25 bytes. Each byte
/// of a character other than an ASCII letter, a digit or `-` takes three. A text above 1 MiB is refused: a group
/// of 10,000 rows fits unless its ids are long.
///
/// The holder of the text can end the claim, so give it only to trusted parties. It cannot be guessed if owners are
/// random. Only owners that are numbers of a sequence are predictable.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ClaimRef {
    /// The owner, which is unique to this claim.
    pub owner: OwnerToken,
    /// The rows of the claim, each with the epoch under which it was taken.
    pub rows: Arc<[(RowKey, i64)]>,
}

impl ClaimRef {
    /// Returns whether a table of this spec can have such a claim. A claim from text might be of another table.
    pub(crate) fn fits(&self, spec: &Inner) -> bool {
        let is_number = matches!(self.owner, OwnerToken::Number(_));
        let is_row = |key: &RowKey| {
            let texts = [key.queue.as_deref(), key.id.as_text()];
            key.id.kind() == spec.id_type
                && key.queue.is_some() == spec.queue.is_some()
                && !texts.into_iter().flatten().any(|text| text.contains('\0'))
        };
        is_number == spec.owner_sequence.is_some() && self.rows.iter().all(|(key, _)| is_row(key))
    }
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.owner {
            OwnerToken::Uuid(owner) => write!(f, "{FORM}.u{}", owner.simple())?,
            OwnerToken::Number(owner) => write!(f, "{FORM}.i{owner}")?,
        }
        for (key, epoch) in &*self.rows {
            write!(f, ".{epoch}~")?;
            match &key.id {
                RowId::Int(id) => write!(f, "i{id}")?,
                RowId::Uuid(id) => write!(f, "u{}", id.simple())?,
                RowId::Text(id) => escape(f, 't', id)?,
            }
            if let Some(queue) = &key.queue {
                escape(f, '~', queue)?;
            }
        }
        Ok(())
    }
}

impl FromStr for ClaimRef {
    type Err = ClaimError;

    /// Parses the output of [`Display`](fmt::Display).
    ///
    /// # Errors
    ///
    /// [`Malformed`](ClaimError::Malformed) for any other text, for example if it was cut off or is of a later version.
    fn from_str(text: &str) -> Result<Self, ClaimError> {
        if text.len() > LONGEST {
            return Err(malformed(format!("it has {} bytes, and {LONGEST} are the most", text.len())));
        }
        let mut parts = text.split('.');
        let form = parts.next().unwrap_or_default();
        if form != FORM {
            let begin: String = form.chars().take(20).collect();
            return Err(malformed(format!("it begins with {begin:?} instead of {FORM:?}")));
        }
        let owner = parts.next().and_then(owner).ok_or_else(|| malformed("its owner cannot be read"))?;
        let rows = parts.enumerate().map(|(at, part)| {
            row(part).ok_or_else(|| malformed(format!("its row number {} cannot be read", at + 1)))
        });
        Ok(Self { owner, rows: rows.collect::<Result<_, _>>()? })
    }
}

fn malformed(why: impl Into<Cow<'static, str>>) -> ClaimError {
    ClaimError::Malformed { what: "a claim", why: why.into().into_owned() }
}

fn owner(text: &str) -> Option<OwnerToken> {
    match typed(text)? {
        RowId::Uuid(owner) => Some(OwnerToken::Uuid(owner)),
        RowId::Int(owner) => Some(OwnerToken::Number(owner)),
        RowId::Text(_) => None,
    }
}

fn row(text: &str) -> Option<(RowKey, i64)> {
    let mut parts = text.split('~');
    let (epoch, id, queue) = (number(parts.next()?)?, typed(parts.next()?)?, parts.next());
    let queue = queue.map(unescape);
    // Whether the text ends after these parts, and its queue, if any, can be read.
    let is_whole = parts.next().is_none() && queue.as_ref().is_none_or(Option::is_some);
    is_whole.then(|| (RowKey { queue: queue.flatten().map(Arc::from), id }, epoch))
}

fn typed(text: &str) -> Option<RowId> {
    let (kind, value) = text.split_at_checked(1)?;
    match kind {
        "i" => number(value).map(RowId::Int),
        "u" if value.len() == 32 => Uuid::try_parse(value).ok().map(RowId::Uuid),
        "t" => unescape(value).map(|id| RowId::Text(id.into())),
        _ => None,
    }
}

/// Parses a number only in the form in which it is written, because each claim has exactly one text.
fn number(text: &str) -> Option<i64> {
    text.parse().ok().filter(|number: &i64| number.to_string() == text)
}

fn escape(f: &mut fmt::Formatter<'_>, mark: char, text: &str) -> fmt::Result {
    f.write_char(mark)?;
    for byte in text.bytes() {
        match byte {
            b'-' | b'0'..=b'9' | b'A'..=b'Z' | b'a'..=b'z' => f.write_char(byte.into())?,
            _ => write!(f, "_{byte:02X}")?,
        }
    }
    Ok(())
}

fn unescape(text: &str) -> Option<String> {
    let mut pieces = text.split('_');
    let mut bytes = pieces.next()?.as_bytes().to_vec();
    for piece in pieces {
        let (hex, rest) = piece.split_at_checked(2)?;
        let byte = u8::from_str_radix(hex, 16).ok().filter(|byte| format!("{byte:02X}") == hex)?;
        bytes.push(byte);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // An error here fails the test.

    use proptest::prelude::*;

    use super::*;

    fn claim(owner: OwnerToken, rows: &[(RowKey, i64)]) -> ClaimRef {
        ClaimRef { owner, rows: rows.into() }
    }

    /// The form must not change, because later versions have to read the texts of today.
    #[test]
    fn the_text_of_a_claim() {
        let id = Uuid::from_u128(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        let rows = [
            (RowKey::new(-7), i64::MAX),
            (RowKey::queued("mail.out", "a~b_c é"), -1),
            (RowKey::queued("", id), 0),
        ];
        let text = "lc1.u0123456789abcdef0123456789abcdef.9223372036854775807~i-7.-1~ta_7Eb_5Fc_20_C3_A9~mail_2Eout\
                    .0~u0123456789abcdef0123456789abcdef~";
        assert_eq!(claim(OwnerToken::Uuid(id), &rows).to_string(), text);
        assert_eq!(text.parse::<ClaimRef>().unwrap(), claim(OwnerToken::Uuid(id), &rows));
        let none = claim(OwnerToken::Number(i64::MIN), &[]);
        assert_eq!(none.to_string().parse::<ClaimRef>().unwrap(), none);
    }

    #[test]
    fn what_is_no_claim_is_refused() {
        let good = claim(OwnerToken::Number(5), &[(RowKey::queued("q", "x y"), 3)]).to_string();
        assert_eq!(good, "lc1.i5.3~tx_20y~q");
        for (text, why) in [
            ("", "begins with \"\""),
            ("lc2.i5.3~i1", "begins with \"lc2\""),
            ("lc1", "owner"),
            ("lc1.", "owner"),
            ("lc1.t5.3~i1", "owner"),
            ("lc1.u5.3~i1", "owner"),
            ("lc1.i05.3~i1", "owner"),
            ("lc1.i5.", "row number 1"),
            ("lc1.i5.3~i1.", "row number 2"),
            ("lc1.i5.3", "row number 1"),
            ("lc1.i5.3~", "row number 1"),
            ("lc1.i5.+3~i1", "row number 1"),
            ("lc1.i5.3~i1~q~", "row number 1"),
            ("lc1.i5.3~i99999999999999999999", "row number 1"),
            ("lc1.i5.3~tx_2", "row number 1"),
            ("lc1.i5.3~tx_2g", "row number 1"),
            ("lc1.i5.3~tx_7e", "row number 1"),
            ("lc1.i5.3~tx_é", "row number 1"),
            ("lc1.i5.3~t_FF", "row number 1"),
            ("lc1.i5.3~éa", "row number 1"),
            ("lc1.i5.3~i1~_", "row number 1"),
        ] {
            let error = text.parse::<ClaimRef>().unwrap_err();
            assert!(matches!(&error, ClaimError::Malformed { .. }), "{text}: {error:?}");
            assert!(error.to_string().contains(why), "{text}: {error}");
        }
        let long = format!("lc1.i5.3~t{}", "x".repeat(LONGEST));
        assert!(long.parse::<ClaimRef>().unwrap_err().to_string().contains("1048576 are the most"));
        assert!(long[..LONGEST].parse::<ClaimRef>().is_ok());
    }

    #[test]
    fn a_claim_of_ten_thousand_rows_can_be_read() {
        let rows: Vec<_> = (0..10_000).map(|_| (RowKey::new(Uuid::new_v4()), i64::MIN)).collect();
        let claim = claim(OwnerToken::Uuid(Uuid::new_v4()), &rows);
        assert_eq!(claim.to_string().parse::<ClaimRef>().unwrap(), claim);
    }

    proptest! {
        #[test]
        fn every_claim_is_read_as_it_was(
            owner in prop_oneof![
                any::<u128>().prop_map(|owner| OwnerToken::Uuid(Uuid::from_u128(owner))),
                any::<i64>().prop_map(OwnerToken::Number),
            ],
            rows in prop::collection::vec((id(), prop::option::of(".*"), any::<i64>()), 0..4),
        ) {
            let rows = rows.into_iter().map(|(id, queue, epoch): (RowId, Option<String>, i64)| {
                (RowKey { queue: queue.map(Arc::from), id }, epoch)
            });
            let claim = ClaimRef { owner, rows: rows.collect() };
            let text = claim.to_string();
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "-._~".contains(c);
            prop_assert!(text.chars().all(is_plain), "{}", text);
            prop_assert_eq!(text.parse::<ClaimRef>().unwrap(), claim);
        }

        #[test]
        fn what_is_read_is_written_alike(text in "lc1\\.i5(\\.[0-9~it_A-F-]{0,12}){0,2}") {
            if let Ok(claim) = text.parse::<ClaimRef>() {
                prop_assert_eq!(claim.to_string(), text);
            }
        }
    }

    fn id() -> impl Strategy<Value = RowId> {
        prop_oneof![
            any::<i64>().prop_map(RowId::Int),
            any::<u128>().prop_map(|id| RowId::Uuid(Uuid::from_u128(id))),
            prop_oneof![any::<String>(), ".*", "[~._%\\\\/ \0\n-]{0,9}"]
                .prop_map(|id| RowId::Text(id.into())),
        ]
    }
}
