//! Jinja 2 as transformers uses it, in minijinja.
//!
//! minijinja parses templates and runs their statements. What it computes otherwise than Python is replaced: operators by
//! rewriting the template ([`rewrite`]), filters and tests by ours, methods by [`methods`]. What Jinja 2 has and is not here is an
//! error that names it. The test in this file compares texts and errors with Jinja 2's own.

mod arguments;
mod filters;
mod lazy;
mod methods;
mod operators;
mod predicates;
mod rewrite;
mod tokens;
mod values;

use crate::assistant;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, Value};
use values::{text, wrong};

/// The name of the template in its environment.
pub(crate) const CHAT: &str = "chat";

/// An environment with the template, and whether it says which text is the assistant's.
pub(crate) fn environment(source: &str) -> Result<(Environment<'static>, bool), Error> {
    let mut environment = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    environment.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_formatter(|out, _, value| Ok(std::fmt::Write::write_str(out, &text(value)?)?));
    operators::add(&mut environment);
    filters::add(&mut environment);
    predicates::add(&mut environment);
    environment.remove_global("debug");
    environment.add_function("self", || Err::<Value, _>(wrong("`self` is not here")));
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    // Jinja knows one kind of line break.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let source = rewrite::rewritten(&source)?;
    let marked = assistant::without_blocks(&source);
    let has_blocks = marked.is_some();
    environment.add_template_owned(CHAT, marked.unwrap_or(source))?;
    Ok((environment, has_blocks))
}

fn raise_exception(message: &Value) -> Result<String, Error> {
    Err(wrong(text(message)?))
}

/// The time, as Python's `strftime` writes it.
fn strftime_now(format: &str) -> Result<String, Error> {
    let fixed = std::env::var("SOURCE_DATE_EPOCH").ok();
    let fixed = fixed.and_then(|seconds| jiff::Timestamp::from_second(seconds.parse().ok()?).ok());
    let now = fixed.unwrap_or_else(jiff::Timestamp::now);
    jiff::fmt::strtime::format(format, now).map_err(|error| wrong(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::{CHAT, environment};
    use minijinja::Value;
    use minijinja::value::Serde;
    use serde::Deserialize;
    use std::path::PathBuf;

    /// Templates, and what Jinja 2 makes of them in transformers' environment: a text, or none where it refuses.
    #[derive(Deserialize)]
    struct Expressions {
        values: serde_json::Value,
        cases: Vec<(String, Option<String>)>,
    }

    fn rendered(template: &str, values: &Value) -> Result<String, minijinja::Error> {
        let (environment, _) = environment(template)?;
        environment.get_template(CHAT)?.render(values.clone())
    }

    /// The variable names a larger file than that of the fixtures (`benches/peers/template_expressions.py`).
    #[test]
    fn texts_are_those_of_jinja() {
        let fixtures = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/expressions.json"
        );
        let other = std::env::var_os("TEMPLATE_EXPRESSIONS");
        let path = other.clone().map_or(fixtures.into(), PathBuf::from);
        let file: Expressions = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let values = Value::from(Serde(&file.values));
        let (mut differing, mut lacking) = (Vec::new(), 0);
        for (template, theirs) in &file.cases {
            match (theirs, rendered(template, &values)) {
                (Some(theirs), Ok(ours)) if *theirs == ours => {}
                (None, Err(_)) => {}
                (Some(_), Err(error)) if is_lacking(&error.to_string()) => lacking += 1,
                (theirs, ours) => differing.push(format!("{template}: {theirs:?} {ours:?}")),
            }
        }
        assert!(differing.is_empty(), "{}", differing.join("\n"));
        println!("{lacking} of {} are refused here alone", file.cases.len());
        assert!(other.is_some() || lacking == 35, "{lacking}");
    }

    /// Whether an error names what Jinja 2 has and we have not.
    fn is_lacking(error: &str) -> bool {
        let names = [
            "unknown filter: ",
            "unknown function: ",
            " has no method `",
            " have no attribute `",
            "add `|list`",
            " is not known here",
            "a width is at most ",
            "an escape that cannot be read here",
            "too many arguments (",
            "a number is too large",
            "a value of type string is no integer",
            "cannot unpack: value is not iterable",
            "an undefined value has no attribute `__class__`",
        ];
        names.iter().any(|name| error.contains(name))
    }
}
