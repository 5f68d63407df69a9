//! Generates text: reads the prompts, then makes a token at a time for all sequences together.

use crate::Result;
use crate::error::SessionError;
use crate::forward::Forward;
use crate::read_back::widened;
use crate::sampling::{Sampler, Sampling};
use memory::{Buffer, Layer, Phase};
use model::{Batch, BatchShape, KvCache, ModelError};
use std::iter::{self, zip};
use std::ops::Range;
use std::slice;

/// The most tokens of a prompt that are read at a time, which limits the memory for a long prompt.
pub const PROMPT_CHUNK: usize = 512;

/// Settings of generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// The most tokens to make for each prompt.
    pub max_tokens: usize,
    /// The most tokens of a sequence, prompt included. The cache has room for this many.
    pub window: usize,
    /// Tokens that end a sequence.
    pub ends: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Whether keys and values are cached. Without, the whole sequence is read again for every token.
    pub uses_cache: bool,
}

/// The result for one prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generated {
    /// Tokens after the prompt, without the one that ended it.
    pub tokens: Vec<u32>,
    /// Whether a token ended it. Otherwise there was no more room.
    pub is_ended: bool,
}

impl Generated {
    /// `end`: a token ended it; `length`: there was no room for more.
    pub fn finish_reason(&self) -> &'static str {
        if self.is_ended { "end" } else { "length" }
    }
}

/// A text whose keys and values stay cached between its parts, as a conversation's between its turns.
pub struct CachedText {
    cache: KvCache,
    /// The tokens whose keys and values are in the cache.
    tokens: Vec<u32>,
}

/// A sequence during generation.
struct Sequence {
    /// The number of its prompt.
    number: usize,
    /// The prompt and the tokens made so far.
    tokens: Vec<u32>,
    prompt: usize,
    /// The first tokens, whose keys and values are in the cache before the prompt is read.
    cached: usize,
    most: usize,
    sampler: Sampler,
    is_ended: bool,
}

impl Sequence {
    fn new(number: usize, prompt: &[u32], wanted: &Generation) -> Sequence {
        assert!(
            (1..=wanted.window).contains(&prompt.len()),
            "a prompt has a token, and room in the window"
        );
        Sequence {
            number,
            tokens: prompt.to_vec(),
            prompt: prompt.len(),
            cached: 0,
            most: wanted.window.min(prompt.len() + wanted.max_tokens),
            sampler: Sampler::new(wanted.sampling, number),
            is_ended: false,
        }
    }

    fn is_done(&self) -> bool {
        self.is_ended || self.tokens.len() >= self.most
    }

    /// Draws the next token, if there is room for one, and tells it unless it ends the sequence.
    fn grow(
        &mut self,
        logits: &[f32],
        wanted: &Generation,
        each: &mut dyn FnMut(usize, u32),
    ) -> Result {
        if self.is_done() {
            return Ok(());
        }
        if !logits.iter().all(|logit| logit.is_finite()) {
            let after = self.tokens.len();
            return Err(SessionError::NotFinite { after });
        }
        let token = self.sampler.draw(logits);
        self.is_ended = wanted.ends.contains(&token);
        if !self.is_ended {
            self.tokens.push(token);
            each(self.number, token);
        }
        Ok(())
    }

    fn made(mut self) -> Generated {
        Generated {
            tokens: self.tokens.split_off(self.prompt),
            is_ended: self.is_ended,
        }
    }
}

