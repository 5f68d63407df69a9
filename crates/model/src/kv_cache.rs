//! The keys and values of sequences that are being generated, in blocks of [`CACHE_BLOCK`] tokens (Kwon et al. 2023).
//! Under latent attention they are latents, each beside the columns of keys that all heads share (DeepSeek-V2, 2024). Layers of the
//! gated delta rule keep a state for each sequence, and the last rows that their convolution read, however long the text is.

use crate::Result;
use crate::batch::send;
use kernels::Kernels;
use kernels::operation::CACHE_BLOCK;
use memory::{Buffer, Category, DType, In, Memory, Out, round_up};
use std::ops::Range;

/// Keys and values, or states, of sequences that are being generated, for every layer.
pub struct KvCache {
    /// `[layers with attention, blocks 16 widths]`: the keys of the first, its values, the keys of the next, and so on.
    keys_and_values: Buffer,
    blocks: usize,
    shape: CacheShape,
    /// The blocks of each sequence, in order.
    tables: Vec<Vec<i32>>,
    /// The states of layers with the gated delta rule, if there are some.
    states: Option<States>,
}

/// States of all sequences, and the last rows of their convolutions, for layers with the gated delta rule.
struct States {
    /// `[layers, sequences, value_heads, K, V]` f32, as rows of a layer.
    states: Buffer,
    /// `[layers, sequences, taps - 1, c]`, likewise.
    rows: Buffer,
}

/// How much a cache holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// An entry for each block of the model.
    pub layers: Vec<LayerCacheShape>,
}

/// How much a block keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCacheShape {
    /// Attention: so many elements of each token.
    Tokens(CacheWidths),
    /// The gated delta rule: so many of each sequence.
    State(StateShape),
}

/// The sizes of a sequence's state in a layer with the gated delta rule, and of its convolution's last rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateShape {
    /// Heads, and width of keys and of values: the state in f32.
    pub state: [usize; 3],
    /// The last rows that the convolution read, and their width, in the compute type.
    pub rows: [usize; 2],
}

/// Elements that attention keeps of a token in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheWidths {
    /// Its keys.
    pub keys: usize,
    /// Its values; none: they are the first columns of the keys.
    pub values: Option<usize>,
}

impl CacheWidths {
    /// All elements.
    pub fn elements(self) -> usize {
        self.keys + self.values.unwrap_or(0)
    }
}

impl StateShape {
    /// Elements of the state, and of the rows.
    fn elements(self) -> [usize; 2] {
        [self.state.iter().product(), self.rows.iter().product()]
    }

    /// Bytes of a sequence.
    pub fn bytes(self, dtype: DType) -> usize {
        let [state, rows] = self.elements();
        state * DType::F32.size_in_bytes() + rows * dtype.size_in_bytes()
    }
}

impl CacheShape {
    /// The layers with attention: how many there are, and what they keep of a token.
    ///
    /// # Panics
    /// If one keeps more or less than another.
    pub fn of_tokens(&self) -> (usize, Option<CacheWidths>) {
        let widths = self.layers.iter().filter_map(|layer| match layer {
            LayerCacheShape::Tokens(widths) => Some(*widths),
            LayerCacheShape::State(_) => None,
        });
        alike(widths, "keys and values of all layers are as wide")
    }

    /// The layers with the gated delta rule: how many there are, and what they keep of a sequence.
    ///
    /// # Panics
    /// As [`CacheShape::of_tokens`].
    pub fn of_states(&self) -> (usize, Option<StateShape>) {
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerCacheShape::Tokens(_) => None,
            LayerCacheShape::State(state) => Some(*state),
        });
        alike(states, "states of all layers are as large")
    }

    /// The number of a layer among those that keep the same.
    fn place(&self, layer: usize) -> usize {
        let is_same = |other: &&LayerCacheShape| **other == self.layers[layer];
        self.layers[..layer].iter().filter(is_same).count()
    }
}

