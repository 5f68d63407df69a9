//! How Hugging Face's files store parameters: under which names, in which shapes, and in which order of elements.

/// How Hugging Face's files store a parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stored {
    /// Outputs by inputs, as the model uses it.
    #[default]
    AsUsed,
    /// Inputs by outputs.
    Transposed,
    /// Outputs by inputs, with the outputs of each head together. The model has those of each part together.
    ByHead(HeadParts),
    /// `[channels, taps]`, a convolution of each channel, as `[channels, 1, taps]`.
    Convolution,
    /// The matrices of several experts, each in tensors of its own.
    ByExpert(ExpertFiles),
    /// `[experts, outputs, inputs]`, the matrices of experts, as `[experts, inputs, outputs]` (gpt-oss).
    ExpertsTransposed {
        /// Whether gate and up alternate: output `2 i` of a file is gate's output `i`, and `2 i + 1` is up's. The model has gate's
        /// outputs first, then up's.
        is_interleaved: bool,
    },
    /// The vectors of experts, one after another, as `[experts, width]`. Outputs may alternate as those of matrices do.
    ExpertVectors {
        /// How many experts there are.
        experts: usize,
        /// Whether gate and up alternate.
        is_interleaved: bool,
    },
    /// `[experts, rank, inputs]`, the factors A of experts, as `[experts rank, inputs]`.
    ExpertsInRows,
    /// `[experts, outputs, rank]`, the factors B of experts, as `[outputs, rank x experts]`: column
    /// `r * experts + e` is rank `r` of expert `e`. Outputs alternate if those of the experts' matrices do.
    ExpertsInColumns {
        /// Whether gate and up alternate.
        is_interleaved: bool,
    },
}

impl Stored {
    /// Whether these are the matrices of experts, each in tensors of its own.
    pub(crate) fn is_by_expert(self) -> bool {
        matches!(self, Stored::ByExpert(_))
    }

    /// The shape in files of a parameter with this shape, if it is one tensor there.
    pub(crate) fn shape(self, shape: &[usize]) -> Vec<usize> {
        match (self, shape) {
            (Stored::Transposed, sizes) => sizes.iter().rev().copied().collect(),
            (Stored::Convolution, [channels, taps]) => vec![*channels, 1, *taps],
            (Stored::ExpertsTransposed { .. }, [experts, outputs, inputs]) => {
                vec![*experts, *inputs, *outputs]
            }
            (Stored::ExpertVectors { experts, .. }, [elements]) => {
                vec![experts, elements / experts]
            }
            (Stored::ExpertsInRows, [experts, rank, inputs]) => vec![experts * rank, *inputs],
            (Stored::ExpertsInColumns { .. }, [experts, outputs, rank]) => {
                vec![*outputs, rank * experts]
            }
            _ => shape.to_vec(),
        }
    }

    /// How files order the elements of a parameter with this shape; none if they do as memory does.
    pub(crate) fn turned(self, shape: &[usize]) -> Option<Transposition> {
        let in_parts = |outputs: usize, is_interleaved| {
            let parts = parts(is_interleaved);
            [parts, outputs / parts, 1]
        };
        match (self, shape) {
            (Stored::Transposed, &[rows, columns]) => Some(Transposition::of(1, rows, columns)),
            (Stored::ByHead(parts), &[outputs, inputs]) => Some(Transposition {
                order: MatrixOrder::ByPart(parts),
                ..Transposition::of(outputs, 1, inputs)
            }),
            (Stored::ExpertsTransposed { is_interleaved }, &[experts, outputs, inputs]) => {
                Some(Transposition {
                    rows: in_parts(outputs, is_interleaved),
                    ..Transposition::of(experts, outputs, inputs)
                })
            }
            (
                Stored::ExpertVectors {
                    experts,
                    is_interleaved: true,
                },
                &[elements],
            ) => Some(Transposition::of(experts, 2, elements / experts / 2)),
            (Stored::ExpertsInColumns { is_interleaved }, &[experts, outputs, rank]) => {
                let [parts, of_part, _] = in_parts(outputs, is_interleaved);
                Some(Transposition {
                    columns: [parts, of_part, rank],
                    ..Transposition::of(1, experts, outputs * rank)
                })
            }
            _ => None,
        }
    }
}

/// 2 if gate and up alternate in files, else 1.
pub(crate) fn parts(is_interleaved: bool) -> usize {
    1 + usize::from(is_interleaved)
}

/// An axis of x y z indices. Memory has them in the order `[x, y, z]`, files as `[y, x, z]`. `[1, n, 1]` has the same order in both.
pub type TurnedAxis = [usize; 3];

