//! Open data: one or several inputs, and their samples.

use crate::Result;
use std::path::Path;

use crc32fast::Hasher;

use crate::{
    BesideTargets, CutDocuments, DataError, Inputs, MicroBatch, Options, Packing,
    buckets::padded_lengths,
    mix::{MixedOrder, Order, Shares},
    order::SourceOrder,
    source::{DataSource, TokensOf},
};

/// An error message names this many samples, and only counts the others.
const SAMPLES_NAMED: usize = 8;

/// An open data source that has at least one sample.
///
/// - Built-in text (no path) and text files: each byte is a token, vocabulary 256.
/// - Token files: llm.c's layout, its Llama-3 variant, and bare u16; or a folder of them. An llm.c file may have a
///   [`ShardIndex`](crate::ShardIndex) beside it. Then its blocks are compared with their checksums when they are first
///   read, tokens that it masks are never targets, and rows may follow its documents ([`Packing`]).
/// - Batch files: safetensors with `input_ids` and `targets`, i32 or i64 `[N, seq]`, a sample a
///   row, target [`MASKED`](crate::MASKED) for no target.
/// - Several of these, which take turns, by their weights or by their sizes.
///
/// A sample is a row. With [`Packing::Concatenate`], sample `i` of a shard is the `seq + 1` tokens from `i * seq`, so
/// it has `(tokens - 1) / seq` samples, and a padded one of what is left if [`Options::tails`] says so. Otherwise rows hold parts of documents, at 12 bytes of host memory for each part.
///
/// Files are mapped rather than read. Tokens are checked against the vocabulary when they are used.
#[derive(Debug)]
pub struct Dataset {
    /// At least one.
    sources: Vec<DataSource>,
    shares: Shares,
    options: Options,
    seq: usize,
    /// What [`BesideTargets::Reference`] has of each sample.
    reference: Option<Vec<f32>>,
}

impl Dataset {
    /// Opens and checks the data that `options` describe.
    ///
    /// # Errors
    ///
    /// A [`DataError`] if the options, or a file's header or size, are invalid.
    pub fn open(options: &Options) -> Result<Self> {
        options.validate()?;
        let options = &Options {
            packing: options.decided_packing().0,
            ..options.clone()
        };
        let paths = options.path.iter().flat_map(Inputs::paths).map(Some);
        let paths: Vec<Option<&Path>> = match options.path {
            None => vec![None],
            Some(_) => paths.collect(),
        };
        let sources = paths
            .into_iter()
            .map(|path| DataSource::open(path, options));
        let sources: Vec<DataSource> = sources.collect::<Result<_, _>>()?;
        let seq = sources[0].seq(options);
        if let Some(other) = sources.iter().find(|source| source.seq(options) != seq) {
            return Err(DataError::Setting(format!(
                "data inputs {} and {} do not go together: rows of the one have {seq} tokens, of the other {}; the rows of a batch \
                 file stay as long as they are, those of token files and text are as long as data.seq",
                sources[0].name(),
                other.name(),
                other.seq(options)
            )));
        }
        options.check_step_size(seq)?;
        let together = options.rows_together();
        let sizes = sources
            .iter()
            .map(|source| (source.samples() / together) as u64);
        let weights = options.path.iter().flat_map(Inputs::iter);
        let weights: Option<Vec<f64>> = weights.map(|input| input.weight).collect();
        let weights = weights.filter(|weights| weights.len() > 1);
        let dataset = Self {
            shares: Shares::new(sizes.collect(), weights.as_deref()),
            sources,
            options: options.clone(),
            seq,
            reference: None,
        };
        tracing::debug!("opened {}", dataset.describe());
        Ok(dataset)
    }

    /// Samples in an epoch; at least 1. With weights, about as many as all inputs have together.
    pub fn samples(&self) -> usize {
        self.shares.samples() as usize * self.options.rows_together()
    }

