//! The gated norm behind the gated delta rule.

use super::gated_delta::{COLUMNS, OutRows, ROWS, row};
use crate::cpu::dispatch::{by_dtype, by_dtypes};
use crate::cpu::simd::{Real, exp, lane_sum, vectorized};
use crate::cpu::{overwrites, part, shared};
use crate::operation::{GatedNorm, GatedNormBackward};
use rayon::prelude::*;

pub(crate) fn gated_norm(op: GatedNorm) {
    by_dtype!(op.x.dtype(), gated_norm_of(op));
}

fn gated_norm_of<T: Real>(op: GatedNorm) {
    let (&[tokens, width], head) = (op.x.dims(), op.weight.elements()) else {
        unreachable!("the check asks for two dimensions");
    };
    let (x, z, weight, eps) = (op.x, op.z, op.weight.slice::<T>(), op.eps);
    let (y, rstd) = (op.y.map(shared::<T>), op.rstd.map(shared::<f32>));
    (0..tokens).into_par_iter().for_each(|token| {
        let heads = row::<T>(&x, token)
            .chunks_exact(head)
            .zip(row::<T>(&z, token).chunks_exact(head));
        for (number, (x, z)) in heads.enumerate() {
            let scale = 1.0 / (lane_sum([x], |[x]| x * x) / head as f32 + eps).sqrt();
            // SAFETY: the row is this task's alone.
            unsafe {
                if let Some(rstd) = rstd {
                    part(rstd, token * (width / head) + number, 1)[0] = scale;
                }
                if let Some(y) = y {
                    norm_and_gate(
                        part(y, token * width + number * head, head),
                        [x, z, weight],
                        scale,
                    );
                }
            }
        }
    });
}

vectorized! {
    fn norm_and_gate<T: Real>(y: &mut [T], of: [&[T]; 3], rstd: f32) {
        let [x, z, weight] = of;
        for ((y, x), (z, weight)) in y.iter_mut().zip(x).zip(z.iter().zip(weight)) {
            let (normed, z) = (T::narrow(x.widen() * rstd).widen(), z.widen());
            *y = T::narrow(T::narrow(weight.widen() * normed).widen() * z / (1.0 + exp(-z)));
        }
    }
}

pub(crate) fn gated_norm_backward(op: GatedNormBackward) {
    by_dtypes!(op.dweight.dtype(), op.x.dtype(), gated_norm_backward_of(op));
}

fn gated_norm_backward_of<G: Real, T: Real>(op: GatedNormBackward) {
    let (&[tokens, width], head) = (op.x.dims(), op.weight.elements()) else {
        unreachable!("the check asks for two dimensions");
    };
    let (x, z, dy, weight, rstd) = (
        op.x,
        op.z,
        op.dy,
        op.weight.slice::<T>(),
        op.rstd.slice::<f32>(),
    );
    let heads = width / head;
    let dz = OutRows::<T>::of(&op.dz);
    let rows = op.dx.slice_mut::<T>().par_chunks_mut(width).enumerate();
    rows.for_each(|(token, dx)| {
        for (number, dx) in dx.chunks_exact_mut(head).enumerate() {
            let own = number * head..(number + 1) * head;
            let of = [&dy, &x, &z].map(|of| &row::<T>(of, token)[own.clone()]);
            // SAFETY: the row is this task's alone.
            let dz = unsafe { dz.columns(token, own.start, head) };
            gradients_of_norm((dx, dz), of, weight, rstd[token * heads + number]);
        }
    });
    let replace = overwrites(&op.init);
    let dweight = op
        .dweight
        .slice_mut::<G>()
        .par_chunks_mut(COLUMNS)
        .enumerate();
    dweight.for_each(|(block, dweight)| {
        let mut total = [0.0; COLUMNS];
        for first in (0..tokens).step_by(ROWS) {
            let mut sums = [0.0; COLUMNS];
            for token in first..tokens.min(first + ROWS) {
                for number in 0..heads {
                    let first = number * head + block * COLUMNS;
                    let of =
                        [&dy, &x, &z].map(|of| &row::<T>(of, token)[first..first + dweight.len()]);
                    add_weight_gradients(&mut sums, of, rstd[token * heads + number]);
                }
            }
            total
                .iter_mut()
                .zip(sums)
                .for_each(|(total, sum)| *total += sum);
        }
        for (dweight, sum) in dweight.iter_mut().zip(total) {
            let before = if replace { 0.0 } else { dweight.widen() };
            *dweight = G::narrow(before + sum);
        }
    });
}

vectorized! {
    fn gradients_of_norm<T: Real>(out: (&mut [T], &mut [T]), of: [&[T]; 3], weight: &[T], rstd: f32) {
        let ((dx, dz), [dy, x, z]) = (out, of);
        let along = lane_sum([dy, x, z, weight], |[dy, x, z, weight]| dy * weight * z / (1.0 + exp(-z)) * x * rstd);
        let along = along / weight.len() as f32;
        let places = dx.iter_mut().zip(dz.iter_mut()).zip(weight);
        for (((dx, dz), weight), ((dy, x), z)) in places.zip(dy.iter().zip(x).zip(z)) {
            let (normed, z) = (x.widen() * rstd, z.widen());
            let (s, d) = (1.0 / (1.0 + exp(-z)), dy.widen() * weight.widen());
            *dz = T::narrow(d * normed * s * (1.0 + z * (1.0 - s)));
            *dx = T::narrow(rstd * (d * z * s - normed * along));
        }
    }

    fn add_weight_gradients<T: Real>(sums: &mut [f32; COLUMNS], of: [&[T]; 3], rstd: f32) {
        let [dy, x, z] = of;
        for ((sum, dy), (x, z)) in sums.iter_mut().zip(dy).zip(x.iter().zip(z)) {
            let z = z.widen();
            *sum += dy.widen() * (x.widen() * rstd) * z / (1.0 + exp(-z));
        }
    }
}
