//! Tokens of a step as a program gives them, checked and padded.

use super::Trainer;
use crate::failure::{Failure, Result};
use data::{MASKED, MicroBatch, Packing, StepBatch, padded_lengths};
use session::{SessionError, StepOutcome};
use settings::Config;
use std::ops::Range;

/// Tokens of a step, in the host's memory, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenRows {
    /// Rows, and tokens of each.
    pub dims: [usize; 2],
    /// `[rows, tokens]`: the ids.
    pub ids: Vec<i64>,
    /// `[rows, tokens]`: the token that is wanted after each id, or -100 for none.
    pub targets: Vec<i64>,
    /// `[rows, tokens]`: the position of each token in its document, where rows have several. A document begins at 0.
    pub positions: Option<Vec<i64>>,
}

impl Trainer {
    /// As [`Trainer::step`], for rows that may be shorter than `data.seq`, and fewer than a multiple of `batch.micro`: they are filled with tokens
    /// without targets. With `data.packing = "pad"` a micro-batch is only as long as its rows have to be, and with `first-fit` rows may have
    /// several documents.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn step_rows(&mut self, rows: &TokenRows) -> Result<StepOutcome> {
        self.check_objective(false)?;
        let batch = rows.batch(&self.config)?;
        self.make(batch, None)
    }

    /// As [`Trainer::loss`], for [`Trainer::step_rows`]' rows.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn loss_of_rows(&mut self, rows: &TokenRows) -> Result<f64> {
        let batch = rows.batch(&self.config)?;
        self.enter()?;
        let stop = self.stop.clone();
        let micro_batches = batch.micro.into_iter().map(|micro| match stop() {
            true => Err(SessionError::Stopped),
            false => Ok(micro),
        });
        let mut forward = self.session.awake_mut()?.forward()?;
        Ok(forward.evaluate(micro_batches)?.loss())
    }
}

impl TokenRows {
    /// The micro-batches of a step with these rows.
    pub(super) fn batch(&self, config: &Config) -> Result<StepBatch> {
        let ([rows, width], most) = (self.dims, config.batch.micro * config.batch.accum);
        let refused = |sentence: String| Err(Failure::Usage(sentence));
        if rows > most {
            return refused(format!(
                "the tokens are [{rows}, {width}]; this trainer was planned with 1 to {most} rows: batch.micro and batch.accum say how many"
            ));
        }
        if self
            .targets
            .iter()
            .all(|target| *target == i64::from(MASKED))
            && !self.targets.is_empty()
        {
            return refused(format!(
                "all `targets` are {MASKED}: a step needs one to learn from"
            ));
        }
        Ok(self.micro_batches(config)?.into_iter().collect())
    }

    /// Micro-batches with these rows, of which there may be any number.
    pub(super) fn micro_batches(&self, config: &Config) -> Result<Vec<MicroBatch>> {
        let ([rows, width], longest) = (self.dims, config.data.seq);
        let refused = |sentence: String| Err(Failure::Usage(sentence));
        if rows == 0 || width == 0 || width > longest {
            return refused(format!(
                "the tokens are [{rows}, {width}]; this trainer was planned with rows of 1 to {longest} tokens: data.seq says how many"
            ));
        }
        for (tokens, name) in [(&self.ids, "ids"), (&self.targets, "targets")]
            .into_iter()
            .chain(
                self.positions
                    .iter()
                    .map(|positions| (positions, "positions")),
            )
        {
            if tokens.len() != rows * width {
                return refused(format!(
                    "there are {} `{name}` for [{rows}, {width}] tokens; each token has one",
                    tokens.len()
                ));
            }
        }
        let vocab = config.model.vocab as i64;
        self.check_tokens(&self.ids, "ids", |token| (0..vocab).contains(&token), vocab)?;
        let is_target = |token| token == i64::from(MASKED) || (0..vocab).contains(&token);
        self.check_tokens(&self.targets, "targets", is_target, vocab)?;
        if self
            .targets
            .iter()
            .all(|target| *target == i64::from(MASKED))
        {
            return refused(format!(
                "all `targets` are {MASKED}: a step needs one to learn from"
            ));
        }
        let (packing, places) = (config.packing(), self.places(config));
        let documents = self.documents(packing)?;
        let micro = places
            .iter()
            .map(|place| self.micro_batch(place, packing, documents.as_deref()));
        Ok(micro.collect())
    }

