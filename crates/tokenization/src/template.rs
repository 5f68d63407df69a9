//! A model's chat template, rendered as transformers renders it.

use crate::error::TokenizerError;
use crate::hugging_face::Configuration;
use crate::special_tokens::SpecialTokens;
use crate::{assistant, jinja, messages};
use minijinja::value::Serde;
use minijinja::{Environment, Error, Value, context};
use std::path::Path;

/// The template of `chat_template.jinja`, or else of `tokenizer_config.json`.
///
/// It is rendered in transformers' environment: blocks trimmed, `raise_exception`, `tojson`, the special tokens, Python's methods of text and lists, and `strftime_now`, whose time is that of the variable
/// `SOURCE_DATE_EPOCH` where it is set, so that a template that writes the date gives the same text on another day.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: SpecialTokens,
    /// Whether the template itself says which text is the assistant's.
    pub(crate) has_blocks: bool,
    /// What conversations with tools are rendered by, where the model has another template for them.
    for_tools: Option<Box<ChatTemplate>>,
}

impl ChatTemplate {
    /// The template in a tokenizer's folder; none where there is none.
    ///
    /// # Errors
    /// Files that cannot be read, or are no template.
    pub fn open(folder: &Path) -> Result<Option<ChatTemplate>, TokenizerError> {
        let configuration = Configuration::read(folder)?;
        let file = folder.join("chat_template.jinja");
        let (path, source, for_tools) = if file.is_file() {
            let unreadable = |path, reason| TokenizerError::Unreadable { path, reason };
            let source = files::read_small_text(&file);
            let source = source.map_err(|error| unreadable(file.clone(), error))?;
            (file, source, None)
        } else {
            let path = folder.join("tokenizer_config.json");
            match &configuration.chat_template {
                serde_json::Value::Null => return Ok(None),
                serde_json::Value::String(source) => (path, source.clone(), None),
                templates => {
                    let source = named(templates, "default").ok_or_else(|| malformed(&path))?;
                    (path, source, named(templates, "tool_use"))
                }
            }
        };
        let special = configuration.special;
        let template = |source: String| {
            let template = ChatTemplate::new(&source, special.clone());
            template.map_err(|error| TokenizerError::Malformed {
                path: path.clone(),
                reason: format!("its chat template is wrong: {error}"),
            })
        };
        let for_tools = for_tools.map(template).transpose()?.map(Box::new);
        Ok(Some(ChatTemplate {
            for_tools,
            ..template(source)?
        }))
    }

    pub(crate) fn new(source: &str, special: SpecialTokens) -> Result<ChatTemplate, Error> {
        let (environment, has_blocks) = jinja::environment(source)?;
        Ok(ChatTemplate {
            environment,
            special,
            has_blocks,
            for_tools: None,
        })
    }

    /// The template for conversations with these tools, or without any.
    pub(crate) fn with(&self, tools: &serde_json::Value) -> &ChatTemplate {
        match &self.for_tools {
            Some(template) if !tools.is_null() => template,
            _ => self,
        }
    }

    /// The text of a conversation; with `add_generation_prompt` ready for the assistant's answer.
    ///
    /// # Errors
    /// What the template refuses.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let none = serde_json::Value::Null;
        let of = |messages: &[_]| self.render_marked(messages, &none, add_generation_prompt);
        let marked = match messages::with_arguments(messages) {
            // Some templates append arguments to a text, and refuse objects.
            Some(parsed) => of(&parsed).or_else(|_| of(messages)),
            None => of(messages),
        }?;
        Ok(assistant::take_marks(&marked).0)
    }

    /// The same, with marks around the assistant's turns where the template has blocks.
    pub(crate) fn render_marked(
        &self,
        messages: &[serde_json::Value],
        tools: &serde_json::Value,
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let special = Value::from(Serde(&self.special.0));
        let own = context! {
            messages => Value::from(Serde(messages::for_template(messages))),
            tools => Value::from(Serde(tools)),
            documents => Value::from(()),
            add_generation_prompt,
            ..special
        };
        self.environment.get_template(jinja::CHAT)?.render(own)
    }
}

/// Of several templates the one of that name.
fn named(templates: &serde_json::Value, name: &str) -> Option<String> {
    let mut templates = templates.as_array()?.iter();
    let template = templates.find(|template| template["name"] == name)?;
    template["template"].as_str().map(String::from)
}

fn malformed(path: &Path) -> TokenizerError {
    TokenizerError::Malformed {
        path: path.into(),
        reason: "`chat_template` is neither a text nor a list with one named `default`".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected texts are those of jinja2 3.1.6, in transformers' environment.
    #[test]
    fn escapes_titles_and_percents_are_pythons() {
        for (template, expected) in [
            (
                "{{ messages[0].content|e }}",
                "&lt;they&#39;re 3rd &amp; &#34;x&#34;/&gt;",
            ),
            (
                "{{ messages[0].content|e|e }}",
                "&lt;they&#39;re 3rd &amp; &#34;x&#34;/&gt;",
            ),
            (
                "{{ messages[0].content.title() }}",
                "<They'Re 3Rd & \"X\"/>",
            ),
            ("{{ messages[0].role|title }}", "User"),
            ("{{ '%s: %03d%%' % (messages[0].role, 7) }}", "user: 007%"),
            ("{{ '[%s]' % messages[0].role|upper ~ '!' }}", "[USER]!"),
            ("{% if 7 % 2 == 1 %}{{ '%.2f' % 1.5 }}{% endif %}", "1.50"),
        ] {
            let template = ChatTemplate::new(template, SpecialTokens::default()).unwrap();
            let said = serde_json::json!([{"role": "user", "content": "<they're 3rd & \"x\"/>"}]);
            let text = template.render(said.as_array().unwrap(), false).unwrap();
            assert_eq!(text, expected);
        }
    }
}
