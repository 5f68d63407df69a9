//! Jinja 2's expressions, written so that minijinja computes each operator, attribute, item and loop by Python's rules.
//!
//! minijinja's own operators differ: `none < 1` is false there and an error in Python, `'%s' % x` is refused, a dictionary's
//! `items` is its entry of that name. They cannot be replaced, but filters can, so `a < b` becomes `a|_op("<", b)`.
//! Tags that we cannot parse stay unchanged; minijinja reports the error.

use super::tokens::{Tag, TagToken, TokenKind, literal, tag};
use super::values::wrong;
use minijinja::Error;

/// The template, with the expressions of all tags rewritten.
///
/// # Errors
/// Expressions that are nested too deeply, and escapes in texts that cannot be read.
pub(super) fn rewritten(template: &str) -> Result<String, Error> {
    let mut out = String::with_capacity(2 * template.len());
    let mut rest = template;
    let mut is_raw = false;
    while let Some(found) = rest.find('{') {
        let (before, at_tag) = rest.split_at(found);
        out.push_str(before);
        let found = match at_tag.as_bytes().get(1) {
            Some(b'{') if !is_raw => Some("}}"),
            Some(b'%') => Some("%}"),
            _ => None,
        };
        let comment = (at_tag.starts_with("{#") && !is_raw).then(|| at_tag[2..].find("#}"));
        rest = match (found.and_then(|close| tag(at_tag, close)), comment) {
            (Some(tag), _) if !is_raw || tag.is("endraw") => {
                is_raw = tag.is("raw");
                write_tag(&tag, &mut out)?;
                &at_tag[tag.text.len()..]
            }
            (_, Some(Some(end))) => {
                out.push_str(&at_tag[..end + 4]);
                &at_tag[end + 4..]
            }
            _ => {
                out.push('{');
                &at_tag[1..]
            }
        };
    }
    Ok(out + rest)
}

fn write_tag(tag: &Tag, out: &mut String) -> Result<(), Error> {
    let mut parser = Parser {
        tokens: &tag.tokens,
        at: 0,
        depth: 0,
        refused: None,
    };
    let code = match tag.text.starts_with("{{") {
        true => parser.tuple(true),
        false => parser.statement(),
    };
    if let Some(reason) = parser.refused {
        return Err(wrong(format!("{reason}: {}", tag.text)));
    }
    match code.filter(|_| parser.at == tag.tokens.len()) {
        Some(code) => {
            // Errors name lines.
            let lines = "\n".repeat(tag.text.matches('\n').count());
            *out += &format!("{} {code}{lines} {}", tag.open, tag.close);
        }
        None => out.push_str(tag.text),
    }
    Ok(())
}

/// Reads the tokens of a tag as Jinja's own parser does, and writes them as it goes. `None`: they are not Jinja's.
struct Parser<'a> {
    tokens: &'a [TagToken<'a>],
    at: usize,
    /// Brackets, signs and conditions around what is read.
    depth: usize,
    /// Why the template is refused: minijinja would read the tag by its own rules.
    refused: Option<&'static str>,
}