    fn check_tokens(
        &self,
        tokens: &[i64],
        name: &str,
        is_known: impl Fn(i64) -> bool,
        vocab: i64,
    ) -> Result {
        let Some(place) = tokens.iter().position(|token| !is_known(*token)) else {
            return Ok(());
        };
        let width = self.dims[1];
        Err(Failure::Usage(format!(
            "`{name}` at [{}, {}] is {}; the model knows tokens from 0 to {}",
            place / width,
            place % width,
            tokens[place],
            vocab - 1
        )))
    }

    /// For each token the position in its row at which its document begins; none if each row is one document.
    fn documents(&self, packing: Packing) -> Result<Option<Vec<i32>>> {
        let width = self.dims[1];
        let Some(positions) = &self.positions else {
            return Ok(None);
        };
        let mut begins = Vec::with_capacity(positions.len());
        for (place, position) in positions.iter().enumerate() {
            let column = (place % width) as i64;
            let goes_on = column > 0 && *position == positions[place - 1] + 1;
            if *position != 0 && !goes_on {
                return Err(Failure::Usage(format!(
                    "`positions` at [{}, {column}] is {position}; a document's first token has position 0, and each other one the next",
                    place / width
                )));
            }
            begins.push((column - position) as i32);
        }
        if begins.iter().all(|begin| *begin == 0) {
            return Ok(None);
        }
        match packing {
            Packing::FirstFit => Ok(Some(begins)),
            packing => Err(Failure::Usage(format!(
                "`positions` say that rows have several documents, and this trainer was planned with data.packing = \"{packing}\"; make it with \
                 packing \"first-fit\", which keeps documents from seeing each other"
            ))),
        }
    }

    /// The micro-batches that hold these rows.
    pub(super) fn places(&self, config: &Config) -> Vec<FilledRows> {
        let [all, width] = self.dims;
        let (rows, longest) = (config.batch.micro, config.data.seq);
        let seq = match config.packing() {
            Packing::Pad => padded_lengths(longest).find(|length| *length >= width),
            _ => None,
        };
        let place = |first: usize| FilledRows {
            own: first..(first + rows).min(all),
            width,
            rows,
            seq: seq.unwrap_or(longest),
        };
        (0..all).step_by(rows).map(place).collect()
    }

    fn micro_batch(
        &self,
        place: &FilledRows,
        packing: Packing,
        documents: Option<&[i32]>,
    ) -> MicroBatch {
        let begin = |at: usize| documents.map_or(0, |documents| documents[at]);
        let lengths = || (0..place.rows).map(|row| place.given(row).max(1) as i32);
        MicroBatch {
            input_ids: place.filled(&|at| self.ids[at] as i32, &|_| 0),
            targets: place.filled(&|at| self.targets[at] as i32, &|_| MASKED),
            rows: place.rows,
            seq: place.seq,
            part: memory::Rank::ALONE,
            // What fills a row is a document of its own.
            documents: (packing == Packing::FirstFit)
                .then(|| place.filled(&begin, &|given| given as i32)),
            lengths: (packing != Packing::Concatenate).then(|| lengths().collect()),
            beside: None,
        }
    }
}

/// Where a micro-batch has rows of a program's. What they leave free is filled up.
pub(super) struct FilledRows {
    /// The program's rows, each of `width` tokens.
    own: Range<usize>,
    width: usize,
    /// Those of the micro-batch, each of `seq` tokens.
    rows: usize,
    seq: usize,
}

impl FilledRows {
    /// How many tokens a row of the micro-batch has of the program's.
    fn given(&self, row: usize) -> usize {
        if row < self.own.len() { self.width } else { 0 }
    }

