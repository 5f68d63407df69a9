//! The factors of low rank that a linear layer adds to its weights ([`crate::Lora`]), forward and backward.

use crate::linear::{LinearPart, weight_gradient};
use crate::lora::{LinearModule, LoraInit};
use crate::matrix::{WeightMatrix, product};
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::{Activation, DropoutSite, Extent, Label, Pass, Result};
use kernels::operation::{BiasDropoutAdd, Combine, Copy, DropoutScale};
use kernels::{Dropout, Init};
use memory::{Buffer, DType, Dims, In, Out};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;

/// The adapters of a linear layer. For each weight that is a target, `y += (scale x A') B'`. `A` and `B` are f32, and
/// converted to the compute type for products. The factors `A` of all weights are one product, whose result
/// `[t, all ranks]`, the scale included, is kept for the backward pass.
#[derive(Clone, Debug)]
pub(crate) struct Adapter {
    kept: Activation,
    parts: Vec<Part>,
    inputs: usize,
}

/// The adapter of one weight.
#[derive(Clone, Debug)]
struct Part {
    /// `[rank, inputs]`.
    a: ParameterId,
    /// `[outputs, rank]`.
    b: ParameterId,
    scale: f32,
    /// Its columns of what is kept.
    ranks: Range<usize>,
    /// Its columns of the layer's output.
    outputs: Range<usize>,
    /// Where elements of its input are dropped.
    site: DropoutSite,
}

/// Some of a layer's outputs, or of their gradients, as a tensor of their own.
pub(crate) struct OutputColumns<V> {
    /// The number of its first column among the layer's outputs.
    pub(crate) first: usize,
    pub(crate) of: V,
}

impl<V> OutputColumns<V> {
    /// All outputs of a layer.
    pub(crate) fn whole(of: V) -> OutputColumns<V> {
        OutputColumns { first: 0, of }
    }
}

impl Part {
    /// Its outputs among `width` outputs of the layer from `first` on: their columns there, and their rows of factor B. None if
    /// there are none.
    fn within(&self, first: usize, width: usize) -> Option<(Range<usize>, Range<usize>)> {
        let start = self.outputs.start.max(first);
        let end = self.outputs.end.min(first + width);
        let from = |zero: usize| start - zero..end - zero;
        (start < end).then(|| (from(first), from(self.outputs.start)))
    }

    /// The gradients of its outputs, each with its rows of factor B.
    fn pieces<'a>(&self, all: &[OutputColumns<In<'a>>]) -> Vec<(In<'a>, Range<usize>)> {
        let own = all.iter().filter_map(|piece| {
            let (columns, rows) = self.within(piece.first, piece.of.dims()[1])?;
            Some((piece.of.columns(columns), rows))
        });
        own.collect()
    }
}

/// Dropout at adapters has site numbers from here on.
const FIRST_SITE: u32 = 1 << 16;

impl Adapter {
    /// Declares the factors of those of a layer's weights, by name and outputs, that are targets. The factors `A` come
    /// before the factors `B`, so that they lie together.
    pub(crate) fn declare(
        own: &mut PartParameters,
        weights: &[LinearPart],
        inputs: usize,
    ) -> Option<Adapter> {
        let (lora, layer) = own.lora()?;
        let mut targets = Vec::new();
        let (mut rank, mut output) = (0, 0);
        for weight in weights.iter().copied() {
            let LinearPart { name, outputs, .. } = weight;
            let module = own.module(name);
            let size = lora.of(&module, layer);
            let site = DropoutSite {
                site: FIRST_SITE
                    + own.add_module(LinearModule {
                        name: module,
                        experts: None,
                        shape: [outputs, inputs],
                        rank: size.map(|size| size.rank),
                        scale: size.map_or(0.0, |size| size.scale),
                        layer,
                    }),
                rate: lora.dropout,
            };
            if let Some(size) = size {
                let shape = [size.rank, inputs];
                let initial = initial_a(lora.init, shape);
                let a = own.factor(&format!("{name}.lora_A.weight"), shape, initial);
                // A rank that no matrix can have is refused once all are declared.
                let ranks = rank..usize::saturating_add(rank, size.rank);
                let outputs = output..output + outputs;
                rank = ranks.end;
                targets.push((weight, a, size.scale, ranks, outputs, site));
            }
            output += outputs;
        }
        let parts = targets.into_iter();
        let parts = parts.map(|(weight, a, scale, ranks, outputs, site)| {
            let shape = [outputs.len(), ranks.len()];
            let name = format!("{}.lora_B.weight", weight.name);
            let b = own.by_head(weight.by_head).factor_of_outputs(&name, shape);
            Part {
                a,
                b,
                scale,
                ranks,
                outputs,
                site,
            }
        });
        let parts: Vec<Part> = parts.collect();
        (!parts.is_empty()).then(|| Adapter {
            kept: kept(weights[0].name),
            parts,
            inputs,
        })
    }

