//! `'%s' % x`: Python's formatting of a text, which the template language here has as a filter alone.
//!
//! A text in quotes with a `%` behind it becomes `'%s'|format(x)`. A `%` behind anything else stays: the value may be a
//! number.

use crate::assistant::tag_length;

/// The template, with Python's `%` behind texts as a filter.
pub(crate) fn as_filter(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    let mut is_raw = false;
    while let Some(found) = rest.find('{') {
        let length = tag_length(&rest[found..], is_raw);
        let (before, after) = rest.split_at(found + length);
        let tag = &before[found..];
        let name = tag.trim_start_matches(['{', '%', '-', '+']).trim_start();
        if tag.starts_with("{%") {
            is_raw = name.starts_with("raw") || is_raw && !name.starts_with("endraw");
        }
        match is_raw || tag.starts_with("{#") {
            true => out.push_str(before),
            false => {
                out.push_str(&before[..found]);
                rewrite(tag, &mut out);
            }
        }
        rest = after;
    }
    out + rest
}

/// Writes a tag, or an operand within it, with its operators replaced.
fn rewrite(code: &str, out: &mut String) {
    let mut rest = code;
    while let Some(found) = rest.find(['\'', '"']) {
        let end = found + quoted(&rest[found..]);
        out.push_str(&rest[..end]);
        rest = &rest[end..];
        let Some(behind) = rest.trim_start().strip_prefix('%') else {
            continue;
        };
        let behind = behind.trim_start();
        let (operand, after) = behind.split_at(operand(behind));
        // `%}` ends the tag.
        if !operand.is_empty() {
            out.push_str("|format(");
            rewrite(arguments(operand), out);
            out.push(')');
            rest = after;
        }
    }
    out.push_str(rest);
}

/// What stands between the parentheses of the filter: of a tuple its items.
fn arguments(operand: &str) -> &str {
    let is_tuple =
        operand.starts_with('(') && operand.ends_with(')') && bracketed(operand) == operand.len();
    match is_tuple {
        true => operand[1..operand.len() - 1].trim().trim_end_matches(','),
        false => operand,
    }
}

/// Bytes of the operand that `code` begins with, as Jinja binds it: a name, number, text or bracket, with the attributes,
/// calls, items and filters behind it.
fn operand(code: &str) -> usize {
    let sign = code.len() - code.trim_start_matches(['-', '+']).len();
    let first = match code[sign..].chars().next() {
        Some('\'' | '"') => quoted(&code[sign..]),
        Some('(' | '[' | '{') => bracketed(&code[sign..]),
        _ => name(&code[sign..]),
    };
    if first == 0 {
        return 0;
    }
    let mut at = sign + first;
    loop {
        let rest = &code[at..];
        let next = rest.trim_start();
        let length = match next.chars().next() {
            Some('(' | '[') => bracketed(next),
            Some('.' | '|') => {
                let behind = next[1..].trim_start();
                match name(behind) {
                    0 => 0,
                    length => next.len() - behind.len() + length,
                }
            }
            _ => 0,
        };
        if length == 0 {
            return at;
        }
        at += rest.len() - next.len() + length;
    }
}

/// Bytes of the name or number that `code` begins with.
fn name(code: &str) -> usize {
    let is_of_name = |char: char| char.is_alphanumeric() || char == '_';
    code.find(|char| !is_of_name(char)).unwrap_or(code.len())
}

/// Bytes of the text in quotes that `code` begins with.
fn quoted(code: &str) -> usize {
    let mut chars = code.char_indices();
    let quote = chars.next().map(|(_, quote)| quote);
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' => drop(chars.next()),
            char if Some(char) == quote => return at + 1,
            _ => {}
        }
    }
    code.len()
}

/// Bytes of the brackets that `code` begins with, and of what stands in them.
fn bracketed(code: &str) -> usize {
    let (mut at, mut depth) = (0, 0_usize);
    while let Some(char) = code[at..].chars().next() {
        if matches!(char, '\'' | '"') {
            at += quoted(&code[at..]);
            continue;
        }
        at += char.len_utf8();
        match char {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::as_filter;

    #[test]
    fn texts_with_a_percent_sign_behind_them() {
        for (template, expected) in [
            ("{{ '%s' % x }}", "{{ '%s'|format(x) }}"),
            (
                "{{ '%s-%s' % (a, b[1]) ~ c }}",
                "{{ '%s-%s'|format(a, b[1]) ~ c }}",
            ),
            ("{{ '%s' % (a, ) }}", "{{ '%s'|format(a) }}"),
            (
                "{{ '[%s]' % ('%d' % n) }}",
                "{{ '[%s]'|format('%d'|format(n)) }}",
            ),
            (
                "{{ '%s' % (a or b)|upper + 'x' }}",
                "{{ '%s'|format((a or b)|upper) + 'x' }}",
            ),
            (
                "{% set y = \"%d\" % m.n(')')[0] %}{{ y }}",
                "{% set y = \"%d\"|format(m.n(')')[0]) %}{{ y }}",
            ),
            (
                "{{ '%s' % 'a' }}{{ '%s' % -1 }}",
                "{{ '%s'|format('a') }}{{ '%s'|format(-1) }}",
            ),
        ] {
            assert_eq!(as_filter(template), expected);
        }
    }

    #[test]
    fn numbers_comments_and_raw_text_stay() {
        for template in [
            "{% if loop.index0 % 2 == 1 %}{{ 'a' }}{% endif %}",
            "{% set x = 'a' %}{% if x == 'b'%}{{ x }}{% endif %}",
            "{# '%s' % x #}{% raw %}{{ '%s' % x }}{% endraw %}",
            "100 % '{{ x }}' % y",
            "{{ 'it\\'s' ~ (7 % 3) }}",
            "{{ '%s' %",
        ] {
            assert_eq!(as_filter(template), template);
        }
    }
}