/// The outputs of each head: several parts, with so many outputs each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadParts {
    /// How many heads there are.
    pub heads: usize,
    /// Outputs of each part of a head; 0: there is no such part.
    pub widths: [usize; 4],
}

impl HeadParts {
    /// Where, by parts, a row stands that has this place by heads.
    fn by_part(&self, row: usize) -> usize {
        let of_head: usize = self.widths.iter().sum();
        let (head, mut within, mut before) = (row / of_head, row % of_head, 0);
        for width in self.widths {
            if within < width {
                return before + head * width + within;
            }
            within -= width;
            before += self.heads * width;
        }
        unreachable!("a row is of some part")
    }

    /// Where, by heads, a row stands that has this place by parts.
    fn by_head(&self, row: usize) -> usize {
        let of_head: usize = self.widths.iter().sum();
        let (mut rest, mut before) = (row, 0);
        for width in self.widths {
            if rest < self.heads * width {
                return rest / width * of_head + before + rest % width;
            }
            rest -= self.heads * width;
            before += width;
        }
        unreachable!("a row is of some part")
    }
}

/// The order of several matrices in memory. Files may have another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MatrixOrder {
    /// Files have the same.
    #[default]
    Same,
    /// By parts of heads; files have them by heads.
    ByPart(HeadParts),
    /// By heads; files have them by parts.
    ByHead(HeadParts),
}

/// How files order a parameter: each of several matrices `[rows, columns]` is `[columns, rows]` there, and they may come in another order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transposition {
    /// The number of matrices, one after another.
    pub matrices: usize,
    /// Their order.
    pub order: MatrixOrder,
    /// Rows in memory.
    pub rows: TurnedAxis,
    /// Columns in memory.
    pub columns: TurnedAxis,
}

impl Transposition {
    /// Of matrices, or vectors as matrices, whose axes have the same order in files.
    pub(crate) fn of(matrices: usize, rows: usize, columns: usize) -> Transposition {
        Transposition {
            matrices,
            order: MatrixOrder::Same,
            rows: [1, rows, 1],
            columns: [1, columns, 1],
        }
    }

    /// Where memory has the matrix that has this place in files.
    pub fn place_in_memory(self, matrix: usize) -> usize {
        match self.order {
            MatrixOrder::Same => matrix,
            MatrixOrder::ByPart(parts) => parts.by_part(matrix),
            MatrixOrder::ByHead(parts) => parts.by_head(matrix),
        }
    }

    /// How memory orders what is in files.
    pub fn reversed(self) -> Transposition {
        let swapped = |[x, y, z]: TurnedAxis| [y, x, z];
        Transposition {
            matrices: self.matrices,
            order: match self.order {
                MatrixOrder::Same => MatrixOrder::Same,
                MatrixOrder::ByPart(parts) => MatrixOrder::ByHead(parts),
                MatrixOrder::ByHead(parts) => MatrixOrder::ByPart(parts),
            },
            rows: swapped(self.columns),
            columns: swapped(self.rows),
        }
    }
}

/// How files name the matrices of experts, which a model has as one parameter `[experts, outputs, inputs]`: the tensor
/// `module.experts.N.part.weight` has some of the outputs of expert N, as many as those of the other parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertFiles {
    /// The end of the parameter's name that `module.experts.N.part.weight` replaces.
    pub end: &'static str,
    /// The name of the module.
    pub module: &'static str,
    /// The parts of an expert, in the order of their outputs.
    pub parts: &'static [&'static str],
}

impl ExpertFiles {
    /// The tensors of a parameter `[experts, outputs, inputs]` with this name, in the order of their elements.
    pub(crate) fn tensors(&self, name: &str, shape: &[usize]) -> Vec<FileTensor> {
        let &[experts, outputs, inputs] = shape else {
            unreachable!("experts are declared with three sizes");
        };
        let name = name.strip_suffix(self.end);
        let name = name.expect("experts are declared under a name with this end");
        let of_part = outputs / self.parts.len();
        let numbered = (0..experts).flat_map(|expert| {
            let parts = self.parts.iter();
            parts.map(move |part| (expert, part))
        });
        numbered
            .enumerate()
            .map(|(number, (expert, part))| FileTensor {
                name: format!("{name}{}.experts.{expert}.{part}.weight", self.module),
                shape: vec![of_part, inputs],
                first: number * of_part * inputs,
            })
            .collect()
    }
}

/// A tensor of a file, and which elements of its parameter it has.
#[derive(Clone, Debug, PartialEq)]
pub struct FileTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// The place of its first element in the parameter.
    pub first: usize,
}