    /// Its factors.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = ParameterId> {
        self.parts.iter().flat_map(|part| [part.a, part.b])
    }

    /// The factors of a layer of one weight: A times the scale, and B.
    pub(crate) fn factors<'p>(&self, pass: &'p Pass) -> Result<[WeightMatrix<'p>; 2]> {
        let [part] = &self.parts[..] else {
            unreachable!("the layer has one weight");
        };
        Ok([
            factor(pass, &[(part.a, part.scale)])?,
            factor(pass, &[(part.b, 1.0)])?,
        ])
    }

    /// The activation that its backward pass reads.
    pub(crate) fn writes(&self) -> (Activation, Extent) {
        (self.kept, Extent::tokens(self.ranks()))
    }

    /// Where it drops elements of its input.
    pub(crate) fn sites(&self) -> impl Iterator<Item = DropoutSite> {
        self.parts.iter().map(|part| part.site)
    }

    /// FLOPs of its products for one token, forward and backward.
    pub(crate) fn flops_per_token(&self) -> u64 {
        let of = |part: &Part| 6 * (part.ranks.len() * (self.inputs + part.outputs.len())) as u64;
        self.parts.iter().map(of).sum()
    }

    fn ranks(&self) -> usize {
        self.parts.iter().map(|part| part.ranks.len()).sum()
    }

    /// `y += kept B'`, with `kept = scale x A'`, which is computed without any `y` too if it is needed.
    pub(crate) fn forward(&self, pass: &mut Pass, mut y: Vec<OutputColumns<Out>>, x: In) -> Result {
        let needed = pass.output(self.kept)?;
        let is_needed = needed.is_some();
        if !is_needed && y.is_empty() {
            return Ok(());
        }
        let mut kept = match needed {
            Some(kept) => kept,
            None => pass.temporary(self.kept.name(), [x.dims()[0], self.ranks()])?,
        };
        self.down(pass, kept.view_mut(), x)?;
        let parts = match y.is_empty() {
            false => &self.parts[..],
            true => &[],
        };
        for part in parts {
            let b = factor(pass, &[(part.b, 1.0)])?;
            let kept = kept.view().columns(part.ranks.clone());
            for piece in &mut y {
                let Some((columns, rows)) = part.within(piece.first, piece.of.dims()[1]) else {
                    continue;
                };
                let y = piece.of.reborrow().columns(columns);
                product(pass, y, (kept, b.view().rows(rows).t()), Init::Accumulate)?;
            }
        }
        pass.put(self.kept, is_needed.then_some(kept));
        Ok(())
    }

    /// `kept = scale x A'`, one product unless each weight drops other elements of `x`.
    fn down(&self, pass: &Pass, mut kept: Out, x: In) -> Result {
        let all: Vec<_> = self.parts.iter().map(|part| (part.a, part.scale)).collect();
        if !self.drops(pass) {
            let a = factor(pass, &all)?;
            return product(pass, kept, (x, a.view().t()), Init::Overwrite);
        }
        for (part, of_part) in self.parts.iter().zip(all.chunks(1)) {
            let dropped = self.dropped(pass, part, x)?;
            let a = factor(pass, of_part)?;
            let kept = kept.reborrow().columns(part.ranks.clone());
            product(pass, kept, (dropped.view(), a.view().t()), Init::Overwrite)?;
        }
        Ok(())
    }

    /// Adds to the gradients of its factors, from the gradient `dy` of the layer's output and its input `x`. Gives the
    /// gradient `[t, all ranks]` of what was kept, times the scale.
    pub(crate) fn add_gradients(
        &self,
        pass: &mut Pass,
        dy: &[OutputColumns<In>],
        x: In,
    ) -> Result<Buffer> {
        let kernels = pass.kernels();
        let kept = pass.pull(self.kept)?;
        for part in &self.parts {
            let (mut db, init) = pass.accumulate(part.b).expect(TRAINED);
            let kept = kept.view().columns(part.ranks.clone());
            for (dy, rows) in part.pieces(dy) {
                weight_gradient(kernels, (db.reborrow().rows(rows), init), dy, kept)?;
            }
        }
        pass.release(self.kept, kept);
        let mut through = pass.temporary("d_lora", [x.dims()[0], self.ranks()])?;
        for part in &self.parts {
            let b = factor(pass, &[(part.b, part.scale)])?;
            let mut init = Init::Overwrite;
            for (dy, rows) in part.pieces(dy) {
                let through = through.view_mut().columns(part.ranks.clone());
                product(pass, through, (dy, b.view().rows(rows)), init)?;
                init = Init::Accumulate;
            }
        }
        self.add_gradients_of_a(pass, through.view(), x)?;
        Ok(through)
    }

    fn add_gradients_of_a(&self, pass: &mut Pass, through: In, x: In) -> Result {
        let kernels = pass.kernels();
        let drops = self.drops(pass);
        let firsts: Vec<ParameterId> = self.parts.iter().map(|part| part.a).collect();
        if !drops && let Some(da) = pass.accumulate_joined(&firsts) {
            return weight_gradient(kernels, da, through, x);
        }
        for part in &self.parts {
            let dropped = match drops {
                true => Some(self.dropped(pass, part, x)?),
                false => None,
            };
            let x = dropped.as_ref().map_or(x, Buffer::view);
            let da = pass.accumulate(part.a).expect(TRAINED);
            weight_gradient(kernels, da, through.columns(part.ranks.clone()), x)?;
        }
        Ok(())
    }

    /// `dx += through A`, where `through` is what [`Adapter::add_gradients`] gave.
    pub(crate) fn add_input_gradient(&self, pass: &Pass, mut dx: Out, through: In) -> Result {
        let kernels = pass.kernels();
        let all: Vec<_> = self.parts.iter().map(|part| (part.a, 1.0)).collect();
        if !self.drops(pass) {
            let a = factor(pass, &all)?;
            return product(pass, dx, (through, a.view()), Init::Accumulate);
        }
        for (part, of_part) in self.parts.iter().zip(all.chunks(1)) {
            let mut sum = pass.temporary("d_lora_dropped", [through.dims()[0], self.inputs])?;
            let through = through.columns(part.ranks.clone());
            let a = factor(pass, of_part)?;
            product(pass, sum.view_mut(), (through, a.view()), Init::Overwrite)?;
            kernels.run(BiasDropoutAdd {
                out: sum.view_mut(),
                bias: None,
                dropout: pass.dropout(part.site),
                first: self.first(pass),
                scale: 1.0,
                residual: Some(dx.as_in()),
            })?;
            kernels.run(Copy {
                out: dx.reborrow(),
                x: sum.view(),
            })?;
        }
        Ok(())
    }

    /// Whether this pass drops elements of its input.
    fn drops(&self, pass: &Pass) -> bool {
        pass.dropout(self.parts[0].site).is_some()
    }

    /// Leases the layer's input after dropout, as this adapter reads it.
    fn dropped(&self, pass: &Pass, part: &Part, x: In) -> Result<Buffer> {
        let dropout: Dropout = pass.dropout(part.site).expect("it drops elements");
        let mut dropped = pass.temporary("lora_dropped", [x.dims()[0], self.inputs])?;
        pass.kernels().run(DropoutScale {
            out: dropped.view_mut(),
            x,
            dropout: Some(dropout),
            first: self.first(pass),
            scale: 1.0,
        })?;
        Ok(dropped)
    }

    /// The number of the first element of its input: on a tile, its first token's.
    fn first(&self, pass: &Pass) -> usize {
        pass.first_token() * self.inputs
    }
}

