//! The tags of a template, and the tokens in them, as Jinja's lexer finds them.

/// What a token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TokenKind {
    Name,
    Number,
    /// A text in quotes, with them.
    Text,
    Operator,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct TagToken<'a> {
    pub(super) kind: TokenKind,
    pub(super) text: &'a str,
}

/// `{{ ... }}` or `{% ... %}`.
pub(super) struct Tag<'a> {
    /// All of it.
    pub(super) text: &'a str,
    /// How it begins and ends, with the signs that trim what is around it.
    pub(super) open: &'a str,
    pub(super) close: &'a str,
    pub(super) tokens: Vec<TagToken<'a>>,
}

impl Tag<'_> {
    /// Whether it is a statement of that name.
    pub(super) fn is(&self, name: &str) -> bool {
        self.text.starts_with("{%") && self.tokens.first().is_some_and(|first| first.text == name)
    }
}

const OPERATORS: [&str; 6] = ["**", "//", "==", "!=", "<=", ">="];

/// The tag that `text` begins with, up to a `close` outside of quotes and brackets; none where it has no end.
pub(super) fn tag<'a>(text: &'a str, close: &str) -> Option<Tag<'a>> {
    let sign = |at: usize| text[at..].starts_with(['-', '+']);
    let open = 2 + usize::from(sign(2));
    let (mut at, mut depth) = (open, 0_usize);
    let mut tokens: Vec<TagToken> = Vec::new();
    loop {
        let rest = &text[at..];
        let first = rest.chars().next()?;
        if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        }
        let signs = usize::from(sign(at));
        if depth == 0 && rest[signs..].starts_with(close) {
            let end = at + signs + close.len();
            return Some(Tag {
                text: &text[..end],
                open: &text[..open],
                close: &text[at..end],
                tokens,
            });
        }
        let is_attribute = tokens.last().is_some_and(|last| last.text == ".");
        let (kind, length) = match first {
            '\'' | '"' => (TokenKind::Text, quoted(rest)?),
            '0'..='9' => (TokenKind::Number, number(rest, is_attribute)),
            first if first.is_alphabetic() || first == '_' => (TokenKind::Name, word(rest)),
            _ => {
                let is = |operator: &&&str| rest.starts_with(**operator);
                let length = OPERATORS
                    .iter()
                    .find(is)
                    .map_or(first.len_utf8(), |two| two.len());
                (TokenKind::Operator, length)
            }
        };
        match first {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.checked_sub(1)?,
            _ => {}
        }
        let text = &rest[..length];
        tokens.push(TagToken { kind, text });
        at += length;
    }
}

fn word(text: &str) -> usize {
    let is_of_word = |char: char| char.is_alphanumeric() || char == '_';
    text.find(|char| !is_of_word(char)).unwrap_or(text.len())
}

fn number(text: &str, is_attribute: bool) -> usize {
    let digits = |text: &str| {
        let end = text.find(|char: char| !char.is_ascii_digit() && char != '_');
        end.unwrap_or(text.len())
    };
    let radix = text.strip_prefix('0').unwrap_or_default();
    if radix.starts_with(['x', 'o', 'b', 'X', 'O', 'B']) {
        return word(text);
    }
    let mut length = digits(text);
    if is_attribute {
        return length;
    }
    let has_digits = |text: &str| text.starts_with(|char: char| char.is_ascii_digit());
    if text[length..].starts_with('.') && has_digits(&text[length + 1..]) {
        length += 1 + digits(&text[length + 1..]);
    }
    if text[length..].starts_with(['e', 'E']) {
        let sign = usize::from(text[length + 1..].starts_with(['-', '+']));
        if has_digits(&text[length + 1 + sign..]) {
            length += 1 + sign + digits(&text[length + 1 + sign..]);
        }
    }
    length
}

/// Bytes of the text in quotes that `text` begins with.
fn quoted(text: &str) -> Option<usize> {
    let mut chars = text.char_indices();
    let (_, quote) = chars.next()?;
    while let Some((at, char)) = chars.next() {
        match char {
            '\\' => drop(chars.next()),
            char if char == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// A text in quotes, with Python's escapes replaced, as minijinja reads it. `None`: an escape that Jinja or we cannot read.
pub(super) fn literal(quoted: &str) -> Option<String> {
    let mut out = String::from('"');
    let mut rest = &quoted[1..quoted.len() - 1];
    while let Some(first) = rest.chars().next() {
        let (char, length) = match first {
            '\\' => escape(rest)?,
            first => (Some(first), first.len_utf8()),
        };
        match char {
            Some('\n') => out.push_str("\\n"),
            Some(char @ ('"' | '\\')) => out.extend(['\\', char]),
            Some(char) => out.push(char),
            None => {}
        }
        rest = &rest[length..];
    }
    Some(out + "\"")
}

/// The character that an escape stands for, and its bytes. A backslash before anything else is one.
fn escape(text: &str) -> Option<(Option<char>, usize)> {
    let letter = text.chars().nth(1)?;
    let coded = |start: usize, digits: usize, radix| {
        let code = text.get(start..start + digits)?;
        let code = code
            .chars()
            .all(|char| char.is_digit(radix))
            .then_some(code)?;
        let char = char::from_u32(u32::from_str_radix(code, radix).ok()?)?;
        Some((Some(char), start + digits))
    };
    let char = match letter {
        'x' => return coded(2, 2, 16),
        'u' => return coded(2, 4, 16),
        'U' => return coded(2, 8, 16),
        '0'..='7' => {
            let digits = text[1..].chars().take(3);
            return coded(1, digits.take_while(|char| char.is_digit(8)).count(), 8);
        }
        'N' => return None,
        '\n' => None,
        'n' => Some('\n'),
        't' => Some('\t'),
        'r' => Some('\r'),
        'a' => Some('\x07'),
        'b' => Some('\x08'),
        'f' => Some('\x0c'),
        'v' => Some('\x0b'),
        '\\' | '\'' | '"' => Some(letter),
        _ => return Some((Some('\\'), 1)),
    };
    Some((char, 1 + letter.len_utf8()))
}