/// How many there are, and the one that all are.
fn alike<T: Copy + PartialEq>(all: impl Iterator<Item = T>, why: &str) -> (usize, Option<T>) {
    let all: Vec<T> = all.collect();
    assert!(all.windows(2).all(|pair| pair[0] == pair[1]), "{why}");
    (all.len(), all.first().copied())
}

/// The sequences of a cache that a micro-batch continues, one per row.
pub struct CachedSequences<'a> {
    cache: &'a mut KvCache,
    /// Which of the cache's they are.
    sequences: Range<usize>,
    /// `[b, m]` i32: the blocks of each.
    table: Buffer,
    /// `[b]` i32: tokens of each sequence, including those of the micro-batch.
    lengths: Buffer,
}

/// The part of a cache that one layer's attention reads and writes.
pub struct LayerCache<'a> {
    /// `[blocks, 16, width of keys]`.
    pub k_cache: Out<'a>,
    /// `[blocks, 16, width of values]`; none: values are the first columns of keys.
    pub v_cache: Option<Out<'a>>,
    /// `[b, m]` i32: the blocks of each sequence.
    pub table: In<'a>,
    /// `[b]` i32: tokens of each sequence, including those of the micro-batch.
    pub lengths: In<'a>,
}

/// The part of a cache that one layer's gated delta rule reads and writes.
pub struct LayerState<'a> {
    /// `[b, value_heads, K, V]` f32.
    pub states: Out<'a>,
    /// `[b, taps - 1, c]`.
    pub rows: Out<'a>,
    /// `[b]` i32: tokens of each sequence, including those of the micro-batch.
    pub lengths: In<'a>,
}

/// Blocks that sequences of `tokens` tokens each take together.
fn blocks(tokens: &[usize]) -> usize {
    tokens
        .iter()
        .map(|tokens| tokens.div_ceil(CACHE_BLOCK))
        .sum()
}

impl KvCache {
    /// Bytes for sequences of `tokens` tokens each, as leased: layers with attention x elements of a token x tokens x bytes, where the
    /// tokens of each sequence are rounded up to whole blocks; and what the other layers keep of each sequence.
    pub fn bytes(shape: &CacheShape, dtype: DType, tokens: &[usize]) -> u64 {
        let (layers, widths) = shape.of_tokens();
        let of_token = layers * widths.map_or(0, CacheWidths::elements);
        let (layers, state) = shape.of_states();
        let [state, rows] = state.map_or([0; 2], StateShape::elements);
        let leases = [
            (of_token * blocks(tokens) * CACHE_BLOCK, dtype),
            (layers * state * tokens.len(), DType::F32),
            (layers * rows * tokens.len(), dtype),
        ];
        let bytes = |(elements, dtype): (usize, DType)| elements * dtype.size_in_bytes();
        let rounded = leases.map(|lease| round_up(bytes(lease) as u64));
        rounded.iter().sum()
    }

    /// Leases room for sequences of at most `tokens` tokens each.
    ///
    /// # Errors
    /// [`ModelError::OutOfMemory`](crate::ModelError::OutOfMemory) if it is refused.
    pub fn lease(
        memory: &Memory,
        shape: CacheShape,
        dtype: DType,
        tokens: &[usize],
    ) -> Result<KvCache> {
        let blocks = blocks(tokens);
        let (layers, widths) = shape.of_tokens();
        let of_layer = blocks * CACHE_BLOCK * widths.map_or(0, CacheWidths::elements);
        let lease = |name, sizes, dtype| memory.lease(Category::Activation, name, sizes, dtype);
        let keys_and_values = lease("kv_cache", [layers, of_layer], dtype)?;
        let states = match shape.of_states() {
            (layers, Some(state)) => {
                let [state, rows] = state.elements().map(|elements| elements * tokens.len());
                Some(States {
                    states: lease("delta_states", [layers, state], DType::F32)?,
                    rows: lease("convolution_rows", [layers, rows], dtype)?,
                })
            }
            (_, None) => None,
        };
        let mut free = 0..blocks as i32;
        let table = |tokens: &usize| free.by_ref().take(tokens.div_ceil(CACHE_BLOCK)).collect();
        Ok(KvCache {
            tables: tokens.iter().map(table).collect(),
            keys_and_values,
            blocks,
            shape,
            states,
        })
    }