    /// Samples of all inputs, whatever their weights.
    pub fn rows(&self) -> usize {
        self.sources.iter().map(DataSource::samples).sum()
    }

    /// Tokens in a sequence; the most with [`Packing::Pad`].
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// The same samples with a number for each, which micro-batches have then as [`BesideTargets::Reference`]. 4 bytes of host
    /// memory a sample.
    ///
    /// # Panics
    /// If there are more or fewer numbers than samples of all inputs.
    #[must_use]
    pub fn with_reference(self, reference: Vec<f32>) -> Self {
        assert_eq!(reference.len(), self.rows(), "a number for each sample");
        Self {
            reference: Some(reference),
            ..self
        }
    }

    /// The options with which it was opened.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// One line for people: the kind of data, and how much there is.
    pub fn describe(&self) -> String {
        if let [source] = &self.sources[..] {
            return source.describe(self.seq);
        }
        let each = self.sources.iter().enumerate().map(|(at, source)| {
            let (_, quota) = self.shares.of(at);
            let percent = 100.0 * quota as f64 / self.shares.samples() as f64;
            let passes = self.shares.passes(at);
            let what = source.describe(self.seq);
            format!("{percent:.1} % {what} ({passes:.2} passes an epoch)")
        });
        let each: Vec<String> = each.collect();
        format!("{}; {} samples an epoch", each.join("; "), self.samples())
    }

    /// Documents that are longer than a row.
    pub fn cut_documents(&self) -> CutDocuments {
        let cut = self.sources.iter().map(DataSource::cut_documents);
        cut.fold(CutDocuments::default(), CutDocuments::plus)
    }

    /// A line for people about documents that are longer than a row, and what to do; none if there are none.
    pub fn describe_cut_documents(&self) -> Option<String> {
        let seq = self.seq;
        let CutDocuments {
            documents,
            cut,
            emptied,
        } = self.cut_documents();
        if cut == 0 {
            return None;
        }
        let nothing_left = match emptied {
            0 => String::new(),
            emptied => format!(", and {emptied} of them keep no token that is learnt"),
        };
        Some(match (self.options.packing, self.options.pairs) {
            (Packing::Pad, true) => format!(
                "{cut} of {documents} pairs have a text longer than --seq {seq}, which loses its end{nothing_left}; all of them count \
                 in the means of losses and rewards; raise --seq, or leave such pairs out"
            ),
            (Packing::Pad, false) => format!(
                "{cut} of {documents} documents are longer than --seq {seq} and lose their ends{nothing_left}; raise --seq, or take \
                 --packing first-fit, which cuts them into parts"
            ),
            _ => format!(
                "{cut} of {documents} documents are longer than --seq {seq} and are cut into parts, of which none sees another; raise \
                 --seq to keep documents whole"
            ),
        })
    }

    /// The error for a step without any target.
    pub(crate) fn no_targets(&self, samples: &[usize], epoch: u64) -> DataError {
        DataError::NoTargets {
            file: self.name(),
            samples: list(samples),
            epoch,
            cut: self.cut_documents(),
        }
    }

    /// The path of each input (`None`: the built-in text), and the meaning of its tokens.
    pub fn inputs(&self) -> impl Iterator<Item = (Option<&Path>, TokensOf)> {
        let mut paths = self.options.path.iter().flat_map(Inputs::paths);
        let sources = self.sources.iter();
        sources.map(move |source| (paths.next(), source.tokens_of()))
    }

    /// Average bytes of text for each token of an epoch, which converts a loss to bits per byte: 1 for text, and
    /// according to the index for shards. `None` if it is not known.
    pub fn bytes_per_token(&self) -> Option<f64> {
        let (mut all_bytes, mut all_tokens) = (0.0, 0.0);
        for (at, source) in self.sources.iter().enumerate() {
            let (bytes, tokens) = source.text_and_tokens()?;
            let passes = self.shares.passes(at);
            all_bytes += bytes as f64 * passes;
            all_tokens += tokens as f64 * passes;
        }
        (all_bytes > 0.0).then(|| all_bytes / all_tokens)
    }

