//! The same bits for any number of threads. Only the CPU's implementation computes on the pool.

use crate::device::{Device, computing};
use crate::host::Host;
use crate::{DTYPES, SUITE, case};
use kernels::Target;
use memory::DType;
use std::collections::BTreeSet;

/// The outputs of every case on the CPU, in the current pool.
fn outputs(dtype: DType) -> Vec<(String, Vec<Host>)> {
    let mut outputs = Vec::new();
    let on_pool = |device: &Device| device.kernels.target() == Target::Cpu;
    for device in computing(dtype).into_iter().filter(on_pool) {
        for (_, cases) in SUITE {
            for case in cases(dtype) {
                outputs.push((
                    format!("{case:?} on {}", device.name),
                    case::run(case.as_ref(), &device),
                ));
            }
        }
    }
    outputs
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let pools = [1, 2, 3, 4].map(|threads| {
        rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap()
    });
    let sizes: BTreeSet<usize> = pools
        .iter()
        .map(|pool| pool.install(rayon::current_num_threads))
        .collect();
    assert_eq!(sizes.len(), pools.len(), "the pools differ");
    for dtype in DTYPES {
        let [one, others @ ..] = &pools;
        let reference = one.install(|| outputs(dtype));
        for pool in others {
            let threads = pool.current_num_threads();
            let got = pool.install(|| outputs(dtype));
            assert_eq!(got.len(), reference.len());
            for ((case, reference), (_, got)) in reference.iter().zip(got) {
                assert!(
                    *reference == got,
                    "{case}: {threads} threads give other bits than one"
                );
            }
        }
    }
}