impl Forward<'_> {
    /// Continues prompts. Calls `each` for each token as it is made, with the prompt's number and the token.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if a lease is refused.
    ///
    /// # Panics
    /// If a prompt is empty, or longer than the window.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        wanted: &Generation,
        mut each: impl FnMut(usize, u32),
    ) -> Result<Vec<Generated>> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        let numbered = prompts.iter().enumerate();
        let sequences = numbered.map(|(number, prompt)| Sequence::new(number, prompt, wanted));
        let mut sequences: Vec<Sequence> = sequences.collect();
        match wanted.uses_cache {
            true => {
                let rooms = vec![wanted.window; sequences.len()];
                let mut cache = self.lease_cache(&rooms)?;
                self.with_cache(&mut cache, &mut sequences, wanted, &mut each)?;
            }
            false => {
                for sequence in &mut sequences {
                    while !sequence.is_done() {
                        let logits = self.read(None, sequence)?;
                        sequence.grow(&logits, wanted, &mut each)?;
                    }
                }
            }
        }
        Ok(sequences.into_iter().map(Sequence::made).collect())
    }

    /// On shapes, runs as much of a generation as leases all that it needs, from prompts of so many tokens. With a cache, all later
    /// tokens need what the second does, and a text that is read again needs what a prompt of its length does.
    ///
    /// # Errors
    /// As [`Forward::generate`].
    pub fn rehearse(&mut self, prompts: &[usize], wanted: &Generation) -> Result {
        let few = Generation {
            max_tokens: match wanted.uses_cache {
                true => wanted.max_tokens.min(2),
                false => wanted.max_tokens,
            },
            ends: Vec::new(),
            ..wanted.clone()
        };
        let short = self.model.longest_short_text();
        let grown = prompts.iter().map(|length| {
            let most = wanted.window.min(length + wanted.max_tokens);
            match *length <= short && most > short {
                true => short + 1,
                false => *length,
            }
        });
        let grown: Vec<usize> = grown.collect();
        let is_read_again = wanted.uses_cache && grown != prompts;
        for lengths in iter::once(prompts).chain(is_read_again.then_some(&grown[..])) {
            let texts: Vec<Vec<u32>> = lengths.iter().map(|length| vec![0; *length]).collect();
            self.generate(&texts, &few, |_, _| ())?;
        }
        Ok(())
    }

    /// Leases a cache for a text of at most `window` tokens that is generated in parts.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`] if it is refused.
    pub fn cached_text(&self, window: usize) -> Result<CachedText> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        Ok(CachedText {
            cache: self.lease_cache(&[window])?,
            tokens: Vec::new(),
        })
    }

    /// How many tokens the cached text and `prompt` have in common at their beginning: they are not read again. The last token
    /// of a prompt always is, because the next one follows from what the model makes of it. They have none in common if LongRoPE turns
    /// one text by short factors and the other by long ones, nor if layers keep a state of all cached tokens, and the prompt does not go
    /// on behind these.
    pub fn shared(&self, text: &CachedText, prompt: &[u32]) -> usize {
        let first = |tokens: &[u32]| self.model.first_table_row(tokens.len());
        if first(&text.tokens) != first(prompt) {
            return 0;
        }
        let equal = zip(&text.tokens, prompt).take_while(|(a, b)| a == b);
        let shared = equal.count().min(prompt.len().saturating_sub(1));
        let (_, states) = self.model.architecture().cache_shape().of_states();
        match states {
            Some(_) if shared < text.tokens.len() => 0,
            _ => shared,
        }
    }

    fn lease_cache(&self, rooms: &[usize]) -> Result<KvCache, ModelError> {
        let (shape, dtype) = (self.model.architecture().cache_shape(), self.model.dtype());
        KvCache::lease(self.memory, shape, dtype, rooms)
    }

    /// Continues `prompt` as [`Forward::generate`] does the prompt of that number, and reads only what differs from the
    /// cached text. The window is that of the cache.
    ///
    /// # Errors
    /// As [`Forward::generate`].
    ///
    /// # Panics
    /// As [`Forward::generate`].
    pub fn continue_text(
        &mut self,
        text: &mut CachedText,
        (number, prompt): (usize, &[u32]),
        wanted: &Generation,
        mut each: impl FnMut(u32),
    ) -> Result<Generated> {
        let _place = self.memory.enter(Phase::Eval, Layer::Whole);
        let mut sequence = Sequence::new(number, prompt, wanted);
        sequence.cached = self.shared(text, prompt);
        // A call that fails may leave anything in the cache.
        text.tokens.clear();
        let sequences = slice::from_mut(&mut sequence);
        self.with_cache(&mut text.cache, sequences, wanted, &mut |_, token| {
            each(token)
        })?;
        // The last token, if it was drawn, is read only if another one was drawn after it.
        let has_drawn = sequence.tokens.len() > sequence.prompt;
        let read = sequence.tokens.len() - usize::from(has_drawn && !sequence.is_ended);
        text.tokens = sequence.tokens[..read].to_vec();
        Ok(sequence.made())
    }

    /// Reads the prompts one after the other. Afterwards each pass takes the last token of every sequence. Finished
    /// sequences stay in the pass, at their last position: it costs no less without them, and its leases stay the same.
    fn with_cache(
        &mut self,
        cache: &mut KvCache,
        sequences: &mut [Sequence],
        wanted: &Generation,
        each: &mut dyn FnMut(usize, u32),
    ) -> Result {
        for (row, sequence) in sequences.iter_mut().enumerate() {
            let logits = self.read(Some((cache, row)), sequence)?;
            sequence.grow(&logits, wanted, each)?;
        }
        while !sequences.iter().all(Sequence::is_done) {
            self.read_again(cache, sequences)?;
            let logits = self.next(cache, sequences)?;
            let rows = logits.chunks_exact(logits.len() / sequences.len());
            for (sequence, logits) in zip(&mut *sequences, rows) {
                sequence.grow(logits, wanted, each)?;
            }
        }
        Ok(())
    }

    /// Reads what a row of the cache lacks of a sequence, or all of it without a cache; returns the logits for the next token.
    fn read(
        &mut self,
        mut cache: Option<(&mut KvCache, usize)>,
        sequence: &Sequence,
    ) -> Result<Vec<f32>> {
        let tokens = &sequence.tokens;
        let first = self.model.first_table_row(tokens.len());
        let at_once = cache.as_ref().map_or(tokens.len(), |_| PROMPT_CHUNK);
        let (mut read, mut logits) = (sequence.cached, Vec::new());
        for chunk in tokens[read..].chunks(at_once) {
            let places = (first + read) as i32..;
            let places: Vec<i32> = places.take(chunk.len()).collect();
            read += chunk.len();
            let lengths = [read];
            let cached = cache.as_mut();
            let cached = cached.map(|(cache, row)| (&mut **cache, *row..*row + 1, &lengths[..]));
            let next = self.next_logits(1, chunk, &places, cached)?;
            if read == tokens.len() {
                logits = self.download(&next)?;
            }
        }
        Ok(logits)
    }

    /// Reads sequences again that have just outgrown LongRoPE's original context: short factors turned their cached keys.
    fn read_again(&mut self, cache: &mut KvCache, sequences: &mut [Sequence]) -> Result {
        let first = |length| self.model.first_table_row(length);
        let moved = |one: &Sequence| {
            !one.is_done() && first(one.tokens.len()) != first(one.tokens.len() - 1)
        };
        let moved: Vec<usize> = (0..sequences.len())
            .filter(|row| moved(&sequences[*row]))
            .collect();
        for row in moved {
            sequences[row].cached = 0;
            self.read(Some((cache, row)), &sequences[row])?;
        }
        Ok(())
    }

    /// The logits `[b, v]` for the token after the last one of every sequence.
    fn next(&mut self, cache: &mut KvCache, sequences: &[Sequence]) -> Result<Vec<f32>> {
        let lengths: Vec<usize> = sequences.iter().map(|one| one.tokens.len()).collect();
        let last = zip(sequences, &lengths).map(|(one, length)| one.tokens[length - 1]);
        let last: Vec<u32> = last.collect();
        let model = self.model;
        let place = |length: &usize| (model.first_table_row(*length) + length - 1) as i32;
        let places: Vec<i32> = lengths.iter().map(place).collect();
        let cached = (cache, 0..sequences.len(), &lengths[..]);
        let next = self.next_logits(sequences.len(), &last, &places, Some(cached))?;
        self.download(&next)
    }

    /// The logits for the next token of `rows` sequences, from equally many tokens of each, at the given positions. With a cache they are
    /// the last ones of some of its sequences, which then have so many tokens.
    fn next_logits(
        &mut self,
        rows: usize,
        tokens: &[u32],
        positions: &[i32],
        cached: Option<(&mut KvCache, Range<usize>, &[usize])>,
    ) -> Result<Buffer> {
        if (self.stop)() {
            return Err(SessionError::Stopped);
        }
        let (memory, kernels, model) = (self.memory, self.kernels, self.model);
        let ids: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
        let seq = ids.len() / rows;
        let shape = BatchShape { rows, seq };
        let batch = Batch::without_targets(memory, kernels, shape, &ids, positions)?;
        let cached =
            cached.map(|(cache, of, lengths)| cache.sequences(memory, kernels, of, lengths));
        let work = self.work(slice::from_ref(&batch), cached.transpose()?);
        Ok(model.next_logits(work)?)
    }

    fn download(&self, logits: &Buffer) -> Result<Vec<f32>> {
        let elements = logits.dims().elements();
        Ok(widened(logits.dtype(), elements, |bytes| {
            self.kernels.download(bytes, logits.view())
        })?)
    }
}
