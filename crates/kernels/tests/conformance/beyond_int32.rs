//! Products that are cut, since the library counts a matrix's elements in 32 bits: here at fewer elements. On a GPU the test
//! `beyond_int32` of the program `cuda_device` has a product that is cut at the library's own limit.

use crate::DTYPES;
use crate::case::judge;
use crate::device::{Start, cutting_products};
use crate::layout::{COLUMNS, Layout, PLAIN, TRANSPOSED};
use crate::matmul::{Bias, Product};
use kernels::cuda::{Call, Cuda, Listing, PRODUCT_ELEMENTS_MAX};
use kernels::{Init, Matmul};
use memory::{Category, DType};

/// 247 rows of 530 elements.
const ELEMENTS_MAX: usize = 1 << 17;

/// m, k, n: of a layer's output, of which only rows are cut, and of a weight's gradient, of which only sums are.
const OUTPUT: [usize; 3] = [600, 96, 530];
const GRADIENT: [usize; 3] = [200, 600, 530];

#[test]
fn a_product_in_pieces_is_that_product() {
    for dtype in DTYPES {
        let devices = [cutting_products(dtype, ELEMENTS_MAX)];
        let judge =
            |sizes, out, [dtype_of_out, operands]: [DType; 2], layouts: [Layout; 2], start| {
                let case = Product {
                    sizes,
                    dtypes: [dtype_of_out, operands, operands],
                    layouts,
                    out,
                    bias: Bias::Aligned,
                    start,
                    seed: 4000,
                };
                judge(&case, &devices);
            };
        for start in [Start::Overwrite, Start::Accumulate, Start::Add] {
            judge(OUTPUT, COLUMNS, [dtype, dtype], [PLAIN, TRANSPOSED], start);
            // f32 keeps the sums of parts.
            judge(
                GRADIENT,
                PLAIN,
                [DType::F32, dtype],
                [TRANSPOSED, PLAIN],
                start,
            );
        }
    }
}

/// The sizes of the products that a device is asked for, and the elements that they reach over.
fn asked(
    elements_max: usize,
    [m, k, n]: [usize; 3],
    is_gradient: bool,
) -> Vec<([usize; 3], usize)> {
    let memory = Listing::memory();
    let listing = Listing::of_rank(0, &memory);
    let kernels = Cuda::new(listing.clone(), &memory, DType::BF16).unwrap();
    let kernels = kernels.cutting_products(elements_max);
    let lease = |dims: [usize; 2]| {
        memory
            .lease(Category::Temporary, "x", dims, DType::BF16)
            .unwrap()
    };
    let (a, b, mut out) = match is_gradient {
        false => (lease([m, k]), lease([n, k]), lease([m, n])),
        true => (lease([k, m]), lease([k, n]), lease([m, n])),
    };
    let (a, b) = match is_gradient {
        false => (a.view(), b.view().t()),
        true => (a.view().t(), b.view()),
    };
    let (bias, init) = (None, Init::Overwrite);
    kernels
        .run(Matmul {
            out: out.view_mut(),
            a,
            b,
            bias,
            init,
        })
        .unwrap();
    let products = listing.take().into_iter().map(|listed| {
        let Call::Product(gemm) = listed.call else {
            panic!("{listed:?}")
        };
        let [m, k, n] = gemm.sizes;
        let reach = |matrix: kernels::cuda::Matrix, [rows, columns]: [usize; 2]| {
            1 + (rows - 1) * matrix.row_stride + (columns - 1) * matrix.column_stride
        };
        let reached = [
            reach(gemm.a, [m, k]),
            reach(gemm.b, [k, n]),
            reach(gemm.out, [m, n]),
        ];
        (gemm.sizes, reached.into_iter().max().unwrap())
    });
    products.collect()
}

#[test]
fn no_product_reaches_over_more_elements_than_the_library_counts() {
    let sizes = |elements_max, sizes, is_gradient| -> Vec<[usize; 3]> {
        let asked = asked(elements_max, sizes, is_gradient);
        assert!(
            asked.iter().all(|(_, reach)| *reach <= elements_max),
            "{asked:?}"
        );
        asked.into_iter().map(|(sizes, _)| sizes).collect()
    };
    // What the test above computes is cut.
    assert_eq!(sizes(ELEMENTS_MAX, OUTPUT, false).len(), 5);
    assert_eq!(sizes(ELEMENTS_MAX, GRADIENT, true).len(), 5);
    let max = PRODUCT_ELEMENTS_MAX;
    // Gate and up of Qwen2.5-7B for 64 x 1,024 tokens, forward and as a gradient; those of a model of 70B for 131,072.
    let [tokens, hidden, outputs] = [65_536, 3_584, 37_888];
    let [first, last] = [56_576, 8_960];
    assert_eq!(
        sizes(max, [tokens, hidden, outputs], false),
        [[first, hidden, outputs], [last, hidden, outputs]]
    );
    assert_eq!(
        sizes(max, [outputs, tokens, hidden], true),
        [[outputs, first, hidden], [outputs, last, hidden]]
    );
    assert_eq!(sizes(max, [131_072, 8_192, 28_672], false).len(), 2);
    // As many elements as there may be.
    let most = [1 << 16, 64, 1 << 15];
    assert_eq!(sizes(max, most, false), [most]);
}
