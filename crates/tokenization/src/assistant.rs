//! `{% generation %}`: what transformers' templates put around the assistant's turns.
//!
//! The template language here has no such block. It becomes an `if` that writes a noncharacter at either end, with the
//! block's own whitespace control; the noncharacters are taken out of the text that is rendered.

use std::ops::Range;

/// The ends of a turn, while a template is rendered.
pub(crate) const MARKS: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

/// The template without the blocks, or none where it has none. Comments, raw blocks and texts in quotes have none.
pub(crate) fn without_blocks(template: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = template;
    let (mut found, mut raw) = (false, false);
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let (tag, after) = tag.split_at(tag_length(tag, raw));
        rest = after;
        let inner = tag.strip_prefix("{%").unwrap_or_default();
        let inner = inner.strip_suffix("%}").unwrap_or_default();
        let mut block = |side| {
            found = true;
            mark(inner, side)
        };
        match inner.trim_matches(['-', '+']).trim() {
            "generation" if !raw => out.push_str(&block(0)),
            "endgeneration" if !raw => out.push_str(&block(1)),
            name => {
                raw = name == "raw" || raw && name != "endraw";
                // In a raw block only the end of it is a tag.
                let kept = if raw && name != "raw" { 1 } else { tag.len() };
                out.push_str(&tag[..kept]);
                rest = &template[template.len() - after.len() - (tag.len() - kept)..];
            }
        }
    }
    out.push_str(rest);
    found.then_some(out)
}

/// Bytes of the comment, expression or statement that `rest` begins with; 1 where its brace begins none. In a raw block only
/// statements count, since one of them ends it.
pub(crate) fn tag_length(rest: &str, is_raw: bool) -> usize {
    match rest.as_bytes().get(1) {
        Some(b'#') if !is_raw => rest.find("#}").map_or(rest.len(), |end| end + 2),
        Some(b'{') if !is_raw => end(rest, "}}"),
        Some(b'%') => end(rest, "%}"),
        _ => 1,
    }
}

/// Bytes of a tag up to where it closes, not counting what is in quotes.
fn end(tag: &str, close: &str) -> usize {
    let mut quote = None;
    let mut escaped = false;
    for (at, char) in tag.char_indices().skip(2) {
        match quote {
            _ if escaped => escaped = false,
            Some(_) if char == '\\' => escaped = true,
            Some(open) if open == char => quote = None,
            None if tag[at..].starts_with(close) => return at + close.len(),
            None if "'\"".contains(char) => quote = Some(char),
            _ => {}
        }
    }
    tag.len()
}

/// What stands for the beginning (0) or the end (1) of a block.
fn mark(tag: &str, side: usize) -> String {
    let control = |sign: Option<char>| sign.filter(|sign| "-+".contains(*sign));
    let text = |sign: Option<char>| sign.map_or(String::new(), String::from);
    let left = text(control(tag.chars().next()));
    let right = text(control(tag.chars().next_back()));
    let mark = MARKS[side];
    format!("{{%{left} if true %}}{{{{ '{mark}' }}}}{{% endif {right}%}}")
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
    fn comments_raw_blocks_and_quotes_have_no_blocks() {
        for template in [
            "{# {% generation %} #}x",
            "{% raw %}{ {% generation %} {# {% endraw %}{{ x }}",
            "{{ '\\'{% generation %}' }}",
            "{% set x = \"%}{% generation %}\" %}",
            "{% raw",
        ] {
            assert_eq!(without_blocks(template), None, "{template}");
        }
        let replaced = without_blocks("{#{%#}{% raw %}{#{% endraw %}{% generation %}").unwrap();
        assert!(
            replaced.ends_with("{% raw %}{#{% endraw %}{% if true %}{{ '\u{fdd0}' }}{% endif %}")
        );
    }

    #[test]
    fn turns_are_bytes_of_the_text() {
        let (text, turns) = take_marks("ab\u{fdd0}cé\u{fdd1}d\u{fdd0}e\u{fdd1}");
        assert_eq!((text.as_str(), turns), ("abcéde", vec![2..5, 6..7]));
    }
}
