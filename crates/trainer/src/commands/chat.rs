//! The `chat` command: a conversation with a model, turn by turn.

use super::generate::SamplingArgs;
use super::generate::prompts::{chat_template, check, conversation};
use super::trained::{Trained, TrainedArgs, settings};
use crate::failure::{Failure, Result};
use crate::stdout::print;
use clap::Args;
use memory::format_bytes;
use planner::InferencePlan;
use serde::Serialize;
use serde_json::{Value, json};
use session::{CachedText, Generation, Inference};
use std::io::{IsTerminal, stdin, stdout};
use tokenization::{ChatTemplate, Tokenizer};

/// The largest context that is taken unless the command names one: a model of many positions would need much memory for all.
const CONTEXT: usize = 4096;

/// Forgets the conversation.
const RESET: &str = "/reset";

/// Flags of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// The model.
    #[command(flatten)]
    pub trained: TrainedArgs,
    /// System message
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Tokens of an answer, at most [default: as many as the context has room for]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_tokens: Option<u64>,
    /// Context length: room for so many tokens, answers included [default: the model's positions, at most 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pub context: Option<u64>,
    /// How tokens are drawn.
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// A turn, as `chat --json` prints it on a line.
#[derive(Serialize)]
struct Turn {
    text: String,
    tokens: Vec<u32>,
    /// Tokens of the conversation before this answer.
    prompt_tokens: usize,
    /// Those of them whose keys and values were there from earlier turns.
    cached_tokens: usize,
    /// `end`: the model ended its turn; `length`: there was no room for more tokens.
    finish_reason: &'static str,
}

/// Talks until standard input ends.
pub(crate) fn chat(args: &ChatArgs) -> Result {
    let trained = Trained::open(&args.trained, Vec::new())?;
    let tokenizer = trained.tokenizer()?;
    let instead = "`trainer generate --prompt` goes on with a text";
    let template = chat_template(&trained.folder, instead)?;
    let wanted = wanted(args, &trained, &tokenizer)?;
    let settings = settings(&trained.completed, wanted.window)?;
    let (mut inference, plan) = trained.load(&settings, |settings, target| {
        InferencePlan::of_sequences(settings, target, (1, wanted.window))
    })?;
    let text = inference.forward().cached_text(wanted.window)?;
    let is_watched = stdin().is_terminal() && stdout().is_terminal() && !args.trained.json;
    if is_watched {
        let bytes = plan.kv_cache.map_or(0, |cache| cache.bytes);
        eprintln!(
            "room for {} tokens ({} of keys and values); {RESET} forgets the conversation, Ctrl-D ends it",
            wanted.window,
            format_bytes(bytes)
        );
    }
    let system = args.system.iter();
    Chat {
        system: system
            .map(|said| json!({"role": "system", "content": said}))
            .collect(),
        said: Vec::new(),
        vocab: trained.completed.config.model.vocab,
        is_json: args.trained.json,
        is_watched,
        template,
        tokenizer: &tokenizer,
        wanted,
        inference,
        text,
    }
    .talk()
}

/// Settings of the generation: the window is the whole conversation's.
fn wanted(args: &ChatArgs, trained: &Trained, tokenizer: &Tokenizer) -> Result<Generation> {
    let positions = trained.positions();
    let context = args.context.map(|tokens| tokens as usize);
    if let (Some(context), Some(positions)) = (context, positions)
        && context > positions
    {
        return Err(Failure::Usage(format!(
            "--context {context} is more than the {positions} positions of the model; give at most as many"
        )));
    }
    let window = context.unwrap_or_else(|| positions.unwrap_or(CONTEXT).min(CONTEXT));
    Ok(Generation {
        max_tokens: args.max_tokens.map_or(window, |tokens| tokens as usize),
        window,
        ends: trained.ends(tokenizer),
        sampling: args.sampling.sampling(),
        uses_cache: true,
    })
}

/// A conversation.
struct Chat<'a> {
    /// The system's message, if there is one.
    system: Vec<Value>,
    /// Everything said since the last reset.
    said: Vec<Value>,
    vocab: usize,
    is_json: bool,
    /// Whether a person sees prompts, and may say something else where a turn is refused.
    is_watched: bool,
    template: ChatTemplate,
    tokenizer: &'a Tokenizer,
    wanted: Generation,
    inference: Inference,
    text: CachedText,
}

impl Chat<'_> {
    fn talk(mut self) -> Result {
        while let Some(line) = self.line()? {
            match line.trim() {
                "" => {}
                RESET => self.said.clear(),
                line => match self.turn(line) {
                    Err(refused @ Failure::Usage(_)) if self.is_watched => {
                        self.said.pop();
                        eprintln!("error: {refused}");
                    }
                    outcome => outcome?,
                },
            }
        }
        match self.is_watched {
            true => print("\n"),
            false => Ok(()),
        }
    }

    /// What the user says next; none once standard input has ended.
    fn line(&self) -> Result<Option<String>> {
        if self.is_watched {
            print("> ")?;
        }
        let mut line = String::new();
        let read = stdin().read_line(&mut line);
        let read = read.map_err(Failure::file("standard input"))?;
        Ok((read > 0).then_some(line))
    }

    /// Answers what the user says, and remembers both.
    fn turn(&mut self, line: &str) -> Result {
        self.said.push(json!({"role": "user", "content": line}));
        let messages = [self.system.as_slice(), self.said.as_slice()].concat();
        let prompt = conversation(&self.template, self.tokenizer, &messages)?;
        check(&prompt, self.vocab)?;
        let window = self.wanted.window;
        if prompt.len() >= window {
            return Err(Failure::Usage(format!(
                "the conversation has {} tokens, and there is room for {window}, answer included: begin anew with {RESET}, or give a \
                 larger --context if the model has the positions",
                prompt.len()
            )));
        }
        let turn = self.answer(&prompt)?;
        self.said
            .push(json!({"role": "assistant", "content": turn.text}));
        match self.is_json {
            true => print(format_args!("{}\n", json!(turn))),
            false => print("\n"),
        }
    }

    /// Makes the answer, and shows its text as it comes.
    fn answer(&mut self, prompt: &[u32]) -> Result<Turn> {
        let cached_tokens = self.inference.forward().shared(&self.text, prompt);
        let mut stream = self.tokenizer.stream_after(prompt);
        let (mut text, mut outcome) = (String::new(), Ok(()));
        let is_json = self.is_json;
        let mut show = |piece: String| {
            if !is_json && outcome.is_ok() {
                outcome = print(&piece);
            }
            text += &piece;
        };
        let number = self.said.len() / 2;
        let made = self.inference.forward().continue_text(
            &mut self.text,
            (number, prompt),
            &self.wanted,
            |token| show(stream.push(token)),
        )?;
        show(stream.finish());
        outcome?;
        Ok(Turn {
            text,
            prompt_tokens: prompt.len(),
            cached_tokens,
            finish_reason: made.finish_reason(),
            tokens: made.tokens,
        })
    }
}