/// The values of a fresh factor A `[rank, inputs]`.
pub(crate) fn initial_a(init: LoraInit, [rank, inputs]: [usize; 2]) -> Initial {
    match init {
        LoraInit::Kaiming => Initial::Uniform((inputs as f32).sqrt().recip()),
        LoraInit::Gaussian => Initial::NormalOf((rank as f32).recip()),
    }
}

/// Factors are declared as trained.
const TRAINED: &str = "a factor is trained";

/// Stacks factors of one width by rows, or takes one of experts, each multiplied by its number, in the compute type. A view of
/// the arena serves where it holds just that.
pub(crate) fn factor<'p>(
    pass: &'p Pass,
    factors: &[(ParameterId, f32)],
) -> Result<WeightMatrix<'p>> {
    let ids: Vec<ParameterId> = factors.iter().map(|(id, _)| *id).collect();
    let is_plain = pass.dtype() == DType::F32 && factors.iter().all(|(_, scale)| *scale == 1.0);
    if let Some(stored) = pass.parameters(&ids).filter(|_| is_plain) {
        return Ok(WeightMatrix::Stored(stored));
    }
    let rows = ids.iter().map(|id| pass.parameter(*id).dims()[0]);
    let mut shape = pass.parameter(ids[0]).dims().to_vec();
    shape[0] = rows.sum();
    let shape = Dims::try_from(&shape[..]).expect("a factor has at most three sizes");
    let mut made = pass.temporary("lora_factor", shape)?;
    let mut first = 0;
    for (id, scale) in factors.iter().copied() {
        let x = pass.parameter(id);
        let elements = x.elements();
        let mut out = made.view_mut().rows(first..first + x.dims()[0]);
        first += x.dims()[0];
        pass.kernels().run(Copy {
            out: out.reborrow(),
            x,
        })?;
        if scale != 1.0 {
            // `Combine` reads `out` even where beta is 0, so the copy fills it first: what nobody wrote may be NaN.
            pass.kernels().run(Combine {
                out: out.reshape([elements]),
                x: x.reshape([elements]),
                alpha: scale,
                beta: 0.0,
            })?;
        }
    }
    Ok(WeightMatrix::Made(made))
}

/// The activation that a layer's adapter keeps, named after the layer's first weight. Names of activations live as long as
/// the process, so each is leaked once; there are few, since blocks call their modules alike.
pub(crate) fn kept(module: &str) -> Activation {
    static NAMES: Mutex<BTreeMap<String, &'static str>> = Mutex::new(BTreeMap::new());
    let mut names = NAMES.lock().expect("nothing panics while it is locked");
    let name = names.entry(module.into()).or_insert_with(|| {
        let name = format!("lora_{}", module.replace('.', "_"));
        Box::leak(name.into_boxed_str())
    });
    Activation::new(name, "d_lora", Label::LORA)
}
