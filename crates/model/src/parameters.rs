//! Which parameters a model has: declared once, by the stages that use them.

use memory::{Layer, Layout, LayoutBuilder};

/// A parameter, by the order of declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParameterId(usize);

/// What a fresh parameter holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initial {
    /// Normal values, of the model's standard deviation.
    Normal,
    /// Ones.
    One,
    /// Zeros.
    Zero,
}

/// How Hugging Face's files keep a matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stored {
    /// Outputs by inputs, as it is used.
    #[default]
    AsUsed,
    /// Inputs by outputs.
    Transposed,
}

/// A parameter.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its name in Hugging Face's files.
    pub name: String,
    /// One or two sizes.
    pub shape: Vec<usize>,
    /// The part of the model that reads it first.
    pub part: Layer,
    /// What it begins with.
    pub initial: Initial,
    /// How files keep it.
    pub stored: Stored,
}

impl Parameter {
    /// Its shape in files.
    pub fn stored_shape(&self) -> Vec<usize> {
        match self.stored {
            Stored::AsUsed => self.shape.clone(),
            Stored::Transposed => self.shape.iter().rev().copied().collect(),
        }
    }

    fn is_matrix(&self) -> bool {
        self.shape.len() > 1
    }
}

/// All parameters of a model, in forward order.
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    declared: Vec<Parameter>,
}

impl Parameters {
    /// Declares parameters of a part of the model, whose names begin with `prefix`.
    pub fn of_part(&mut self, part: Layer, prefix: impl Into<String>) -> PartParameters<'_> {
        PartParameters {
            all: self,
            part,
            prefix: prefix.into(),
            stored: Stored::AsUsed,
        }
    }

    /// The parameters in the order of their layout: matrices, then vectors, each as declared.
    pub fn in_layout(&self) -> impl Iterator<Item = &Parameter> {
        let of = |matrices: bool| {
            let declared = self.declared.iter();
            declared.filter(move |parameter| parameter.is_matrix() == matrices)
        };
        of(true).chain(of(false))
    }

    /// Where each lies in the arenas. `is_precise(name, elements)` says which have states that must not be quantised.
    pub fn layout(&self, is_precise: impl Fn(&str, usize) -> bool) -> Layout {
        self.layout_for(None, is_precise)
    }

    /// As [`Parameters::layout`], of arenas that are divided among so many ranks.
    pub fn layout_for(
        &self,
        ranks: Option<usize>,
        is_precise: impl Fn(&str, usize) -> bool,
    ) -> Layout {
        let mut builder = LayoutBuilder::default();
        for parameter in &self.declared {
            builder.add(parameter.part, parameter.name.clone(), &parameter.shape);
        }
        builder.for_ranks(ranks).build_precise(is_precise)
    }

    /// The layout's index of each, by the order of declaration.
    pub(crate) fn layout_indices(&self) -> LayoutIndices {
        let mut next = [
            0,
            self.declared
                .iter()
                .filter(|parameter| parameter.is_matrix())
                .count(),
        ];
        let index = |parameter: &Parameter| {
            let next = &mut next[usize::from(!parameter.is_matrix())];
            *next += 1;
            *next - 1
        };
        LayoutIndices(self.declared.iter().map(index).collect())
    }
}

/// Where parameters stand in their layout.
pub(crate) struct LayoutIndices(Vec<usize>);

impl LayoutIndices {
    /// The index of one.
    pub(crate) fn of(&self, id: ParameterId) -> usize {
        self.0[id.0]
    }
}

/// Declares the parameters of one part of a model.
pub struct PartParameters<'a> {
    all: &'a mut Parameters,
    part: Layer,
    prefix: String,
    stored: Stored,
}

impl PartParameters<'_> {
    /// The same, for matrices that files keep in this way.
    pub fn stored(self, stored: Stored) -> Self {
        PartParameters { stored, ..self }
    }

    /// A matrix `[outputs, inputs]` of normal values.
    pub fn matrix(&mut self, name: &str, shape: [usize; 2]) -> ParameterId {
        self.declare(name, &shape, Initial::Normal)
    }

    /// A vector.
    pub fn vector(&mut self, name: &str, width: usize, initial: Initial) -> ParameterId {
        self.declare(name, &[width], initial)
    }

    /// Any parameter.
    pub fn declare(&mut self, name: &str, shape: &[usize], initial: Initial) -> ParameterId {
        self.all.declared.push(Parameter {
            name: format!("{}{name}", self.prefix),
            shape: shape.to_vec(),
            part: self.part,
            initial,
            stored: if shape.len() > 1 {
                self.stored
            } else {
                Stored::AsUsed
            },
        });
        ParameterId(self.all.declared.len() - 1)
    }
}
