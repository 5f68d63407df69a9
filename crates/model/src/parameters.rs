//! The parameters of a model. The stages that use them declare them once.

use crate::fp8::{Fp8Layer, Fp8Operand, Fp8Products, Fp8Site};
use crate::label::fnv;
use crate::lora::{LinearModule, Lora};
use crate::stored::{FileTensor, HeadParts, Stored, Transposition, parts};
use crate::{Labels, NamePatterns};
use memory::{Codes, Cover, DType, Layer, Layout, LayoutBuilder, Role};
use std::sync::Arc;

/// A parameter, numbered in the order of declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParameterId {
    index: usize,
    role: Role,
}

impl ParameterId {
    /// Whether it has a gradient.
    pub fn is_trained(self) -> bool {
        self.role.is_trained()
    }
}

/// The matrices of a layer of a block, as one.
#[derive(Clone, Debug)]
pub(crate) struct Fp8Weight {
    pub(crate) site: Fp8Site,
    /// Outputs and inputs.
    pub(crate) shape: [usize; 2],
    pub(crate) matrices: Vec<ParameterId>,
}

/// The values of a fresh parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initial {
    /// Normally distributed values with the model's standard deviation.
    Normal,
    /// Normally distributed values with this standard deviation.
    NormalOf(f32),
    /// Evenly distributed values between this and its negative.
    Uniform(f32),
    /// The logarithms of values that are evenly distributed between these.
    LogUniform([f32; 2]),
    /// Ones.
    One,
    /// Zeros.
    Zero,
}

/// A parameter.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its name in Hugging Face's files.
    pub name: String,
    /// One to four sizes. With two or more it is a matrix, or several matrices of one kind.
    pub shape: Vec<usize>,
    /// What training does to it.
    pub role: Role,
    /// The part of the model that reads it first.
    pub part: Layer,
    /// What it begins with.
    pub initial: Initial,
    /// How files store it.
    pub stored: Stored,
    /// The type that it is stored in; none: the type that the model computes in.
    pub dtype: Option<DType>,
    /// How it is stored as codes; none: as plain numbers.
    pub codes: Option<Codes>,
    /// Whether it is a factor of an adapter, which files of the model do not have.
    pub is_factor: bool,
}

impl Parameter {
    /// The number of its stream of random numbers, if it is the parameter of a model with this number. Factors have
    /// streams by their names, so a model's fresh weights are the same with adapters and without.
    pub(crate) fn stream(&self, number: usize) -> u64 {
        match self.is_factor {
            true => fnv(&self.name) | 1 << 63,
            false => number as u64,
        }
    }

    /// Its shape in files, if it is one tensor there.
    pub fn stored_shape(&self) -> Vec<usize> {
        self.stored.shape(&self.shape)
    }

    /// How files order its elements; none if they do as memory does.
    pub fn turned(&self) -> Option<Transposition> {
        self.stored.turned(&self.shape)
    }

    /// The parameter as one tensor of a file.
    pub fn as_one_tensor(&self) -> FileTensor {
        FileTensor {
            name: self.name.clone(),
            shape: self.stored_shape(),
            first: 0,
        }
    }

    /// The tensors that files have in its place, in the order of their elements.
    pub fn file_tensors(&self) -> Vec<FileTensor> {
        match self.stored {
            Stored::ByExpert(files) => files.tensors(&self.name, &self.shape),
            _ => vec![self.as_one_tensor()],
        }
    }

    /// Its elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// The type that it is stored in, if the model computes in `compute`.
    pub fn dtype(&self, compute: DType) -> DType {
        self.dtype.unwrap_or(compute)
    }

    /// Its place in the order of the layout: matrices, then vectors, then buffers.
    fn kind(&self) -> usize {
        match self.role {
            Role::Buffer => 2,
            _ => usize::from(self.shape.len() == 1),
        }
    }
}

