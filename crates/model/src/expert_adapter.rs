//! The factors of low rank that the layers of experts add to their weights, as PEFT's `target_parameters` has them: each expert
//! has factors of its own, applied to the rows of its tokens.

use crate::adapter::{factor, initial_a, kept};
use crate::lora::LinearModule;
use crate::parameters::{Initial, ParameterId, PartParameters};
use crate::stored::Stored;
use crate::{Activation, Pass, Result};
use kernels::operation::{ExpertRows, GroupedGradient, GroupedMatmul};
use memory::{Buffer, In, Out};

/// The adapter of the same linear layer of every expert: `y += (scale x A') B'`, each row with the factors of its expert,
/// `A [e, rank, inputs]` and `B [e, outputs, rank]`, both f32. `scale x A'`, of `r` rows, is kept for the backward pass. Inputs
/// are not dropped out.
#[derive(Clone, Debug)]
pub(crate) struct ExpertAdapter {
    kept: Activation,
    a: ParameterId,
    b: ParameterId,
    scale: f32,
    rank: usize,
    /// Outputs and inputs.
    shape: [usize; 2],
}

impl ExpertAdapter {
    /// Declares the factors of the parameter `name [experts, outputs, inputs]`, which is declared, if it is a target.
    pub(crate) fn declare(
        own: &mut PartParameters,
        name: &str,
        [experts, outputs, inputs]: [usize; 3],
    ) -> Option<ExpertAdapter> {
        let (lora, layer) = own.lora()?;
        let module = own.module(name);
        let size = lora.of(&module, layer);
        own.add_module(LinearModule {
            name: module,
            experts: Some(experts),
            shape: [outputs, inputs],
            rank: size.map(|size| size.rank),
            scale: size.map_or(0.0, |size| size.scale),
            layer,
        });
        let size = size?;
        let a = ([experts, size.rank, inputs], Stored::ExpertsInRows);
        let in_columns = Stored::ExpertsInColumns {
            is_interleaved: own.is_interleaved(name),
        };
        let b = ([experts, outputs, size.rank], in_columns);
        let initial = initial_a(lora.init, [size.rank, inputs]);
        Some(ExpertAdapter {
            kept: kept(name),
            a: own.factor_of_experts(&format!("{name}.lora_A.weight"), a, initial),
            b: own.factor_of_experts(&format!("{name}.lora_B.weight"), b, Initial::Zero),
            scale: size.scale,
            rank: size.rank,
            shape: [outputs, inputs],
        })
    }

    /// Its factors.
    pub(crate) fn parameters(&self) -> [ParameterId; 2] {
        [self.a, self.b]
    }

    /// The activation that its backward pass reads, and its width.
    pub(crate) fn writes(&self) -> (Activation, usize) {
        (self.kept, self.rank)
    }

    /// FLOPs of its products for one row, forward and backward.
    pub(crate) fn flops_per_row(&self) -> u64 {
        6 * (self.rank * self.shape.iter().sum::<usize>()) as u64
    }

    /// `out [r, outputs] = kept B'`, with `kept = scale x A'`, which is computed without `out` too if it is needed.
    pub(crate) fn forward(
        &self,
        pass: &mut Pass,
        out: Option<Out>,
        x: ExpertRows,
        offsets: In,
    ) -> Result {
        let needed = pass.output(self.kept)?;
        let is_needed = needed.is_some();
        if !is_needed && out.is_none() {
            return Ok(());
        }
        let mut kept = match needed {
            Some(kept) => kept,
            None => pass.temporary(self.kept.name(), [x.dims()[0], self.rank])?,
        };
        let a = factor(pass, &[(self.a, self.scale)])?;
        grouped_product(
            pass,
            (kept.view_mut(), x),
            (a.view(), false),
            of_all(offsets),
        )?;
        drop(a);
        if let Some(out) = out {
            let b = factor(pass, &[(self.b, 1.0)])?;
            let kept = ExpertRows::in_order(kept.view());
            grouped_product(pass, (out, kept), (b.view(), false), of_all(offsets))?;
        }
        pass.put(self.kept, is_needed.then_some(kept));
        Ok(())
    }

    /// Adds to the gradients of its factors, from the gradient `dy` of the layer's output and its input `x`. Gives the
    /// gradient `[r, rank]` of what was kept, times the scale.
    pub(crate) fn add_gradients(
        &self,
        pass: &mut Pass,
        dy: ExpertRows,
        x: ExpertRows,
        offsets: In,
    ) -> Result<Buffer> {
        let kept = pass.pull(self.kept)?;
        let of_kept = ExpertRows::in_order(kept.view());
        grouped_gradient(pass, self.b, (dy, of_kept), offsets)?;
        pass.release(self.kept, kept);
        let mut through = pass.temporary("d_lora", [dy.dims()[0], self.rank])?;
        let b = factor(pass, &[(self.b, self.scale)])?;
        grouped_product(
            pass,
            (through.view_mut(), dy),
            (b.view(), true),
            of_all(offsets),
        )?;
        drop(b);
        let of_through = ExpertRows::in_order(through.view());
        grouped_gradient(pass, self.a, (of_through, x), offsets)?;
        Ok(through)
    }

    /// `dx [r, inputs] = through A`, where `through` is what [`ExpertAdapter::add_gradients`] gave.
    pub(crate) fn input_gradient(&self, pass: &Pass, dx: Out, through: In, offsets: In) -> Result {
        let a = factor(pass, &[(self.a, 1.0)])?;
        let through = ExpertRows::in_order(through);
        grouped_product(pass, (dx, through), (a.view(), true), of_all(offsets))
    }
}

/// All experts of a table.
fn of_all(offsets: In<'_>) -> (In<'_>, usize) {
    (offsets, offsets.elements() - 1)
}

/// `out = rows weights'`, each row with the matrix of its expert, or if `by_columns` `out = rows weights`. Computes the rows of these of
/// `of_experts` experts.
pub(crate) fn grouped_product(
    pass: &Pass,
    (out, rows): (Out, ExpertRows),
    (weights, by_columns): (In, bool),
    (offsets, of_experts): (In, usize),
) -> Result {
    let mut scratch = scratch(pass, &[rows])?;
    Ok(pass.kernels().run(GroupedMatmul {
        out,
        scratch: scratch.view_mut(),
        rows,
        weights,
        by_columns,
        offsets,
        of_experts,
    })?)
}

/// Adds `dy' rows`, an expert at a time, to the gradient of a parameter, if it is trained.
pub(crate) fn grouped_gradient(
    pass: &mut Pass,
    of: ParameterId,
    (dy, rows): (ExpertRows, ExpertRows),
    offsets: In,
) -> Result {
    let kernels = pass.kernels();
    if !of.is_trained() {
        return Ok(());
    }
    let mut scratch = scratch(pass, &[dy, rows])?;
    let of_experts = offsets.elements() - 1;
    for group in pass.groups_of(of, of_experts) {
        let open = pass.open_gradients(group.unit)?;
        let (out, init) = pass.accumulate_group(of, group.unit);
        kernels.run(GroupedGradient {
            out,
            scratch: scratch.view_mut(),
            dy,
            rows,
            offsets: offsets.rows(group.experts.start..group.experts.end + 1),
            of_experts,
            init,
        })?;
        pass.close_group(open)?;
    }
    Ok(())
}

/// Scratch of a product.
fn scratch(pass: &Pass, operands: &[ExpertRows]) -> Result<Buffer> {
    let target = pass.kernels().target();
    let elements = operands.iter().map(|rows| rows.scratch_elements(target));
    pass.temporary_f32("expert_rows", [elements.sum::<usize>()])
}