/// The stack has an end.
const DEEPEST: usize = 60;

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<TagToken<'a>> {
        self.tokens.get(self.at).copied()
    }

    fn next(&mut self) -> Option<TagToken<'a>> {
        let token = self.peek()?;
        self.at += 1;
        Some(token)
    }

    fn is(&self, text: &str) -> bool {
        self.peek()
            .is_some_and(|token| token.kind != TokenKind::Text && token.text == text)
    }

    fn eat(&mut self, text: &str) -> bool {
        let is = self.is(text);
        self.at += usize::from(is);
        is
    }

    fn expect(&mut self, text: &str) -> Option<()> {
        self.eat(text).then_some(())
    }

    fn name(&mut self) -> Option<&'a str> {
        let token = self.next()?;
        (token.kind == TokenKind::Name).then_some(token.text)
    }

    /// The text of the tokens up to one, which stays.
    fn until(&mut self, end: &str) -> Option<String> {
        let mut texts = Vec::new();
        while !self.is(end) {
            texts.push(self.next()?.text);
        }
        Some(texts.join(" ").replace(" . ", "."))
    }

    fn statement(&mut self) -> Option<String> {
        let keyword = self.name()?;
        Some(match keyword {
            "if" | "elif" => format!("{keyword} {}", self.tuple(true)?),
            "for" => self.loop_head()?,
            "set" => self.assignment()?,
            "with" => format!("with {}", self.separated("", Parser::binding)?),
            "macro" => format!("macro {}({}", self.name()?, self.signature()?),
            "call" if self.is("(") => format!("call({} {}", self.signature()?, self.unary()?),
            "call" => format!("call {}", self.unary()?),
            "filter" => {
                let name = self.name()?;
                let call = self.call_of_filter()?;
                self.filters(format!("filter {name}{call}"))?
            }
            _ => return None,
        })
    }

    fn loop_head(&mut self) -> Option<String> {
        let targets = self.until("in")?;
        self.expect("in")?;
        let mut head = format!("for {targets} in {}|_iter", self.tuple(false)?);
        if self.eat("if") {
            head += &format!(" if {}", self.expression()?);
        }
        if self.eat("recursive") {
            head += " recursive";
        }
        Some(head)
    }

    /// `a = 1`, or the head of a block whose text is the value.
    fn assignment(&mut self) -> Option<String> {
        let start = self.at;
        let Some(target) = self.until("=") else {
            self.at = start;
            let name = self.name()?;
            return self.filters(format!("set {name}"));
        };
        self.expect("=")?;
        Some(format!("set {target} = {}", self.tuple(true)?))
    }

    /// `a`, or `a = 1`.
    fn binding(&mut self) -> Option<String> {
        let name = self.name()?;
        match self.eat("=") {
            true => Some(format!("{name}={}", self.expression()?)),
            false => Some(name.into()),
        }
    }

    /// The parameters of a macro, with the bracket that closes them.
    fn signature(&mut self) -> Option<String> {
        self.expect("(")?;
        Some(self.separated(")", Parser::binding)? + ")")
    }

    /// Items with commas between them, up to what closes them, which is eaten, or with "" to the end.
    fn separated(
        &mut self,
        close: &str,
        item: impl Fn(&mut Self) -> Option<String>,
    ) -> Option<String> {
        let mut items = Vec::new();
        while !(self.eat(close) || close.is_empty() && self.peek().is_none()) {
            items.push(item(self)?);
            if !self.is(close) && self.peek().is_some() {
                self.expect(",")?;
            }
        }
        Some(items.join(", "))
    }

    /// Values with commas between them; several, or one with a comma behind it, are a tuple.
    fn tuple(&mut self, with_condition: bool) -> Option<String> {
        let mut values = Vec::new();
        let mut is_tuple = false;
        while self.peek().is_some() && !self.is(")") && !self.is("recursive") {
            values.push(match with_condition {
                true => self.expression()?,
                false => self.or()?,
            });
            if !self.eat(",") {
                break;
            }
            is_tuple = true;
        }
        match values.as_slice() {
            [] => None,
            [value] if !is_tuple => Some(value.clone()),
            [value] => Some(format!("({value},)")),
            values => Some(format!("({})", values.join(", "))),
        }
    }

    fn expression(&mut self) -> Option<String> {
        let mut value = self.or()?;
        while self.eat("if") {
            let condition = self.or()?;
            value = match self.eat("else") {
                true => {
                    let other = self.deeper(Parser::expression)?;
                    format!("({value} if {condition} else {other})")
                }
                false => format!("({value} if {condition})"),
            };
        }
        Some(value)
    }

    fn or(&mut self) -> Option<String> {
        let mut left = self.and()?;
        while self.eat("or") {
            left = format!("({left} or {})", self.and()?);
        }
        Some(left)
    }

    fn and(&mut self) -> Option<String> {
        let mut left = self.not()?;
        while self.eat("and") {
            left = format!("({left} and {})", self.not()?);
        }
        Some(left)
    }

    fn not(&mut self) -> Option<String> {
        self.deeper(|parser| match parser.eat("not") {
            true => Some(format!("(not {})", parser.not()?)),
            false => parser.comparison(),
        })
    }

    fn deeper(&mut self, read: impl FnOnce(&mut Self) -> Option<String>) -> Option<String> {
        if self.depth == DEEPEST {
            return self.refuse("an expression is nested too deeply");
        }
        self.depth += 1;
        let value = read(self);
        self.depth -= 1;
        value
    }

    fn refuse(&mut self, reason: &'static str) -> Option<String> {
        self.refused = Some(reason);
        None
    }

    fn comparison(&mut self) -> Option<String> {
        let left = self.sum()?;
        let mut chain = Vec::new();
        while let Some(operator) = self.comparator() {
            chain.push(format!("\"{operator}\", {}", self.sum()?));
        }
        match chain.is_empty() {
            true => Some(left),
            false => Some(format!("{left}|_op({})", chain.join(", "))),
        }
    }

    fn comparator(&mut self) -> Option<&'a str> {
        let token = self.peek().filter(|token| token.kind != TokenKind::Text)?;
        let next = self.tokens.get(self.at + 1);
        match token.text {
            "==" | "!=" | "<" | "<=" | ">" | ">=" | "in" => {
                self.at += 1;
                Some(token.text)
            }
            "not" if next.is_some_and(|next| next.text == "in") => {
                self.at += 2;
                Some("not in")
            }
            _ => None,
        }
    }

    fn sum(&mut self) -> Option<String> {
        self.binary(&["+", "-"], |parser| {
            parser.binary(&["~"], |parser| {
                parser.binary(&["*", "/", "//", "%"], |parser| {
                    parser.binary(&["**"], Parser::unary)
                })
            })
        })
    }

    fn binary(
        &mut self,
        operators: &[&'static str],
        operand: impl Fn(&mut Self) -> Option<String>,
    ) -> Option<String> {
        let mut left = operand(self)?;
        while let Some(operator) = operators.iter().find(|operator| self.is(operator)) {
            self.at += 1;
            left = operation(operator, &left, &operand(self)?);
        }
        Some(left)
    }

    fn unary(&mut self) -> Option<String> {
        let signed = self.signed()?;
        self.filters(signed)
    }

    fn signed(&mut self) -> Option<String> {
        for sign in ["-", "+"] {
            if self.eat(sign) {
                let value = self.deeper(Parser::signed)?;
                return Some(format!("{value}|_sign(\"{sign}\")"));
            }
        }
        let value = self.primary()?;
        self.postfix(value)
    }

    fn primary(&mut self) -> Option<String> {
        let token = self.next()?;
        match (token.kind, token.text) {
            (TokenKind::Name, "in" | "is" | "if" | "else" | "and" | "or" | "not") => None,
            (TokenKind::Name, name) => Some(name.into()),
            (TokenKind::Number, number) => Some(number.replace('_', "")),
            (TokenKind::Text, text) => {
                let mut value = self.literal(text)?;
                while let Some(more) = self.peek().filter(|token| token.kind == TokenKind::Text) {
                    self.at += 1;
                    value = operation("~", &value, &self.literal(more.text)?);
                }
                Some(value)
            }
            (_, "(") => {
                let value = match self.is(")") {
                    true => "()".into(),
                    false => self.tuple(true)?,
                };
                self.expect(")")?;
                Some(value)
            }
            (_, "[") => Some(format!("[{}]", self.separated("]", Parser::expression)?)),
            (_, "{") => {
                let entries = self.separated("}", |parser| {
                    let key = parser.expression()?;
                    parser.expect(":")?;
                    Some(format!("{key}: {}", parser.expression()?))
                })?;
                // Without the spaces, two brackets would be a tag's.
                Some(format!("( {{ {entries} }} )"))
            }
            _ => None,
        }
    }

    fn literal(&mut self, quoted: &str) -> Option<String> {
        literal(quoted).or_else(|| self.refuse("a text has an escape that cannot be read here"))
    }

    fn postfix(&mut self, mut value: String) -> Option<String> {
        loop {
            if self.eat(".") {
                let attribute = self.next()?;
                value = match attribute.kind {
                    TokenKind::Name if self.is("(") => {
                        let arguments = self.arguments()?;
                        let comma = if arguments.is_empty() { "" } else { ", " };
                        format!("{value}|_call(\"{}\"{comma}{arguments})", attribute.text)
                    }
                    TokenKind::Name => format!("{value}|_attr(\"{}\")", attribute.text),
                    TokenKind::Number => format!("{value}|_item({})", attribute.text),
                    _ => return None,
                };
            } else if self.eat("[") {
                value = self.subscript(&value)?;
            } else if self.is("(") {
                let arguments = self.arguments()?;
                value = match value.as_str() {
                    "loop" => format!("loop(({arguments})|_iter)"),
                    _ => called(&value, &arguments),
                };
            } else {
                return Some(value);
            }
        }
    }

    fn subscript(&mut self, value: &str) -> Option<String> {
        let mut parts = vec![None];
        while !self.eat("]") {
            match self.eat(":") {
                true => parts.push(None),
                false => *parts.last_mut()? = Some(self.tuple(true)?),
            }
        }
        match parts.as_slice() {
            [part] => Some(format!("{value}|_item({})", part.as_ref()?)),
            parts => {
                let parts: Vec<&str> = parts
                    .iter()
                    .map(|part| part.as_deref().unwrap_or("none"))
                    .collect();
                Some(format!("{value}|_slice({})", parts.join(", ")))
            }
        }
    }

    /// The arguments of a call, without its brackets.
    fn arguments(&mut self) -> Option<String> {
        self.expect("(")?;
        self.separated(")", |parser| {
            let next = parser.tokens.get(parser.at + 1);
            let is_named = next.is_some_and(|next| next.text == "=");
            if is_named {
                return parser.binding();
            }
            let stars = ["**", "*"].into_iter().find(|stars| parser.eat(stars));
            Some(stars.unwrap_or_default().to_owned() + &parser.expression()?)
        })
    }

    fn call_of_filter(&mut self) -> Option<String> {
        match self.is("(") {
            true => Some(format!("({})", self.arguments()?)),
            false => Some(String::new()),
        }
    }

    /// Filters, tests and calls behind a value.
    fn filters(&mut self, mut value: String) -> Option<String> {
        loop {
            if self.eat("|") {
                let name = self.name()?;
                let call = self.call_of_filter()?;
                value = format!("{value}|{name}{call}");
            } else if self.eat("is") {
                let not = if self.eat("not") { "not " } else { "" };
                let name = self.name()?;
                let argument = self.argument_of_test()?;
                value = format!("({value} is {not}{name}{argument})");
            } else if self.is("(") {
                value = called(&value, &self.arguments()?);
            } else {
                return Some(value);
            }
        }
    }

    fn argument_of_test(&mut self) -> Option<String> {
        if self.is("(") {
            return self.call_of_filter();
        }
        let none = ["else", "or", "and", "if", "is", "in", "not", "recursive"];
        let is_value = |next: TagToken| match next.kind {
            TokenKind::Name => !none.contains(&next.text),
            TokenKind::Number | TokenKind::Text => true,
            TokenKind::Operator => ["[", "{"].contains(&next.text),
        };
        if !self.peek().is_some_and(is_value) {
            return Some(String::new());
        }
        let value = self.primary()?;
        Some(format!("({})", self.postfix(value)?))
    }
}

