//! Finds the fastest algorithm of a product by running several.

use super::algorithms::{TunedProduct, Words};
use super::block::Block;
use super::problem::{Pointers, Problem};
use super::products::Plan;
use super::random_data::RandomData;
use super::rehearsal::{Operands, distinct};
use super::{CudaDriver, error};
use crate::cuda::{Cuda, Gemm};
use crate::{Kernels, Result};
use memory::Space;
use std::time::Duration;

/// The operation named in errors.
const OPERATION: &str = "tune";

/// Most algorithms measured per product. The heuristic names the best ones first.
const ALGORITHMS_MAX: usize = 16;

/// Number of timings of an algorithm; the best one counts.
const ROUNDS: usize = 5;

/// An algorithm must be faster than the heuristic's first by this share of its time to take its place: less is noise, and
/// would change bits for nothing.
const GAIN_MIN: f64 = 0.01;

impl Kernels<Cuda<CudaDriver>> {
    /// Measures the algorithms of each of `products`, once for those that are the same problem, and tells the fastest.
    ///
    /// Operands are random numbers, in a block as a rehearsal has it: no larger than what a run holds when it computes the
    /// product. Before each time that is taken the whole block is filled, so that no cache holds the operands of the time before.
    ///
    /// # Errors
    /// [`crate::Fault::DeviceFull`] if memory is short; otherwise as for products.
    pub fn tune(&self, products: &[Gemm]) -> Result<Vec<TunedProduct>> {
        let products = distinct(products)?;
        let device = &self.backend.driver.device;
        let bytes = products.iter().map(|gemm| Operands::of(gemm).bytes()).max();
        let Some(bytes) = bytes else {
            return Ok(Vec::new());
        };
        let block = Block::new(device, OPERATION, Space::Device, bytes)?;
        let data = RandomData::new();
        // SAFETY: the block is alive, and nothing but this stream uses it.
        let fill = || unsafe { data.fill(&self.backend.driver, block.pointer(), bytes) };
        let tune = |gemm: &Gemm| {
            let gemm = Operands::of(gemm).placed(gemm, block.pointer());
            // SAFETY: the block covers the operands; nothing but this stream uses block and workspace.
            unsafe { self.fastest(&gemm, &fill) }
        };
        let tuned = products.iter().map(tune).collect();
        device.synchronize().map_err(error::of_driver(OPERATION))?;
        tuned
    }

    /// # Safety
    /// As for `Driver::gemm`.
    unsafe fn fastest(&self, gemm: &Gemm, fill: &dyn Fn() -> Result) -> Result<TunedProduct> {
        let (problem, pointers) = Problem::new(gemm)?;
        let (handle, workspace) = (
            self.backend.driver.products.handle,
            self.backend.workspace(),
        );
        let refused = |error| error::of_library(format!("{:?}: {problem:?}", gemm.sizes), error);
        let mut plan = Plan::new(&problem).map_err(refused)?;
        let choices = plan.choices(handle, &problem, workspace.bytes, ALGORITHMS_MAX);
        let choices = choices.map_err(refused)?;
        let mut times = vec![Some(Duration::MAX); choices.algorithms.len()];
        // Rounds go through all algorithms in turn: clocks that change meet them alike. The first round loads code.
        for round in 0..=ROUNDS {
            for (place, algorithm) in choices.algorithms.iter().enumerate() {
                let Some(best) = times[place] else {
                    continue;
                };
                fill()?;
                plan.algorithm = *algorithm;
                // SAFETY: the caller's promise.
                times[place] = match unsafe { self.time(&plan, pointers, gemm) } {
                    Ok(_) if round == 0 => Some(best),
                    Ok(took) => Some(best.min(took)),
                    // The library's first choice has to work, because runs without a file use it. Others are skipped if
                    // they fail.
                    Err(error) if place == 0 => return Err(error),
                    Err(_) => None,
                };
            }
        }
        let place = fastest(&times);
        let microseconds = |place: usize| times[place].map_or(0.0, |time| 1e6 * time.as_secs_f64());
        Ok(TunedProduct {
            problem,
            workspace_bytes: workspace.bytes,
            algorithm: Words(choices.algorithms[place].data),
            is_rounded: choices.are_rounded,
            place,
            measured: times.iter().flatten().count(),
            microseconds: microseconds(place),
            first_microseconds: microseconds(0),
        })
    }

    /// The time of a product.
    ///
    /// # Safety
    /// As for `Driver::gemm`.
    unsafe fn time(&self, plan: &Plan, pointers: Pointers, gemm: &Gemm) -> Result<Duration> {
        let (device, workspace) = (&self.backend.driver.device, self.backend.workspace());
        let beta = if gemm.init.is_some() { 1.0 } else { 0.0 };
        let of_driver = error::of_driver(OPERATION);
        let from = device.stamps.put(device.stream).map_err(of_driver)?;
        // SAFETY: the caller's promise.
        let computed = unsafe {
            plan.compute(
                self.backend.driver.products.handle,
                pointers,
                [gemm.alpha, beta],
                workspace,
                device.stream,
            )
        };
        let to = device.stamps.put(device.stream).map_err(of_driver)?;
        let took = device.stamps.elapsed(from, to).map_err(of_driver);
        device.stamps.give_back(from);
        device.stamps.give_back(to);
        let of_library = |error| error::of_library(format!("{:?}", gemm.sizes), error);
        computed.map_err(of_library)?;
        took
    }
}

/// The index of the fastest; the earlier of two equal ones. The first is kept unless another is faster by [`GAIN_MIN`].
fn fastest(times: &[Option<Duration>]) -> usize {
    let timed = times.iter().enumerate();
    let timed = timed.filter_map(|(place, time)| Some((place, (*time)?)));
    let (place, least) = timed
        .min_by_key(|(_, time)| *time)
        .unwrap_or((0, Duration::ZERO));
    match times.first() {
        Some(Some(first)) if least.as_secs_f64() > (1.0 - GAIN_MIN) * first.as_secs_f64() => 0,
        _ => place,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fastest_is_taken_and_the_first_unless_it_is_slower_by_more_than_noise() {
        let place = |times: &[i64]| {
            let time = |ns: &i64| u64::try_from(*ns).ok().map(Duration::from_nanos);
            fastest(&times.iter().map(time).collect::<Vec<_>>())
        };
        assert_eq!(place(&[1000]), 0);
        assert_eq!(place(&[1000, 900, 800, 800]), 2);
        assert_eq!(place(&[1000, 991, 995]), 0);
        assert_eq!(place(&[1000, 989]), 1);
        // Algorithms that could not compute have no time.
        assert_eq!(place(&[1000, -1, 500]), 2);
        assert_eq!(place(&[0, 0, 0]), 0);
    }
}