    /// `[rows, seq]`: something of each token of the program's, by its place among all, and behind those of a row something by their number.
    pub(super) fn filled<T: Copy>(
        &self,
        of: &dyn Fn(usize) -> T,
        filling: &dyn Fn(usize) -> T,
    ) -> Vec<T> {
        let row = |row: usize| {
            let (first, given) = ((self.own.start + row) * self.width, self.given(row));
            let filling = std::iter::repeat_n(filling(given), self.seq - given);
            (first..first + given)
                .map(of)
                .chain(filling)
                .collect::<Vec<T>>()
        };
        (0..self.rows).flat_map(row).collect()
    }

    /// What the program's tokens have of `values [rows, seq]`.
    pub(super) fn own_of<'a>(&'a self, values: &'a [f32]) -> impl Iterator<Item = f32> + 'a {
        let rows = values.chunks(self.seq).take(self.own.len());
        rows.flat_map(|row| row[..self.width].iter().copied())
    }

    /// Tokens of the micro-batch.
    pub(super) fn tokens(&self) -> usize {
        self.rows * self.seq
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configuration;

    fn rows(dims: [usize; 2]) -> TokenRows {
        let tokens = (0..(dims[0] * dims[1]) as i64)
            .map(|token| token % 7)
            .collect::<Vec<_>>();
        TokenRows {
            dims,
            ids: tokens.clone(),
            targets: tokens,
            positions: None,
        }
    }

    fn config(set: &[&str]) -> Config {
        let sizes = [
            "data.seq=8",
            "batch.micro=2",
            "batch.accum=2",
            "data.path=program",
        ];
        configuration("tiny", &[&sizes, set].concat()).unwrap()
    }

    #[test]
    fn rows_are_filled_up_with_tokens_without_targets() {
        let batch = rows([3, 5]).batch(&config(&[])).unwrap();
        assert_eq!(batch.micro.len(), 2);
        assert_eq!(batch.target_count(), 15);
        let last = &batch.micro[1];
        assert_eq!(last.input_ids[..8], [3, 4, 5, 6, 0, 0, 0, 0]);
        assert_eq!(last.targets[5..], [MASKED; 11]);
        assert_eq!((&last.documents, &last.lengths), (&None, &None));
    }

    #[test]
    fn positions_say_where_documents_begin() {
        let packed = config(&["data.packing=first-fit", "attention.backend=flash"]);
        let with = |positions: Vec<i64>| TokenRows {
            positions: Some(positions),
            ..rows([1, 5])
        };
        let batch = with(vec![0, 1, 0, 1, 2]).batch(&packed).unwrap();
        let documents = batch.micro[0].documents.as_deref().unwrap();
        assert_eq!(documents[..8], [0, 0, 2, 2, 2, 5, 5, 5]);
        with(vec![0, 1, 2, 3, 4]).batch(&config(&[])).unwrap();
        for (positions, of, words) in [
            (vec![0, 1, 0, 1, 2], config(&[]), "first-fit"),
            (vec![0, 2, 3, 4, 5], packed.clone(), "at [0, 1] is 2"),
            (vec![1, 2, 3, 4, 5], packed, "at [0, 0] is 1"),
        ] {
            let refused = with(positions).batch(&of).unwrap_err().to_string();
            assert!(refused.contains(words), "{refused}");
        }
    }

    #[test]
    fn what_was_not_planned_is_refused() {
        let refused = |rows: TokenRows| rows.batch(&config(&[])).unwrap_err().to_string();
        for (dims, words) in [
            ([0, 4], "1 to 8 tokens"),
            ([1, 0], "1 to 8 tokens"),
            ([1, 9], "1 to 8 tokens"),
            ([5, 4], "1 to 4 rows"),
        ] {
            assert!(refused(rows(dims)).contains(words), "{dims:?}");
        }
        let one = |at: usize, token: i64| {
            let mut rows = rows([1, 4]);
            rows.ids[at] = token;
            rows
        };
        assert!(refused(one(3, 256)).contains("`ids` at [0, 3] is 256"));
        assert!(refused(one(0, -100)).contains("`ids` at [0, 0] is -100"));
        let masked = TokenRows {
            targets: vec![-100; 4],
            ..rows([1, 4])
        };
        assert!(refused(masked).contains("all `targets` are -100"));
    }
}
