//! The holders of a shared number in the dictionary: one line for each, with server process, holder id, token, time,
//! permit and label. The dictionary has one row for each number, whose column `holder` has all lines.
//!
//! Lines never fail to be read, even if written by hand. An older version reads such a row as a holder without an id.

use std::sync::Arc;

use leasehold_api::{FencingToken, HolderId};

/// Stands in a line for the permit of a reader.
const NO_PERMIT: &str = "-";

/// One holder of a shared number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HolderLine {
    pub(crate) pid: i32,
    pub(crate) holder: HolderId,
    pub(crate) token: FencingToken,
    /// Time of the grant, in microseconds of Unix time.
    pub(crate) since: i64,
    /// The number of the permit, if the hold is one.
    pub(crate) permit: Option<u32>,
    pub(crate) label: Option<Arc<str>>,
}

impl HolderLine {
    /// Returns the text of the line.
    pub(crate) fn text(&self) -> String {
        let Self { pid, holder, token, since, permit, label } = self;
        let permit = permit.map_or_else(|| NO_PERMIT.to_owned(), |permit| permit.to_string());
        let mut text = format!("{pid} {holder} {} {since} {permit}", token.as_u64());
        if let Some(label) = label {
            text.push(' ');
            // A label can contain the separator of the lines.
            text += &label.replace('%', "%25").replace('\n', "%0A");
        }
        text
    }

    fn read(line: &str) -> Option<Self> {
        let mut parts = line.splitn(6, ' ');
        Some(Self {
            pid: parts.next()?.parse().ok()?,
            holder: parts.next()?.parse().ok()?,
            token: FencingToken::from_u64(parts.next()?.parse().ok()?),
            since: parts.next()?.parse().ok()?,
            permit: match parts.next()? {
                NO_PERMIT => None,
                permit => Some(permit.parse().ok()?),
            },
            label: parts.next().map(|label| label.replace("%0A", "\n").replace("%25", "%").into()),
        })
    }

    /// Returns the holders that the text shows in the server process `pid`.
    pub(crate) fn of(text: &str, pid: i32) -> Vec<Self> {
        text.split('\n').filter_map(Self::read).filter(|line| line.pid == pid).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_reads_as_it_was_written_whatever_its_label() {
        let line = |pid, label: Option<&str>| HolderLine {
            pid,
            permit: (pid == 13).then_some(7),
            holder: HolderId::from_parts(7, 1),
            token: FencingToken::from_u64(1024),
            since: 1_700_000_000_000_000,
            label: label.map(Arc::from),
        };
        let labels = [None, Some(""), Some("a b"), Some("50%0A\n%"), Some("line\r\nbreaks\r")];
        for label in labels {
            let lines = [line(12, label), line(13, label), line(12, Some("other"))];
            let text = lines.each_ref().map(HolderLine::text).join("\n");
            assert_eq!(HolderLine::of(&text, 12), [lines[0].clone(), lines[2].clone()], "{text}");
            assert_eq!(HolderLine::of(&text, 13), [lines[1].clone()], "{text}");
        }
    }

    #[test]
    fn what_is_no_line_shows_no_holder() {
        let id = HolderId::from_parts(7, 1).to_string();
        for text in
            ["", "\n\n", &id, "12", "12 nobody 1 1", &format!("12 {id} -1 1 -"), &format!("x {id} 1 1 -")]
        {
            assert_eq!(HolderLine::of(text, 12), [], "{text}");
        }
    }
}
