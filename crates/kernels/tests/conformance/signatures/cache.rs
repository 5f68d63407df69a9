//! Attention over cached keys and values, and what stores them.

use super::{Signature, argument};
use kernels::{AttentionShape, CachedAttention, StoreInCache};
use memory::DType;

/// One sequence: the contents that arguments have name block 1 in every row of the table.
pub fn signatures(dtype: DType) -> [Signature; 4] {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let cache = |name| real(name, &[3, 16, 12]);
    let table = || argument("table", DType::I32, &[1, 2]).free_dim(1);
    let lengths = || argument("lengths", DType::I32, &[1]);
    let store = Signature {
        operation: "store_in_cache",
        outs: vec![cache("k_cache"), cache("v_cache")],
        ins: vec![real("k", &[2, 12]), real("v", &[2, 12]), table(), lengths()],
        call: |kernels, outs, ins| {
            let [k_cache, v_cache] = outs else {
                unreachable!()
            };
            kernels.run(StoreInCache {
                k_cache: k_cache.reborrow(),
                v_cache: Some(v_cache.reborrow()),
                k: ins[0],
                v: ins[1],
                table: ins[2],
                lengths: ins[3],
            })
        },
    };
    let attend = Signature {
        operation: "cached_attention",
        outs: vec![real("out", &[2, 24])],
        ins: vec![
            real("q", &[2, 24]),
            cache("k_cache"),
            cache("v_cache"),
            table(),
            lengths(),
        ],
        call: |kernels, outs, ins| {
            kernels.run(CachedAttention {
                out: outs[0].reborrow(),
                q: ins[0],
                k_cache: ins[1],
                v_cache: Some(ins[2]),
                table: ins[3],
                lengths: ins[4],
                shape: AttentionShape::new([1, 2], [4, 2], 6),
            })
        },
    };
    let store_side_by_side = Signature {
        operation: "store_in_cache",
        outs: vec![cache("k_cache").free_dim(0)],
        ins: vec![real("k", &[2, 9]), real("v", &[2, 3]), table(), lengths()],
        call: |kernels, outs, ins| {
            kernels.run(StoreInCache {
                k_cache: outs[0].reborrow(),
                v_cache: None,
                k: ins[0],
                v: ins[1],
                table: ins[2],
                lengths: ins[3],
            })
        },
    };
    let attend_to_latents = Signature {
        operation: "cached_attention",
        outs: vec![real("out", &[2, 20])],
        ins: vec![
            real("q", &[2, 24]),
            cache("k_cache").free_dim(0),
            table(),
            lengths(),
        ],
        call: |kernels, outs, ins| {
            kernels.run(CachedAttention {
                out: outs[0].reborrow(),
                q: ins[0],
                k_cache: ins[1],
                v_cache: None,
                table: ins[2],
                lengths: ins[3],
                shape: AttentionShape {
                    v_head_dim: 5,
                    ..AttentionShape::new([1, 2], [4, 2], 6)
                },
            })
        },
    };
    [store, attend, store_side_by_side, attend_to_latents]
}
