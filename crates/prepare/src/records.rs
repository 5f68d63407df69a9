//! Documents in the forms of data sets: the fields of a record, and their meaning.

use serde::Deserialize;
use serde_json::{Value, json};

/// The document in a line or row.
#[derive(Debug)]
pub(crate) enum Document {
    /// A text, which is learnt as a whole.
    Text(String),
    /// A conversation, of which the assistant's turns are learnt.
    Chat(Chat),
    /// A prompt and a completion, which is learnt.
    Completion(Completion),
    /// An instruction in Alpaca's form, whose output is learnt.
    Instruction(Instruction),
    /// Two answers to one prompt, the chosen one before the rejected one: conversations or completions.
    Preference(Box<[Document; 2]>),
    /// Not a document, with what is wrong.
    Neither(String),
}

#[derive(Debug, PartialEq)]
pub(crate) struct Chat {
    pub(crate) messages: Vec<Value>,
    /// The available tools, or null.
    pub(crate) tools: Value,
    /// Number of the assistant's first turns that belong to the prompt, so that they are not learnt.
    pub(crate) given: usize,
}

#[derive(Debug, PartialEq)]
pub(crate) struct Completion {
    pub(crate) prompt: String,
    pub(crate) completion: String,
}

#[derive(Debug, PartialEq)]
pub(crate) struct Instruction {
    system: String,
    instruction: String,
    input: String,
    output: String,
}

/// A record's fields. Missing ones are null.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Record {
    text: Value,
    messages: Value,
    tools: Value,
    conversations: Value,
    system: Value,
    prompt: Value,
    completion: Value,
    chosen: Value,
    rejected: Value,
    instruction: Value,
    input: Value,
    output: Value,
}

/// The fields that make a document, for messages.
pub(crate) const DOCUMENTS: &str = "`text`, `messages`, `conversations`, `prompt` with `completion`, `chosen` with `rejected`, \
                                    or `instruction` with `output`";

/// The fields of a record that are used.
pub(crate) const FIELDS: [&str; 12] = [
    "text",
    "messages",
    "tools",
    "conversations",
    "system",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "instruction",
    "input",
    "output",
];

/// The fields that are lists.
pub(crate) const LISTS: [&str; 3] = ["messages", "tools", "conversations"];

impl Record {
    /// The record's document. A null field counts as missing. If a record has fields of several kinds, the first of
    /// these counts: `chosen`, `messages`, `conversations`, `instruction`, `prompt`, `text`; the others are usually its source
    /// or were made from it. Messages and tools may also be JSON within a text.
    pub(crate) fn document(self) -> Document {
        let document = if !self.chosen.is_null() && !self.rejected.is_null() {
            preference([self.prompt, self.chosen, self.rejected], self.tools)
        } else if !self.messages.is_null() {
            list("messages", self.messages).and_then(|messages| chat(messages, self.tools, 0))
        } else if !self.conversations.is_null() {
            list("conversations", self.conversations)
                .and_then(|turns| share_gpt(turns, self.system))
                .and_then(|messages| chat(messages, self.tools, 0))
        } else if !self.instruction.is_null() && !self.output.is_null() {
            instruction([self.system, self.instruction, self.input, self.output])
        } else if !self.prompt.is_null() && !self.completion.is_null() {
            completion(self.prompt, self.completion, self.tools)
        } else if !self.text.is_null() {
            string("text", self.text).map(Document::Text)
        } else {
            Err(format!("it has none of {DOCUMENTS}"))
        };
        document.unwrap_or_else(Document::Neither)
    }
}

impl Document {
    /// Bytes of its texts.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Document::Text(text) | Document::Neither(text) => text.len(),
            Document::Chat(chat) => {
                let messages = chat.messages.iter().map(text_bytes);
                messages.sum::<usize>() + text_bytes(&chat.tools)
            }
            Document::Completion(Completion { prompt, completion }) => {
                prompt.len() + completion.len()
            }
            Document::Preference(answers) => answers.iter().map(Document::bytes).sum(),
            Document::Instruction(Instruction {
                system,
                instruction,
                input,
                output,
            }) => system.len() + instruction.len() + input.len() + output.len(),
        }
    }
}

/// Bytes of the texts in a value, including its keys.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(text_bytes).sum(),
        Value::Object(fields) => {
            let fields = fields.iter();
            fields
                .map(|(key, value)| key.len() + text_bytes(value))
                .sum()
        }
        _ => 0,
    }
}