/// A call of a name, or of what an expression gives.
fn called(value: &str, arguments: &str) -> String {
    match value.contains(['|', '(']) {
        true => format!("({value})({arguments})"),
        false => format!("{value}({arguments})"),
    }
}

fn operation(operator: &str, left: &str, right: &str) -> String {
    format!("{left}|_op(\"{operator}\", {right})")
}

#[cfg(test)]
mod tests {
    use super::rewritten;

    #[test]
    fn tags_are_read_as_jinja_reads_them() {
        for (template, expected) in [
            (
                "{{ '%s' % x|upper ~ c }}",
                r#"{{ "%s"|_op("%", x|upper)|_op("~", c) }}"#,
            ),
            (
                "{%- if a.b[0] is divisibleby 2 and not x -%}",
                r#"{%- if ((a|_attr("b")|_item(0) is divisibleby(2)) and (not x)) -%}"#,
            ),
            (
                "{% for k, v in m.items() if 1 < v < 3 %}",
                r#"{% for k , v in m|_call("items")|_iter if 1|_op("<", v, "<", 3) %}"#,
            ),
            (
                "{{ a[1:]['}}'] }}{# {{ a.b }} #}{% raw %}{{ a.b }}{% endraw %}",
                r#"{{ a|_slice(1, none)|_item("}}") }}{# {{ a.b }} #}{% raw %}{{ a.b }}{% endraw %}"#,
            ),
            ("{{ -a[b]\n(1) }}", "{{ (a|_item(b))(1)|_sign(\"-\")\n }}"),
            ("{{ a b }}{{ a.b", "{{ a b }}{{ a.b"),
        ] {
            assert_eq!(rewritten(template).unwrap(), expected);
        }
        let conditions = "a if b else ".repeat(100_000);
        for refused in [&conditions, &"(".repeat(61), r"'\x4'", r"'\N{BULLET}'"] {
            let template = format!(
                "{{{{ {refused}{} }}}}",
                ")".repeat(refused.matches('(').count())
            );
            rewritten(&template).unwrap_err();
        }
    }
}
