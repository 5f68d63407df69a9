//! Looks up rows of a table by token ids.

use super::Init;
use super::contract::Contract;
use super::declaration::operation;
use memory::{In, Out};

operation! {
    /// `out [t, h]` = rows of `table [v, h]` named by `ids [t]` (i32). For each row that is written, a row of the table is read:
    /// that is what its cost counts.
    Embedding "embedding": out, ids [t], table [v, h] {
        out: Out<'a> [t, h] changes,
        table: In<'a> [v, h] uncounted,
        ids: In<'a> [t] i32,
    }

    /// `dtable [v, h] = init + ` the rows of `dout [t, h]`, each added to the row named by `ids [t]`. A gradient: f32 or
    /// bf16, summed in f32 and rounded once. Only rows that a token names are changed.
    EmbeddingBackward "embedding_backward": dout, ids [t], dtable [v, h] {
        dtable: Out<'a> [v, h] real plus(init) touched(init.touched(t, v)),
        dout: In<'a> [t, h] real,
        ids: In<'a> [t] i32,
        init: Init<'a> [] in_place,
    }
}

impl Contract for Embedding<'_> {}

impl Contract for EmbeddingBackward<'_> {}
