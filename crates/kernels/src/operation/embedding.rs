//! Looks up rows of a table by token ids.

use super::Init;
use super::check::{Check, Checked};
use super::contract::{Contract, Operand, OperandAccess, changes, reads, writes};
use memory::{DType, In, Out};

/// `out [t, h]` = rows of `table [v, h]` named by `ids [t]` (i32).
pub struct Embedding<'a> {
    pub out: Out<'a>,
    pub table: In<'a>,
    pub ids: In<'a>,
}

/// `dtable [v, h] = init + ` the rows of `dout [t, h]`, each added to the row named by `ids [t]`. A gradient: f32 or
/// bf16, summed in f32 and rounded once.
pub struct EmbeddingBackward<'a> {
    pub dtable: Out<'a>,
    pub dout: In<'a>,
    pub ids: In<'a>,
    pub init: Init<'a>,
}

impl Contract for Embedding<'_> {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn check(&self, check: &Check) -> Checked {
        let Embedding { out, table, ids } = self;
        check.rank("ids", ids, 1)?;
        check.real_of_rank("table", table, 2)?;
        check.tensor("ids", ids, ids.dims(), DType::I32)?;
        check.tensor("out", out, &[ids.dims()[0], table.dims()[1]], table.dtype())
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        // For each row that is written, a row of the table is read.
        vec![changes(&self.out), reads(self.ids)]
    }
}

impl Contract for EmbeddingBackward<'_> {
    fn name(&self) -> &'static str {
        "embedding_backward"
    }

    fn check(&self, check: &Check) -> Checked {
        let (dtable, dout, ids) = (&self.dtable, &self.dout, &self.ids);
        check.no_residual(&self.init)?;
        check.rank("ids", ids, 1)?;
        check.real_of_rank("dtable", dtable, 2)?;
        check.tensor("ids", ids, ids.dims(), DType::I32)?;
        check.real("dout", dout, &[ids.dims()[0], dtable.dims()[1]])
    }

    fn operands(&self) -> Vec<Operand<'_>> {
        let rows = self.ids.elements().min(self.dtable.dims()[0]);
        let dtable = match self.init {
            Init::Overwrite => writes(&self.dtable),
            // Only rows that a token names are changed, at most as many as there are tokens.
            Init::Accumulate | Init::Add(_) => Operand {
                view: self.dtable.as_in().rows(0..rows),
                access: OperandAccess::Changed,
            },
        };
        vec![reads(self.dout), reads(self.ids), dtable]
    }
}