    /// Distinguishes this data from other data, whatever the names of its files: number and size of the files, and a
    /// checksum of their indices, or of some places in files without an index; for several inputs also their shares.
    pub fn fingerprint(&self) -> String {
        let mut crc = Hasher::new();
        let (mut files, mut bytes) = (0, 0);
        for source in &self.sources {
            let (own_files, own_bytes) = source.fingerprint(&mut crc);
            files += own_files;
            bytes += own_bytes;
        }
        if self.sources.len() > 1 {
            self.shares.fingerprint(&mut crc);
        }
        format!("files {files}, bytes {bytes}, crc32 {:08x}", crc.finalize())
    }

    /// The name for messages: the path, or a text in its place.
    pub(crate) fn name(&self) -> String {
        let names: Vec<&str> = self.sources.iter().map(DataSource::name).collect();
        names.join(", ")
    }

    /// The order of samples, shuffled by a seed or not.
    pub(crate) fn order(&self, seed: Option<u64>) -> Order {
        match &self.sources[..] {
            [_] => Order::One(SourceOrder::new(seed, self.shares.samples())),
            _ => Order::Mixed(MixedOrder::new(self.shares.clone(), seed)),
        }
    }

    /// The source of a sample, and its number there. Samples are numbered one source after the other.
    fn locate(&self, mut sample: usize) -> (&DataSource, usize) {
        for source in &self.sources {
            if sample < source.samples() {
                return (source, sample);
            }
            sample -= source.samples();
        }
        unreachable!("an order gives samples that there are")
    }

    /// Number of a sample's inputs that are not padding.
    pub(crate) fn length(&self, sample: usize) -> usize {
        let (source, sample) = self.locate(sample);
        source.length(sample, self.seq)
    }

    /// Number of a sample's targets, by the index; none for batch files, which have to be read for it.
    pub(crate) fn targets(&self, sample: usize) -> Option<usize> {
        let (source, sample) = self.locate(sample);
        source.targets(sample, self.seq)
    }

    /// The shape of a micro-batch of samples (below [`Self::samples`]), without tokens. Its length follows from the
    /// indices of documents, so no token is read.
    pub(crate) fn shape(&self, samples: &[usize]) -> MicroBatch {
        let packing = self.options.packing;
        let seq = match packing {
            Packing::Pad => {
                let longest = samples.iter().map(|&sample| self.length(sample)).max();
                let longest = longest.unwrap_or(1).max(1);
                let mut lengths = padded_lengths(self.seq);
                lengths
                    .find(|&length| length >= longest)
                    .unwrap_or(self.seq)
            }
            _ => self.seq,
        };
        MicroBatch::unread(samples.len(), seq, packing == Packing::FirstFit)
    }

    /// Reads samples (below [`Self::samples`]) as the rows of a micro-batch.
    pub(crate) fn read(&self, samples: &[usize]) -> Result<MicroBatch> {
        let vocab = self.options.vocab;
        let mut batch = self.shape(samples);
        if self.options.packing != Packing::Concatenate {
            let lengths = samples.iter().map(|&sample| self.length(sample) as i32);
            batch.lengths = Some(lengths.collect());
        }
        let of_samples = |of: &Vec<f32>| samples.iter().map(|&sample| of[sample]).collect();
        let reference = self.reference.as_ref().map(of_samples);
        batch.beside = reference.map(BesideTargets::Reference);
        batch.make_room();
        for &sample in samples {
            let (source, sample) = self.locate(sample);
            source.read(sample, vocab, &mut batch)?;
            batch.fill_row();
        }
        Ok(batch)
    }
}

/// The numbers of the first few samples, and the count of the others.
fn list(samples: &[usize]) -> String {
    let (named, rest) = samples.split_at(samples.len().min(SAMPLES_NAMED));
    let named: Vec<_> = named.iter().map(usize::to_string).collect();
    match rest.len() {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
