//! Operations on the rows of a layer.

use super::attention::{dropout, key};
use super::{Signature, argument};
use kernels::{
    AddBias, AddPositions, AddPositionsBackward, BiasBackward, BiasDropoutAdd, CrossEntropy,
    DropoutBackward, Embedding, EmbeddingBackward, Gelu, GeluBackward, Init, JoinQkv, KernelError,
    Kernels, LayerNorm, LayerNormBackward, Positions, RmsNorm, RmsNormBackward, Rotary, SplitQkv,
    Swiglu, SwigluBackward, Turn,
};
use memory::{DType, In, Out};

pub fn signatures(dtype: DType) -> Vec<Signature> {
    let real = |name, dims: &[usize]| argument(name, dtype, dims);
    let float = |name, dims: &[usize]| argument(name, DType::F32, dims);
    let largest = || float("largest", &[1]);
    let ids = |name| argument(name, DType::I32, &[4]);
    let positions = || argument("positions", DType::I32, &[10]);
    vec![
        Signature {
            operation: "add_bias",
            outs: vec![real("out", &[4, 6]).free_dim(0)],
            ins: vec![real("bias", &[6])],
            call: |kernels, outs, ins| {
                kernels.run(AddBias {
                    out: outs[0].reborrow(),
                    bias: ins[0],
                })
            },
        },
        Signature {
            operation: "bias_backward",
            outs: vec![float("out", &[6]).free_type()],
            ins: vec![real("dy", &[4, 6]).free_dim(0).free_type().free_layout()],
            call: |kernels, outs, ins| {
                kernels.run(BiasBackward {
                    out: outs[0].reborrow(),
                    dy: ins[0],
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "bias_dropout_add",
            outs: vec![real("out", &[4, 6])],
            ins: vec![real("bias", &[6]), real("residual", &[4, 6]), key()],
            call: |kernels, outs, ins| {
                kernels.run(BiasDropoutAdd {
                    out: outs[0].reborrow(),
                    bias: Some(ins[0]),
                    dropout: dropout(ins),
                    first: 0,
                    residual: Some(ins[1]),
                })
            },
        },
        Signature {
            operation: "dropout_backward",
            outs: vec![real("dx", &[4, 6])],
            ins: vec![real("dy", &[4, 6]), key()],
            call: |kernels, outs, ins| {
                kernels.run(DropoutBackward {
                    dx: outs[0].reborrow(),
                    dy: ins[0],
                    dropout: dropout(ins).expect("there is a key"),
                    first: 0,
                })
            },
        },
        Signature {
            operation: "embedding",
            outs: vec![real("out", &[4, 6])],
            ins: vec![real("table", &[9, 6]).free_dim(0), ids("ids")],
            call: |kernels, outs, ins| {
                kernels.run(Embedding {
                    out: outs[0].reborrow(),
                    table: ins[0],
                    ids: ins[1],
                })
            },
        },
        Signature {
            operation: "embedding_backward",
            outs: vec![float("dtable", &[9, 6]).free_dim(0).free_type()],
            ins: vec![real("dout", &[4, 6]).free_type(), ids("ids")],
            call: |kernels, outs, ins| {
                kernels.run(EmbeddingBackward {
                    dtable: outs[0].reborrow(),
                    dout: ins[0],
                    ids: ins[1],
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "add_positions",
            outs: vec![real("x", &[10, 6])],
            ins: vec![real("table", &[7, 6]).free_dim(0)],
            call: |kernels, outs, ins| {
                kernels.run(AddPositions {
                    x: outs[0].reborrow(),
                    table: ins[0],
                    positions: Positions::Sequences(5),
                })
            },
        },
        Signature {
            operation: "add_positions_backward",
            outs: vec![float("dtable", &[7, 6]).free_dim(0).free_type()],
            ins: vec![real("dx", &[10, 6]).free_type()],
            call: |kernels, outs, ins| {
                kernels.run(AddPositionsBackward {
                    dtable: outs[0].reborrow(),
                    dx: ins[0],
                    positions: Positions::Sequences(5),
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "add_positions",
            outs: vec![real("x", &[10, 6])],
            ins: vec![real("table", &[7, 6]).free_dim(0), positions()],
            call: |kernels, outs, ins| {
                kernels.run(AddPositions {
                    x: outs[0].reborrow(),
                    table: ins[0],
                    positions: Positions::Given(ins[1]),
                })
            },
        },
        Signature {
            operation: "add_positions_backward",
            outs: vec![float("dtable", &[7, 6]).free_dim(0).free_type()],
            ins: vec![real("dx", &[10, 6]).free_type(), positions()],
            call: |kernels, outs, ins| {
                kernels.run(AddPositionsBackward {
                    dtable: outs[0].reborrow(),
                    dx: ins[0],
                    positions: Positions::Given(ins[1]),
                    init: Init::Accumulate,
                })
            },
        },
        Signature {
            operation: "rms_norm",
            outs: vec![real("y", &[4, 6]), float("rstd", &[4]), largest()],
            ins: vec![real("x", &[4, 6]), real("weight", &[6])],
            call: |kernels, outs, ins| {
                let [y, rstd, largest] = outs else {
                    unreachable!()
                };
                kernels.run(RmsNorm {
                    y: Some(y.reborrow()),
                    rstd: Some(rstd.reborrow()),
                    largest: Some(largest.reborrow()),
                    x: ins[0],
                    weight: ins[1],
                    eps: 1e-5,
                })
            },
        },
        Signature {
            operation: "rms_norm_backward",
            outs: vec![real("dx", &[4, 6]), float("dweight", &[6]).free_type()],
            ins: vec![
                real("dy", &[4, 6]),
                real("x", &[4, 6]),
                real("weight", &[6]),
                float("rstd", &[4]),
            ],
            call: |kernels, outs, ins| {
                let [dx, dweight] = outs else { unreachable!() };
                let (dx, dweight, init) = (dx.reborrow(), dweight.reborrow(), Init::Accumulate);
                kernels.run(RmsNormBackward {
                    dx,
                    dx_init: init,
                    dweight,
                    dweight_init: init,
                    dy: ins[0],
                    x: ins[1],
                    weight: ins[2],
                    rstd: ins[3],
                })
            },
        },
        Signature {
            operation: "layer_norm",
            outs: vec![
                real("y", &[4, 6]),
                float("mean", &[4]),
                float("rstd", &[4]),
                largest(),
            ],
            ins: vec![real("x", &[4, 6]), real("weight", &[6]), real("bias", &[6])],
            call: |kernels, outs, ins| {
                let [y, mean, rstd, largest] = outs else {
                    unreachable!()
                };
                kernels.run(LayerNorm {
                    y: Some(y.reborrow()),
                    mean: Some(mean.reborrow()),
                    rstd: Some(rstd.reborrow()),
                    largest: Some(largest.reborrow()),
                    x: ins[0],
                    weight: ins[1],
                    bias: ins[2],
                    eps: 1e-5,
                })
            },
        },
        Signature {
            operation: "layer_norm_backward",
            outs: vec![
                real("dx", &[4, 6]),
                float("dweight", &[6]).free_type(),
                float("dbias", &[6]).free_type(),
            ],
            ins: vec![
                real("dy", &[4, 6]),
                real("x", &[4, 6]),
                real("weight", &[6]),
                float("mean", &[4]),
                float("rstd", &[4]),
            ],
            call: |kernels, outs, ins| {
                layer_norm_backward(kernels, outs, ins, [Init::Accumulate; 3])
            },
        },
        Signature {
            operation: "rotary",
            outs: vec![real("x", &[10, 24]).free_type().free_layout()],
            ins: vec![float("table", &[2, 5, 4]).free_dim(1)],
            call: |kernels, outs, ins| {
                kernels.run(Rotary {
                    x: outs[0].reborrow(),
                    table: ins[0],
                    positions: Positions::Sequences(5),
                    inverse: false,
                })
            },
        },
        Signature {
            operation: "rotary",
            outs: vec![real("x", &[10, 24]).free_type().free_layout()],
            ins: vec![float("table", &[2, 5, 4]).free_dim(1), positions()],
            call: |kernels, outs, ins| {
                kernels.run(Rotary {
                    x: outs[0].reborrow(),
                    table: ins[0],
                    positions: Positions::Given(ins[1]),
                    inverse: false,
                })
            },
        },
        Signature {
            operation: "split_qkv",
            outs: vec![
                real("q", &[10, 24]),
                real("k", &[10, 8]),
                real("v", &[10, 8]),
            ],
            ins: vec![
                real("qkv", &[10, 40]),
                float("table", &[2, 5, 4]).free_dim(1),
            ],
            call: |kernels, outs, ins| {
                split_qkv(kernels, outs, ins, [8, 8], Positions::Sequences(5))
            },
        },
        Signature {
            operation: "split_qkv",
            outs: vec![
                real("q", &[10, 24]),
                real("k", &[10, 8]),
                real("v", &[10, 8]),
            ],
            ins: vec![
                real("qkv", &[10, 40]),
                float("table", &[2, 5, 4]).free_dim(1),
                positions(),
            ],
            call: |kernels, outs, ins| {
                split_qkv(kernels, outs, ins, [8, 8], Positions::Given(ins[2]))
            },
        },
        Signature {
            operation: "join_qkv",
            outs: vec![real("qkv", &[10, 40])],
            ins: vec![
                real("q", &[10, 24]),
                real("k", &[10, 8]),
                real("v", &[10, 8]),
                float("table", &[2, 5, 4]).free_dim(1),
            ],
            call: |kernels, outs, ins| {
                kernels.run(JoinQkv {
                    qkv: outs[0].reborrow(),
                    q: ins[0],
                    k: ins[1],
                    v: ins[2],
                    turn: Some(Turn {
                        table: ins[3],
                        positions: Positions::Sequences(5),
                    }),
                })
            },
        },
        Signature {
            operation: "swiglu",
            outs: vec![real("act", &[4, 6]), largest()],
            ins: vec![real("gate_up", &[4, 12])],
            call: |kernels, outs, ins| {
                let [act, largest] = outs else { unreachable!() };
                kernels.run(Swiglu {
                    act: act.reborrow(),
                    gate_up: ins[0],
                    largest: Some(largest.reborrow()),
                })
            },
        },
        Signature {
            operation: "swiglu_backward",
            outs: vec![real("gate_up", &[4, 12]), largest()],
            ins: vec![real("dact", &[4, 6])],
            call: |kernels, outs, ins| {
                let [gate_up, largest] = outs else {
                    unreachable!()
                };
                kernels.run(SwigluBackward {
                    gate_up: gate_up.reborrow(),
                    dact: ins[0],
                    largest: Some(largest.reborrow()),
                })
            },
        },
        Signature {
            operation: "gelu",
            outs: vec![real("act", &[4, 6]), largest()],
            ins: vec![real("x", &[4, 6])],
            call: |kernels, outs, ins| {
                let [act, largest] = outs else { unreachable!() };
                kernels.run(Gelu {
                    act: act.reborrow(),
                    x: ins[0],
                    largest: Some(largest.reborrow()),
                })
            },
        },
        Signature {
            operation: "gelu_backward",
            outs: vec![real("x", &[4, 6]), largest()],
            ins: vec![real("dact", &[4, 6])],
            call: |kernels, outs, ins| {
                let [x, largest] = outs else { unreachable!() };
                kernels.run(GeluBackward {
                    x: x.reborrow(),
                    dact: ins[0],
                    largest: Some(largest.reborrow()),
                })
            },
        },
        Signature {
            operation: "cross_entropy",
            outs: vec![
                float("losses", &[4]),
                real("logits", &[4, 6]).free_dim(1).free_type(),
            ],
            ins: vec![ids("targets"), float("scale", &[1])],
            call: |kernels, outs, ins| {
                let [losses, logits] = outs else {
                    unreachable!()
                };
                kernels.run(CrossEntropy {
                    losses: losses.reborrow(),
                    logits: logits.reborrow(),
                    targets: ins[0],
                    scale: Some(ins[1]),
                })
            },
        },
    ]
}

/// The call of its signature, with what dx, dweight and dbias are added to.
pub fn layer_norm_backward(
    kernels: &Kernels,
    outs: &mut [Out],
    ins: &[In],
    [dx_init, dweight_init, dbias_init]: [Init; 3],
) -> Result<(), KernelError> {
    let [dx, dweight, dbias] = outs else {
        unreachable!()
    };
    kernels.run(LayerNormBackward {
        dx: dx.reborrow(),
        dx_init,
        dweight: dweight.reborrow(),
        dweight_init,
        dbias: dbias.reborrow(),
        dbias_init,
        dy: ins[0],
        x: ins[1],
        weight: ins[2],
        mean: ins[3],
        rstd: ins[4],
    })
}

/// The call of its signature, for keys of some columns and tokens at some places.
pub fn split_qkv(
    kernels: &Kernels,
    outs: &mut [Out],
    ins: &[In],
    kv_widths: [usize; 2],
    positions: Positions,
) -> Result<(), KernelError> {
    let [q, k, v] = outs else { unreachable!() };
    kernels.run(SplitQkv {
        q: Some(q.reborrow()),
        k: Some(k.reborrow()),
        v: Some(v.reborrow()),
        qkv: ins[0],
        kv_widths,
        turn: Some(Turn {
            table: ins[1],
            positions,
        }),
    })
}