    /// The rows of a micro-batch: some of the cache's sequences. `lengths` are their tokens, including those of the
    /// micro-batch.
    ///
    /// # Errors
    /// `ModelError` if a lease is refused or the device fails.
    pub fn sequences(
        &mut self,
        memory: &Memory,
        kernels: &Kernels,
        sequences: Range<usize>,
        lengths: &[usize],
    ) -> Result<CachedSequences<'_>> {
        let tables = &self.tables[sequences.clone()];
        let most = tables.iter().map(Vec::len).max().unwrap_or(0);
        // Shorter tables are padded. Attention never reads the padding, because the sequence has no tokens there.
        let padded = |table: &Vec<i32>| {
            let padding = most - table.len();
            [table.as_slice(), &vec![0; padding]].concat()
        };
        let table: Vec<i32> = tables.iter().flat_map(padded).collect();
        let fits = |(length, table): (&usize, &Vec<i32>)| *length <= table.len() * CACHE_BLOCK;
        assert!(
            lengths.iter().zip(tables).all(fits),
            "the cache has room for every token"
        );
        let lengths: Vec<i32> = lengths.iter().map(|length| *length as i32).collect();
        let rows = lengths.len();
        Ok(CachedSequences {
            table: send(memory, kernels, "cache_blocks", [rows, most], &table)?,
            lengths: send(memory, kernels, "cache_lengths", [rows], &lengths)?,
            sequences,
            cache: self,
        })
    }
}

/// A layer's row of a buffer.
fn row(of: &mut Buffer, layer: usize) -> Out<'_> {
    let elements = of.dims()[1];
    of.view_mut().rows(layer..layer + 1).reshape([elements])
}

impl CachedSequences<'_> {
    /// The part of a layer with attention.
    pub(crate) fn of_layer(&mut self, layer: usize) -> LayerCache<'_> {
        let (place, LayerCacheShape::Tokens(widths)) = (
            self.cache.shape.place(layer),
            self.cache.shape.layers[layer],
        ) else {
            panic!("layer {layer} has no attention");
        };
        let blocks = self.cache.blocks;
        let slots = blocks * CACHE_BLOCK;
        let of_layer = row(&mut self.cache.keys_and_values, place);
        let (keys, values) = of_layer.split_at(slots * widths.keys);
        let values_of = |width| values.reshape([blocks, CACHE_BLOCK, width]);
        LayerCache {
            k_cache: keys.reshape([blocks, CACHE_BLOCK, widths.keys]),
            v_cache: widths.values.map(values_of),
            table: self.table.view(),
            lengths: self.lengths.view(),
        }
    }

    /// The part of a layer with the gated delta rule.
    pub(crate) fn state_of_layer(&mut self, layer: usize) -> LayerState<'_> {
        let (place, LayerCacheShape::State(shape)) = (
            self.cache.shape.place(layer),
            self.cache.shape.layers[layer],
        ) else {
            panic!("layer {layer} has no state");
        };
        let (all, count) = (self.cache.tables.len(), self.sequences.len());
        let [of_state, of_rows] = shape.elements().map(|elements| [all, elements]);
        let [heads, keys, values] = shape.state;
        let [taps, columns] = shape.rows;
        let cache = self.cache.states.as_mut();
        let cache = cache.expect("it is leased with the cache");
        let states = row(&mut cache.states, place).reshape(of_state);
        let states = states.rows(self.sequences.clone());
        let rows = row(&mut cache.rows, place).reshape(of_rows);
        let rows = rows.rows(self.sequences.clone());
        LayerState {
            states: states.reshape([count, heads, keys, values]),
            rows: rows.reshape([count, taps, columns]),
            lengths: self.lengths.view(),
        }
    }
}