impl Instruction {
    /// Converts it to messages, for a model with a chat template.
    pub(crate) fn into_chat(self) -> Chat {
        let Instruction {
            system,
            instruction,
            input,
            output,
        } = self;
        let asked = match &input[..] {
            "" => instruction,
            input => format!("{instruction}\n\n{input}"),
        };
        let messages = [("system", system), ("user", asked), ("assistant", output)];
        let messages = messages.into_iter();
        let messages = messages.filter(|(role, content)| *role != "system" || !content.is_empty());
        Chat {
            messages: messages
                .map(|(role, content)| json!({"role": role, "content": content}))
                .collect(),
            tools: Value::Null,
            given: 0,
        }
    }

    /// Converts it to a prompt in the words of Stanford's Alpaca, for a model without a chat template. A system text
    /// replaces their first two sentences.
    pub(crate) fn into_completion(self) -> Completion {
        let Instruction {
            system,
            instruction,
            input,
            output,
        } = self;
        let (describes, input) = match &input[..] {
            "" => (
                "Below is an instruction that describes a task.",
                String::new(),
            ),
            input => (
                "Below is an instruction that describes a task, paired with an input that provides further context.",
                format!("### Input:\n{input}\n\n"),
            ),
        };
        let begins = match system.is_empty() {
            true => {
                format!("{describes} Write a response that appropriately completes the request.")
            }
            false => system,
        };
        Completion {
            prompt: format!("{begins}\n\n### Instruction:\n{instruction}\n\n{input}### Response:"),
            completion: output,
        }
    }
}

fn chat(messages: Vec<Value>, tools: Value, given: usize) -> Result<Document, String> {
    let tools = match tools {
        Value::Null => Value::Null,
        // JSON for no tools.
        Value::String(json) if json.trim() == "null" => Value::Null,
        tools => Value::Array(list("tools", tools)?),
    };
    Ok(Document::Chat(Chat {
        messages,
        tools,
        given,
    }))
}

/// The roles of speakers in ShareGPT's form, with names that other data sets use.
const SPEAKERS: [(&str, &str); 9] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
];

/// Converts turns with `from` and `value` to messages. Turns with a `role` are messages already.
fn share_gpt(turns: Vec<Value>, system: Value) -> Result<Vec<Value>, String> {
    let mut messages = Vec::with_capacity(turns.len() + 1);
    for (at, turn) in turns.into_iter().enumerate() {
        if turn["role"].is_string() {
            messages.push(turn);
            continue;
        }
        let (from, value) = (turn["from"].as_str(), turn["value"].as_str());
        let (Some(from), Some(value)) = (from, value) else {
            let number = at + 1;
            return Err(format!(
                "turn {number} of its `conversations` has no text in `from` and `value`"
            ));
        };
        let speaker = SPEAKERS.iter().find(|(name, _)| *name == from);
        let Some((_, role)) = speaker else {
            let known: Vec<&str> = SPEAKERS.iter().map(|(name, _)| *name).collect();
            return Err(format!(
                "turn {} of its `conversations` is from `{from}`; known are {}",
                at + 1,
                known.join(", ")
            ));
        };
        messages.push(json!({"role": role, "content": value}));
    }
    let system = optional_string("system", system)?;
    if !system.is_empty()
        && messages
            .first()
            .is_none_or(|first| first["role"] != "system")
    {
        messages.insert(0, json!({"role": "system", "content": system}));
    }
    Ok(messages)
}

fn instruction([system, instruction, input, output]: [Value; 4]) -> Result<Document, String> {
    Ok(Document::Instruction(Instruction {
        system: optional_string("system", system)?,
        instruction: string("instruction", instruction)?,
        input: optional_string("input", input)?,
        output: string("output", output)?,
    }))
}

/// A prompt and a completion, which are either texts, or messages and those that continue them.
fn completion(prompt: Value, completion: Value, tools: Value) -> Result<Document, String> {
    if let (Value::Array(_), Value::Array(_)) = (&prompt, &completion) {
        let mut messages = list("prompt", prompt)?;
        let given = answers(&messages);
        messages.extend(list("completion", completion)?);
        return chat(messages, tools, given);
    }
    Ok(Document::Completion(Completion {
        prompt: string("prompt", prompt)?,
        completion: string("completion", completion)?,
    }))
}