/// All parameters of a model, in forward order.
#[derive(Clone, Debug, Default)]
pub struct Parameters {
    declared: Vec<Parameter>,
    frozen: NamePatterns,
    lora: Option<Arc<Lora>>,
    fp8: Option<Arc<Fp8Products>>,
    fp8_weights: Vec<Fp8Weight>,
    fp8_candidates: Vec<ParameterId>,
    /// The linear layers of the blocks that may have adapters, in forward order; none if the model has no adapters.
    pub modules: Vec<LinearModule>,
}

impl Parameters {
    /// No parameters yet. Those that are declared later under a name that a pattern fits are frozen.
    pub fn freezing(frozen: NamePatterns) -> Parameters {
        Parameters {
            frozen,
            ..Parameters::default()
        }
    }

    /// No parameters yet. Those that are declared later are frozen, and linear layers that are targets get adapters,
    /// which are trained.
    pub fn adapted(lora: Lora) -> Parameters {
        Parameters {
            lora: Some(Arc::new(lora)),
            ..Parameters::freezing(NamePatterns::new(&["*".into()]))
        }
    }

    /// The same, for a model whose blocks multiply in FP8.
    pub fn multiplying_in_fp8(self, fp8: Fp8Products) -> Parameters {
        Parameters {
            fp8: Some(Arc::new(fp8)),
            ..self
        }
    }

    /// The weights of products in FP8.
    pub(crate) fn weights_in_fp8(&self) -> &[Fp8Weight] {
        &self.fp8_weights
    }

    /// Those of them whose codes are kept for a step: all, or none.
    fn with_step_codes(&self) -> &[Fp8Weight] {
        let keeps = self.fp8.as_ref().is_some_and(|fp8| fp8.keeps_weights);
        if keeps { &self.fp8_weights } else { &[] }
    }

    /// The elements of this stage's matrices whose codes are kept for a step. Matrices of one product that lie apart are not among them:
    /// a scale is for all of them, and their codes are made at each use.
    pub fn matrices_with_step_codes(&self, layout: &Layout) -> Cover {
        let indices = self.layout_indices();
        let ranges = self.with_step_codes().iter().filter_map(|weight| {
            let entries = weight.matrices.iter().map(|id| indices.of(*id));
            Some(layout.joined(&entries.collect::<Vec<_>>())?.0)
        });
        Cover::new(ranges).within_all(&layout.weights())
    }

    /// The matrices whose products are in FP8 unless they are excepted; none if blocks do not multiply in FP8.
    pub fn fp8_candidates(&self) -> impl Iterator<Item = &str> + Clone {
        let candidates = self.fp8_candidates.iter();
        candidates.map(|id| self.get(*id).name.as_str())
    }

    /// Whether any product is in FP8.
    pub fn has_fp8(&self) -> bool {
        !self.fp8_weights.is_empty()
    }

    /// The labels of a model's activations: these, and that of adapters if it has some.
    pub(crate) fn labels(&self, labels: Labels) -> Labels {
        match self.lora {
            Some(_) => labels.with_lora(),
            None => labels,
        }
    }

