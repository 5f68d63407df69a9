//! `{% generation %}`: what transformers' templates put around the assistant's turns.
//!
//! The template language here has no such block. It becomes an `if` that writes a noncharacter at either end, with the
//! block's own whitespace control; the noncharacters are taken out of the text that is rendered.

use std::ops::Range;

/// The ends of a turn, while a template is rendered.
pub(crate) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The template without the blocks, or none where it has none.
pub(crate) fn without_blocks(template: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = template;
    let mut found = false;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let inner = tag[2..].trim_end_matches("%}");
        let name = inner.trim_matches(['-', '+']).trim();
        match ["generation", "endgeneration"]
            .iter()
            .position(|block| *block == name)
        {
            None => out.push_str(tag),
            Some(side) => {
                found = true;
                let control = |sign: Option<char>| {
                    sign.filter(|sign| "-+".contains(*sign))
                        .map_or(String::new(), String::from)
                };
                let (left, right) = (
                    control(inner.chars().next()),
                    control(inner.chars().next_back()),
                );
                let mark = MARKS[side];
                out.push_str(&format!(
                    "{{%{left} if true %}}{{{{ '{mark}' }}}}{{% endif {right}%}}"
                ));
            }
        }
        rest = after;
    }
    out.push_str(rest);
    found.then_some(out)
}

/// Takes the marks out: the text, and the bytes of it that were between them.
pub(crate) fn take_marks(marked: &str) -> (String, Vec<Range<usize>>) {
    let mut text = String::with_capacity(marked.len());
    let mut turns: Vec<Range<usize>> = Vec::new();
    let mut open = None;
    for piece in marked.split_inclusive(MARKS) {
        let unmarked = piece.strip_suffix(MARKS).unwrap_or(piece);
        text.push_str(unmarked);
        if piece.ends_with(MARKS[0]) {
            open = Some(text.len());
        } else if piece.ends_with(MARKS[1])
            && let Some(start) = open.take()
        {
            turns.push(start..text.len());
        }
    }
    (text, turns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_keep_their_whitespace_control() {
        assert_eq!(without_blocks("{% if a %}x{% endif %}"), None);
        let replaced = without_blocks("a {%- generation %}b{%endgeneration -%} c").unwrap();
        let expected = "a {%- if true %}{{ '\u{fdd0}' }}{% endif %}b{% if true %}{{ '\u{fdd1}' }}{% endif -%} c";
        assert_eq!(replaced, expected);
    }

    #[test]
    fn turns_are_bytes_of_the_text() {
        let (text, turns) = take_marks("ab\u{fdd0}cé\u{fdd1}d\u{fdd0}e\u{fdd1}");
        assert_eq!((text.as_str(), turns), ("abcéde", vec![2..5, 6..7]));
    }
}