/// Two answers to a prompt: texts, or messages that continue those of the prompt. Without a prompt of that kind, it is what both
/// begin with.
fn preference([prompt, chosen, rejected]: [Value; 3], tools: Value) -> Result<Document, String> {
    let pair = |chosen, rejected| Document::Preference(Box::new([chosen, rejected]));
    if chosen.is_string() {
        let (mut chosen, mut rejected) = (string("chosen", chosen)?, string("rejected", rejected)?);
        let prompt = match prompt {
            Value::Null => {
                let shared = shared_text(&chosen, &rejected);
                rejected.replace_range(..shared, "");
                chosen.drain(..shared).collect()
            }
            prompt => string("prompt", prompt)?,
        };
        let answer = |completion| {
            let prompt = prompt.clone();
            Document::Completion(Completion { prompt, completion })
        };
        return Ok(pair(answer(chosen), answer(rejected)));
    }
    let (chosen, rejected) = (list("chosen", chosen)?, list("rejected", rejected)?);
    let asked = match prompt {
        Value::Array(asked) => asked,
        _ => {
            let both = chosen.iter().zip(&rejected);
            let same = both.take_while(|(chosen, rejected)| chosen == rejected);
            return Ok(pair(
                chat(
                    chosen.clone(),
                    tools.clone(),
                    answers(&chosen[..same.clone().count()]),
                )?,
                chat(rejected.clone(), tools, answers(&chosen[..same.count()]))?,
            ));
        }
    };
    let given = answers(&asked);
    let answer = |messages| chat([asked.clone(), messages].concat(), tools.clone(), given);
    Ok(pair(answer(chosen)?, answer(rejected)?))
}

/// Bytes of what two texts begin with, up to a space before the first difference.
fn shared_text(one: &str, other: &str) -> usize {
    let both = one.char_indices().zip(other.chars());
    let mut different = both.skip_while(|((_, one), other)| one == other);
    let shortest = one.len().min(other.len());
    let shared = different.next().map_or(shortest, |((at, _), _)| at);
    one[..shared].strip_suffix(' ').map_or(shared, str::len)
}

/// Number of the assistant's turns.
fn answers(messages: &[Value]) -> usize {
    let turns = messages.iter();
    turns
        .filter(|message| message["role"] == "assistant")
        .count()
}

fn string(name: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(format!("its `{name}` is not text")),
    }
}

fn optional_string(name: &str, value: Value) -> Result<String, String> {
    match value {
        Value::Null => Ok(String::new()),
        value => string(name, value),
    }
}