    /// The numbers of the parameters of the layout among those of the model without adapters.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = usize> {
        self.in_layout().scan(0, |next, parameter| {
            let number = *next;
            *next += usize::from(!parameter.is_factor);
            Some(number)
        })
    }

    /// Only the trained parameters.
    pub fn trained(&self) -> Parameters {
        self.some(|parameter| parameter.role.is_trained().then(|| parameter.clone()))
    }

    /// The parameters that a function keeps, as it returns them.
    pub(crate) fn some(&self, of: impl Fn(&Parameter) -> Option<Parameter>) -> Parameters {
        Parameters {
            declared: self.declared.iter().filter_map(of).collect(),
            ..Parameters::default()
        }
    }

    /// The parameter with an id.
    pub fn get(&self, id: ParameterId) -> &Parameter {
        &self.declared[id.index]
    }

    /// Declares parameters of a part of the model, whose names begin with `prefix`.
    pub fn of_part(&mut self, part: Layer, prefix: impl Into<String>) -> PartParameters<'_> {
        PartParameters {
            all: self,
            part,
            prefix: prefix.into(),
            stored: Stored::AsUsed,
            dtype: None,
            has_adapters: matches!(part, Layer::Block(_)),
        }
    }

    /// The parameters in the order of their layout: matrices, then vectors, then buffers, each as declared.
    pub fn in_layout(&self) -> impl Iterator<Item = &Parameter> {
        let of = |kind| {
            let declared = self.declared.iter();
            declared.filter(move |parameter| parameter.kind() == kind)
        };
        (0..3).flat_map(of)
    }

    /// The place of each in the arenas. `is_precise(name, elements)` says whose states must not be quantised.
    pub fn layout(&self, is_precise: impl Fn(&str, usize) -> bool) -> Layout {
        self.layout_for(None, None, is_precise)
    }

    /// As [`Parameters::layout`], for arenas that are divided among `ranks`. Matrices of experts are in groups of `experts` each, where they
    /// have more; they are not if they are stored as codes, or files have all experts in one tensor.
    pub fn layout_for(
        &self,
        ranks: Option<usize>,
        experts: Option<usize>,
        is_precise: impl Fn(&str, usize) -> bool,
    ) -> Layout {
        let mut builder = LayoutBuilder::default();
        for parameter in &self.declared {
            let Parameter {
                name,
                shape,
                role,
                part,
                dtype,
                codes,
                ..
            } = parameter;
            builder.add_as((*role, *dtype), *part, name.clone(), shape);
            if let Some(codes) = codes {
                builder.as_codes(*codes);
                continue;
            }
            let is_by_expert = parameter.stored.is_by_expert();
            if let Some(experts) = experts.filter(|experts| is_by_expert && *experts < shape[0]) {
                builder.in_groups(shape[0] / experts);
            }
        }
        builder.for_ranks(ranks).build_precise(is_precise)
    }

    /// The layout's index of each parameter, in the order of declaration.
    pub(crate) fn layout_indices(&self) -> LayoutIndices {
        let mut order: Vec<usize> = (0..self.declared.len()).collect();
        order.sort_by_key(|declared| self.declared[*declared].kind());
        let mut indices = vec![0; order.len()];
        for (index, declared) in order.into_iter().enumerate() {
            indices[declared] = index;
        }
        LayoutIndices(indices)
    }
}

/// Where parameters stand in their layout.
pub(crate) struct LayoutIndices(Vec<usize>);

impl LayoutIndices {
    /// The index of one.
    pub(crate) fn of(&self, id: ParameterId) -> usize {
        self.0[id.index]
    }
}

/// Declares the parameters of one part of a model.
pub struct PartParameters<'a> {
    all: &'a mut Parameters,
    part: Layer,
    prefix: String,
    stored: Stored,
    dtype: Option<DType>,
    has_adapters: bool,
}

impl PartParameters<'_> {
    /// The same part, for linear layers that are never targets of adapters, as routers are.
    pub fn without_adapters(&mut self) -> PartParameters<'_> {
        PartParameters {
            has_adapters: false,
            ..self.again()
        }
    }

    fn again(&mut self) -> PartParameters<'_> {
        PartParameters {
            all: self.all,
            part: self.part,
            prefix: self.prefix.clone(),
            stored: self.stored,
            dtype: self.dtype,
            has_adapters: self.has_adapters,
        }
    }

    /// The adapters that linear layers declared next may have: those of the model, with the number of the block.
    pub(crate) fn lora(&self) -> Option<(Arc<Lora>, usize)> {
        match (self.part, &self.all.lora) {
            (Layer::Block(layer), Some(lora)) if self.has_adapters => Some((lora.clone(), layer)),
            _ => None,
        }
    }

    /// The products in FP8 that dense layers of this part may have.
    pub(crate) fn fp8(&self) -> Option<Arc<Fp8Products>> {
        let is_block = matches!(self.part, Layer::Block(_));
        self.all.fp8.clone().filter(|_| is_block)
    }

    /// Notes the matrices of a layer whose products can be in FP8.
    pub(crate) fn may_be_fp8(&mut self, weights: &[ParameterId]) {
        self.all.fp8_candidates.extend(weights);
    }

    /// Notes the matrices of a layer whose products are in FP8.
    pub(crate) fn add_fp8(&mut self, layer: Fp8Layer, weights: &[ParameterId], shape: [usize; 2]) {
        if let Layer::Block(block) = self.part {
            let operand = Fp8Operand::Weight;
            let site = Fp8Site {
                block,
                layer,
                operand,
            };
            self.all.fp8_weights.push(Fp8Weight {
                site,
                shape,
                matrices: weights.to_vec(),
            });
        }
    }

    /// The name of a parameter.
    pub(crate) fn name(&self, id: ParameterId) -> &str {
        &self.all.get(id).name
    }

    /// The whole name of a module of this part.
    pub(crate) fn module(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Notes a linear layer that may have an adapter. Gives its number in its block.
    pub(crate) fn add_module(&mut self, module: LinearModule) -> u32 {
        let modules = &mut self.all.modules;
        let before = modules.iter().rev();
        let number = before
            .take_while(|before| before.layer == module.layer)
            .count();
        modules.push(module);
        number as u32
    }

    /// A factor of an adapter: f32 whatever the model computes in, and trained.
    pub(crate) fn factor(
        &mut self,
        name: &str,
        shape: [usize; 2],
        initial: Initial,
    ) -> ParameterId {
        self.factor_stored(name, (&shape, Stored::AsUsed), initial)
    }

    /// A factor B of zeros, whose outputs files order as those of the matrix.
    pub(crate) fn factor_of_outputs(&mut self, name: &str, shape: [usize; 2]) -> ParameterId {
        let stored = match self.stored {
            Stored::ByHead(_) => self.stored,
            _ => Stored::AsUsed,
        };
        self.factor_stored(name, (&shape, stored), Initial::Zero)
    }

    /// A factor of the adapters of several experts, with three sizes.
    pub(crate) fn factor_of_experts(
        &mut self,
        name: &str,
        (shape, stored): ([usize; 3], Stored),
        initial: Initial,
    ) -> ParameterId {
        self.factor_stored(name, (&shape, stored), initial)
    }

    fn factor_stored(
        &mut self,
        name: &str,
        (shape, stored): (&[usize], Stored),
        initial: Initial,
    ) -> ParameterId {
        let name = self.module(name);
        let mut own = self.in_type(DType::F32);
        let id = own.declare_as(Role::Trained, name, shape, initial);
        let factor = &mut self.all.declared[id.index];
        (factor.stored, factor.is_factor) = (stored, true);
        id
    }

    /// The same, for matrices that files store in this way.
    pub fn stored(self, stored: Stored) -> Self {
        PartParameters { stored, ..self }
    }

    /// The same part, for parameters that are stored in a type of their own, whatever type the model computes in.
    ///
    /// # Panics
    /// If it is neither f32 nor bf16, the types in which weights are read and written.
    pub fn in_type(&mut self, dtype: DType) -> PartParameters<'_> {
        assert!(matches!(dtype, DType::F32 | DType::BF16));
        PartParameters {
            dtype: Some(dtype),
            ..self.again()
        }
    }

    /// The same part, for matrices whose outputs files have by head, if there are parts of heads.
    pub(crate) fn by_head(&mut self, parts: Option<HeadParts>) -> PartParameters<'_> {
        let own = self.again();
        match parts {
            Some(parts) => own.stored(Stored::ByHead(parts)),
            None => own,
        }
    }

    /// The weights `[channels, taps]` of a convolution of each channel. They are no matrix that products use, so they never become
    /// codes, and no adapter is on them.
    pub fn convolution(&mut self, name: &str, shape: [usize; 2]) -> ParameterId {
        let mut own = self.again().stored(Stored::Convolution);
        own.declare(name, &shape, Initial::Normal)
    }

    /// A matrix `[outputs, inputs]` of normal values.
    pub fn matrix(&mut self, name: &str, shape: [usize; 2]) -> ParameterId {
        self.declare(name, &shape, Initial::Normal)
    }

    /// The matrix of a linear layer. Under adapters it may be stored as codes, as [`crate::Lora::base`] says.
    pub(crate) fn linear(&mut self, name: &str, shape: [usize; 2]) -> ParameterId {
        let id = self.matrix(name, shape);
        self.as_codes(id);
        id
    }

    /// Stores a matrix as the adapters say that those under them are.
    fn as_codes(&mut self, id: ParameterId) {
        if let Some((lora, _)) = self.lora() {
            let parameter = &mut self.all.declared[id.index];
            let module = parameter.name.strip_suffix(".weight");
            let module = module.unwrap_or(&parameter.name);
            parameter.codes = lora.codes_of(module);
        }
    }

    /// A vector.
    pub fn vector(&mut self, name: &str, width: usize, initial: Initial) -> ParameterId {
        self.declare(name, &[width], initial)
    }

    /// An f32 buffer: values that the model saves beside its weights, and that no gradient changes ([`Role::Buffer`]).
    pub fn buffer(&mut self, name: &str, shape: &[usize], initial: Initial) -> ParameterId {
        let name = format!("{}{name}", self.prefix);
        self.in_type(DType::F32)
            .declare_as(Role::Buffer, name, shape, initial)
    }

    /// The matrices `[experts, outputs, inputs]` of several experts, which files store in this way. They may be stored as codes, as
    /// those of linear layers are, all experts' as one matrix.
    ///
    /// # Panics
    /// If the name does not have the end that files of each expert say, or if outputs alternate and their number is odd.
    pub fn experts(&mut self, name: &str, shape: [usize; 3], stored: Stored) -> ParameterId {
        match stored {
            Stored::ByExpert(files) => {
                assert!(name.ends_with(files.end), "{name} ends in {}", files.end)
            }
            Stored::ExpertsTransposed { is_interleaved } => {
                assert!(
                    shape[1].is_multiple_of(parts(is_interleaved)),
                    "{name} has gate and up"
                )
            }
            _ => {}
        }
        let id = self.declare(name, &shape, Initial::Normal);
        self.all.declared[id.index].stored = stored;
        self.as_codes(id);
        id
    }

    /// The vectors `[experts, width]` of several experts, of zeros: one vector of all, which is trained as biases are.
    ///
    /// # Panics
    /// If gate and up alternate in files, and the width is odd.
    pub fn expert_vectors(
        &mut self,
        name: &str,
        [experts, width]: [usize; 2],
        is_interleaved: bool,
    ) -> ParameterId {
        assert!(
            width.is_multiple_of(parts(is_interleaved)),
            "{name} has gate and up"
        );
        let id = self.vector(name, experts * width, Initial::Zero);
        self.all.declared[id.index].stored = Stored::ExpertVectors {
            experts,
            is_interleaved,
        };
        id
    }

    /// Whether files alternate gate and up of the experts' matrix that was declared under a name.
    pub(crate) fn is_interleaved(&self, name: &str) -> bool {
        let name = self.module(name);
        let mut declared = self.all.declared.iter().rev();
        let matrix = declared.find(|parameter| parameter.name == name);
        let matrix = matrix.expect("an adapter is declared behind its matrix");
        matches!(
            matrix.stored,
            Stored::ExpertsTransposed {
                is_interleaved: true
            }
        )
    }

    /// A weight of any shape.
    pub fn declare(&mut self, name: &str, shape: &[usize], initial: Initial) -> ParameterId {
        let name = format!("{}{name}", self.prefix);
        let role = match self.all.frozen.fit(&name) {
            true => Role::Frozen,
            false => Role::Trained,
        };
        self.declare_as(role, name, shape, initial)
    }

    fn declare_as(
        &mut self,
        role: Role,
        name: String,
        shape: &[usize],
        initial: Initial,
    ) -> ParameterId {
        self.all.declared.push(Parameter {
            name,
            shape: shape.to_vec(),
            role,
            part: self.part,
            initial,
            dtype: self.dtype,
            codes: None,
            is_factor: false,
            stored: match shape.len() {
                2 if role != Role::Buffer => self.stored,
                _ => Stored::AsUsed,
            },
        });
        ParameterId {
            index: self.all.declared.len() - 1,
            role,
        }
    }
}