/// A list, or a text with a JSON list.
fn list(name: &str, value: Value) -> Result<Vec<Value>, String> {
    let value = match value {
        Value::String(json) => serde_json::from_str(&json)
            .map_err(|error| format!("its `{name}` are a text that is not JSON: {error}"))?,
        value => value,
    };
    match value {
        Value::Array(list) => Ok(list),
        _ => Err(format!("its `{name}` are not a list")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(value: Value) -> Document {
        serde_json::from_value::<Record>(value).unwrap().document()
    }

    fn messages(document: Document) -> (Vec<Value>, usize) {
        match document {
            Document::Chat(chat) => (chat.messages, chat.given),
            Document::Instruction(instruction) => (instruction.into_chat().messages, 0),
            other => panic!("{other:?}"),
        }
    }

    fn message(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    #[test]
    fn alpaca_is_a_chat_or_the_words_it_was_trained_with() {
        let record =
            || json!({"instruction": "Add.", "input": "1 2", "output": "3", "text": "all of it"});
        let expected = vec![message("user", "Add.\n\n1 2"), message("assistant", "3")];
        assert_eq!(messages(document(record())), (expected, 0));
        let Document::Instruction(instruction) = document(record()) else {
            panic!("it is an instruction")
        };
        let expected = "Below is an instruction that describes a task, paired with an input that provides further context. \
                        Write a response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n\
                        ### Response:";
        let completion = instruction.into_completion();
        assert_eq!(
            (&completion.prompt[..], &completion.completion[..]),
            (expected, "3")
        );
        let without = json!({"instruction": "Sing.", "input": "", "output": "La."});
        let Document::Instruction(instruction) = document(without) else {
            panic!("it is an instruction")
        };
        let expected = "Below is an instruction that describes a task. Write a response that appropriately completes the \
                        request.\n\n### Instruction:\nSing.\n\n### Response:";
        assert_eq!(instruction.into_completion().prompt, expected);
    }

    #[test]
    fn share_gpt_s_speakers_have_roles() {
        let turn = |from: &str, value: &str| json!({"from": from, "value": value});
        let turns = json!([turn("human", "Hi"), turn("gpt", "Hello!")]);
        let found = messages(document(
            json!({"conversations": turns, "system": "Be kind."}),
        ));
        let expected = vec![
            message("system", "Be kind."),
            message("user", "Hi"),
            message("assistant", "Hello!"),
        ];
        assert_eq!(found, (expected, 0));
        let unknown = document(json!({"conversations": [turn("cat", "Miaow")]}));
        assert!(
            matches!(&unknown, Document::Neither(reason) if reason.contains("from `cat`") && reason.contains("human")),
            "{unknown:?}"
        );
    }

    #[test]
    fn prompts_are_texts_or_messages() {
        let texts = document(json!({"prompt": "1 + 1 =", "completion": " 2"}));
        assert!(
            matches!(texts, Document::Completion(of) if of.prompt == "1 + 1 =" && of.completion == " 2")
        );
        let prompt = json!([
            message("user", "a"),
            message("assistant", "b"),
            message("user", "c")
        ]);
        let completion = json!([message("assistant", "d")]);
        let (messages, given) = messages(document(
            json!({"prompt": prompt, "completion": completion}),
        ));
        assert_eq!((messages.len(), given), (4, 1));
    }

    /// The two answers of a pair, each as the texts that are given and learnt.
    fn pair(value: Value) -> [(String, String); 2] {
        let Document::Preference(answers) = document(value) else {
            panic!("it is a pair")
        };
        let text = |messages: &[Value]| {
            let contents = messages.iter();
            let contents = contents.map(|message| message["content"].as_str().unwrap());
            contents.collect::<Vec<_>>().join(" ")
        };
        answers.map(|answer| match answer {
            Document::Completion(of) => (of.prompt, of.completion),
            Document::Chat(chat) => {
                let turns = chat.messages.iter().enumerate();
                let mut turns = turns.filter(|(_, message)| message["role"] == "assistant");
                let (at, _) = turns.nth(chat.given).expect("an answer is learnt");
                let (asked, answer) = chat.messages.split_at(at);
                (text(asked), text(answer))
            }
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn preferences_are_texts_or_messages_and_may_share_their_prompt() {
        let (user, assistant) = (
            |content: &str| message("user", content),
            |content: &str| message("assistant", content),
        );
        let expected = |prompt: &str, answers: [&str; 2]| {
            answers.map(|answer| (prompt.to_owned(), answer.to_owned()))
        };
        let texts = json!({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3", "messages": []});
        assert_eq!(pair(texts), expected("1 + 1 =", [" 2", " 3"]));
        let shared = json!({"chosen": "A: be\u{e9} good", "rejected": "A: be\u{e9} bad"});
        assert_eq!(pair(shared), expected("A: be\u{e9}", [" good", " bad"]));
        let asked = [user("a"), assistant("b"), user("c")];
        let chats =
            json!({"prompt": asked, "chosen": [assistant("d")], "rejected": [assistant("e")]});
        assert_eq!(pair(chats), expected("a b c", ["d", "e"]));
        let whole = |answer| [&asked[..], &[assistant(answer)]].concat();
        let implicit = json!({"prompt": "c", "chosen": whole("d"), "rejected": whole("e")});
        assert_eq!(pair(implicit), expected("a b c", ["d", "e"]));
        let strange = document(json!({"prompt": [user("a")], "chosen": "b", "rejected": "c"}));
        assert!(matches!(&strange, Document::Neither(reason) if reason.contains("`prompt`")));
    }

    #[test]
    fn every_kind_of_document_counts_the_bytes_of_its_texts() {
        let long = "long ".repeat(2000);
        for record in [
            json!({"text": long}),
            json!({"messages": [message("user", "a"), message("assistant", &long)]}),
            json!({"prompt": "a", "completion": long}),
            json!({"prompt": "a", "chosen": long, "rejected": "b"}),
            json!({"instruction": "a", "output": long}),
        ] {
            let bytes = document(record.clone()).bytes();
            assert!((10_000..10_100).contains(&bytes), "{bytes}: {record}");
        }
    }

    #[test]
    fn tools_may_be_null_or_a_list_as_json() {
        let tools = |tools: Value| {
            let said = [message("user", "a"), message("assistant", "b")];
            match document(json!({"messages": said, "tools": tools})) {
                Document::Chat(chat) => chat.tools,
                other => panic!("{other:?}"),
            }
        };
        for none in [Value::Null, json!("null")] {
            assert_eq!(tools(none), Value::Null);
        }
        assert_eq!(tools(json!("[1]")), json!([1]));
        assert_eq!(tools(json!([1])), json!([1]));
    }

    #[test]
    fn a_prompt_beside_a_text_is_where_it_came_from() {
        let text = document(json!({"prompt": "Write a text.", "text": "A text."}));
        assert!(matches!(text, Document::Text(text) if text == "A text."));
        let neither = document(json!({"prompt": "Write a text."}));
        assert!(matches!(neither, Document::Neither(_)));
    }
}
