//! Calls whose tensors fit one by one and not together are refused as well.

use crate::DTYPES;
use crate::device::Device;
use crate::dropout::Dropped;
use crate::host::Host;
use crate::refusals::{devices, refused};
use crate::signatures::{
    Call, ROUTING, Signature, argument, attention_shape, layer_norm_backward, signatures, split_qkv,
};
use kernels::quantise::BLOCK;
use kernels::{
    AdamW, AddPositions, AddPositionsBackward, Attention, AttentionBackward, AttentionShape,
    BalanceLoss, BiasBackward, BiasDropoutAdd, DropoutBackward, EmbeddingBackward, ExpandKeys,
    ExpertRows, FlashAttention, FlashOptions, GroupByExpert, GroupedGradient, Init, KernelError,
    Kernels, LayerNorm, MasterOperand, MomentOperand, Positions, RmsNorm, RmsNormBackward, Rotary,
    Route, RouterGroups, RouterZLoss, Routing, Sum, SumInOrder,
};
use memory::{DType, Dims, In, Out};

/// The signature of an operation, called otherwise.
fn otherwise(signatures: Vec<Signature>, operation: &str, call: Call) -> Signature {
    let found = signatures
        .into_iter()
        .find(|signature| signature.operation == operation);
    Signature {
        call,
        ..found.unwrap()
    }
}

#[test]
fn only_matmul_and_sum_rows_add_to_another_tensor() {
    let calls: [(&str, Call); 12] = [
        ("sum", |kernels, outs, ins| {
            kernels.run(Sum {
                out: outs[0].reborrow(),
                x: ins[0],
                init: Init::Add(ins[0].rows(0..1)),
            })
        }),
        ("sum_in_order", |kernels, outs, ins| {
            kernels.run(SumInOrder {
                out: outs[0].reborrow(),
                x: ins[0],
                init: Init::Add(ins[0].rows(0..1).reshape([6])),
            })
        }),
        ("bias_backward", |kernels, outs, ins| {
            let residual = ins[0].rows(0..1).reshape([6]);
            kernels.run(BiasBackward {
                out: outs[0].reborrow(),
                dy: ins[0],
                init: Init::Add(residual),
            })
        }),
        ("embedding_backward", |kernels, outs, ins| {
            kernels.run(EmbeddingBackward {
                dtable: outs[0].reborrow(),
                dout: ins[0],
                ids: ins[1],
                init: Init::Add(ins[0]),
            })
        }),
        ("add_positions_backward", |kernels, outs, ins| {
            kernels.run(AddPositionsBackward {
                dtable: outs[0].reborrow(),
                dx: ins[0],
                positions: Positions::Sequences(5),
                init: Init::Add(ins[0].rows(0..7)),
            })
        }),
        ("grouped_gradient", |kernels, outs, ins| {
            let [out, scratch] = outs else { unreachable!() };
            kernels.run(GroupedGradient {
                out: out.reborrow(),
                scratch: scratch.reborrow(),
                dy: ExpertRows::in_order(ins[0]),
                rows: ExpertRows::in_order(ins[1]),
                offsets: ins[2],
                init: Init::Add(ins[0]),
            })
        }),
        ("layer_norm_backward", |kernels, outs, ins| {
            let inits = [Init::Add(ins[0]), Init::Overwrite, Init::Overwrite];
            layer_norm_backward(kernels, outs, ins, inits)
        }),
        ("layer_norm_backward", |kernels, outs, ins| {
            let inits = [Init::Overwrite, Init::Add(ins[2]), Init::Overwrite];
            layer_norm_backward(kernels, outs, ins, inits)
        }),
        ("layer_norm_backward", |kernels, outs, ins| {
            let inits = [Init::Overwrite, Init::Overwrite, Init::Add(ins[2])];
            layer_norm_backward(kernels, outs, ins, inits)
        }),
        ("balance_loss", |kernels, outs, ins| {
            let [loss, gradient] = outs else {
                unreachable!()
            };
            kernels.run(BalanceLoss {
                loss: loss.reborrow(),
                gradient: gradient.reborrow(),
                counts: ins[0],
                sums: ins[1],
                lengths: None,
                pooled: 2,
                factor: 1.0,
                init: Init::Add(ins[0]),
            })
        }),
        ("rms_norm_backward", |kernels, outs, ins| {
            let [dx, dweight] = outs else { unreachable!() };
            let (dx, dweight, add) = (dx.reborrow(), dweight.reborrow(), Init::Add(ins[0]));
            kernels.run(RmsNormBackward {
                dx,
                dx_init: add,
                dweight,
                dweight_init: Init::Overwrite,
                dy: ins[0],
                x: ins[1],
                weight: ins[2],
                rstd: ins[3],
            })
        }),
        ("rms_norm_backward", |kernels, outs, ins| {
            let [dx, dweight] = outs else { unreachable!() };
            let (dx, dweight, add) = (dx.reborrow(), dweight.reborrow(), Init::Add(ins[2]));
            kernels.run(RmsNormBackward {
                dx,
                dx_init: Init::Overwrite,
                dweight,
                dweight_init: add,
                dy: ins[0],
                x: ins[1],
                weight: ins[2],
                rstd: ins[3],
            })
        }),
    ];
    for device in devices(DType::F32) {
        for (operation, call) in calls {
            let signature = otherwise(signatures(DType::F32, &device), operation, call);
            refused(&device, &signature, None, "Init::Add");
        }
    }
}

/// There is nothing whose largest magnitude could be found.
#[test]
fn a_largest_magnitude_of_an_output_that_is_left_out_is_refused() {
    let calls: [(&str, Call); 2] = [
        ("rms_norm", |kernels, outs, ins| {
            kernels.run(RmsNorm {
                y: None,
                rstd: None,
                largest: Some(outs[2].reborrow()),
                x: ins[0],
                weight: ins[1],
                eps: 1e-5,
            })
        }),
        ("layer_norm", |kernels, outs, ins| {
            kernels.run(LayerNorm {
                y: None,
                mean: None,
                rstd: None,
                largest: Some(outs[3].reborrow()),
                x: ins[0],
                weight: ins[1],
                bias: ins[2],
                eps: 1e-5,
            })
        }),
    ];
    for device in devices(DType::F32) {
        for (operation, call) in calls {
            let signature = otherwise(signatures(DType::F32, &device), operation, call);
            refused(&device, &signature, None, "no `y`");
        }
    }
}

#[test]
fn keys_of_other_widths_leave_no_queries_or_break_heads() {
    let calls: [(Call, &str); 2] = [
        (
            |kernels, outs, ins| split_qkv(kernels, outs, ins, [20, 20], Positions::Sequences(5)),
            "leave none of 40 to queries",
        ),
        (
            |kernels, outs, ins| split_qkv(kernels, outs, ins, [8, 8], Positions::Sequences(3)),
            "whole sequences of 3",
        ),
    ];
    for device in devices(DType::F32) {
        for (call, mistake) in calls {
            let signature = otherwise(signatures(DType::F32, &device), "split_qkv", call);
            refused(&device, &signature, None, mistake);
        }
    }
}

/// Each of these routings contradicts a router of six experts.
#[test]
fn routings_that_contradict_the_experts_are_refused() {
    let groups = |count, chosen, best| {
        let groups = RouterGroups {
            count,
            chosen,
            best,
        };
        (2, Some(groups))
    };
    let refused = [
        ((0, None), "0 of 6 experts"),
        ((7, None), "7 of 6 experts"),
        (groups(0, 1, 1), "not 0 equal groups"),
        (groups(4, 1, 1), "not 4 equal groups"),
        (groups(2, 0, 1), "0 of 2 groups"),
        (groups(2, 3, 1), "3 of 2 groups"),
        (groups(2, 1, 0), "no 0 best"),
        (groups(2, 1, 3), "no 3 best"),
        (groups(6, 3, 2), "no 2 best"),
        (groups(6, 1, 1), "2 of 1 experts"),
    ];
    for device in devices(DType::F32) {
        let logits = device.put(&Host::random(DType::F32, [10, 6], 1.0, 1));
        let before = Host::random(DType::F32, [10, 6], 1.0, 2);
        let mut scores = device.put(&before);
        for ((choices, groups), message) in refused {
            let error = device.kernels.run(Route {
                ids: None,
                weights: None,
                scores: Some(scores.view_mut()),
                logits: logits.view(),
                bias: None,
                lengths: None,
                routing: Routing {
                    choices,
                    groups,
                    ..ROUTING
                },
            });
            let error = error.expect_err(message);
            assert_eq!(error.operation, "route");
            assert!(error.message.contains(message), "{message}: {error}");
        }
        assert!(device.memory.is_shapes() || device.take(&scores) == before);
    }
}

#[test]
fn more_experts_than_a_warp_has_room_for_are_refused() {
    for device in devices(DType::F32) {
        let logits = device.put(&Host::random(DType::F32, [2, 513], 1.0, 1));
        let mut losses = device.room(DType::F32, [2]);
        let called = device.kernels.run(RouterZLoss {
            losses: losses.view_mut(),
            logits: logits.view(),
            lengths: None,
            factor: 1.0,
        });
        let error = called.expect_err("513 experts");
        assert!(error.message.contains("at most 512 experts"), "{error}");
        let ids = device.put(&Host::random_ids(4, 513, 1));
        let mut offsets = device.room(DType::I32, [514]);
        let called = device.kernels.run(GroupByExpert {
            offsets: Some(offsets.view_mut()),
            row_token: None,
            row_slot: None,
            slot_row: None,
            ids: ids.view().reshape([2, 2]),
            experts: 513,
        });
        let error = called.expect_err("513 experts");
        assert!(error.message.contains("at most 512 experts"), "{error}");
    }
}

#[test]
fn balance_of_broken_groups_is_refused() {
    let calls: [(Call, &str); 2] = [
        (
            |kernels, outs, ins| pooling(kernels, outs, ins, 0),
            "no rows",
        ),
        (
            |kernels, outs, ins| pooling(kernels, outs, ins, 3),
            "three of four rows",
        ),
    ];
    for device in devices(DType::F32) {
        for (call, mistake) in calls {
            let signature = otherwise(signatures(DType::F32, &device), "balance_loss", call);
            refused(&device, &signature, None, mistake);
        }
    }
}

fn pooling(
    kernels: &Kernels,
    outs: &mut [Out],
    ins: &[In],
    pooled: usize,
) -> Result<(), KernelError> {
    let [loss, gradient] = outs else {
        unreachable!("two outputs")
    };
    kernels.run(BalanceLoss {
        loss: loss.reborrow(),
        gradient: gradient.reborrow(),
        counts: ins[0],
        sums: ins[1],
        lengths: None,
        pooled,
        factor: 1.0,
        init: Init::Overwrite,
    })
}

/// Heads of keys and values that `kv` does not make, and none at all.
#[test]
fn keys_and_values_of_other_heads_are_refused() {
    let calls: [(Call, &str); 4] = [
        (
            |kernels, outs, ins| expanded(kernels, outs, ins, ([true; 2], 0)),
            "no heads",
        ),
        (
            |kernels, outs, ins| expanded(kernels, outs, ins, ([true; 2], 7)),
            "seven heads",
        ),
        (
            |kernels, outs, ins| expanded(kernels, outs, ins, ([true; 2], 1)),
            "one head",
        ),
        (
            |kernels, outs, ins| expanded(kernels, outs, ins, ([false; 2], 2)),
            "no output",
        ),
    ];
    for device in devices(DType::F32) {
        for (call, mistake) in calls {
            let signature = otherwise(signatures(DType::F32, &device), "expand_keys", call);
            refused(&device, &signature, None, mistake);
        }
    }
}

fn expanded(
    kernels: &Kernels,
    outs: &mut [Out],
    ins: &[In],
    ([has_k, has_v], heads): ([bool; 2], usize),
) -> Result<(), KernelError> {
    let [k, v] = outs else {
        unreachable!("two outputs")
    };
    kernels.run(ExpandKeys {
        k: has_k.then(|| k.reborrow()),
        v: has_v.then(|| v.reborrow()),
        kv: ins[0],
        k_rotary: ins[1],
        heads,
    })
}

#[test]
fn attention_shapes_that_contradict_the_tensors_are_refused() {
    let change: [fn(&mut AttentionShape); 8] = [
        |shape| shape.batch = 1,
        |shape| shape.seq = 4,
        |shape| shape.heads = 2,
        |shape| shape.kv_heads = 3,
        |shape| shape.kv_heads = 0,
        |shape| shape.kv_heads = 1,
        |shape| shape.qk_head_dim = 5,
        |shape| shape.v_head_dim = 5,
    ];
    for device in devices(DType::F32) {
        for change in change {
            let mut shape = attention_shape();
            change(&mut shape);
            let tensor = |dims: [usize; 2]| device.put(&Host::random(DType::F32, dims, 1.0, 1));
            let (q, k, v) = (tensor([10, 24]), tensor([10, 12]), tensor([10, 12]));
            let before = Host::random(DType::F32, [10, 24], 1.0, 2);
            let (mut out, mut scratch) = (device.put(&before), device.room(DType::F32, [1000]));
            let (q, k, v) = (q.view(), k.view(), v.view());
            let called = device.kernels.run(Attention {
                out: Some(out.view_mut()),
                probs: None,
                scratch: scratch.view_mut(),
                q,
                k,
                v,
                shape,
                dropout: None,
            });
            assert_eq!(
                called.expect_err(&format!("{shape:?}")).operation,
                "attention"
            );
            let called = device.kernels.run(FlashAttention {
                out: Some(out.view_mut()),
                lse: None,
                scratch: scratch.view_mut(),
                q,
                k,
                v,
                shape,
                options: FlashOptions::default(),
            });
            assert_eq!(
                called.expect_err(&format!("{shape:?}")).operation,
                "flash_attention"
            );
            assert!(device.memory.is_shapes() || device.take(&out) == before);
        }
    }
}

#[test]
fn a_dropout_of_all_or_of_no_probability_is_refused() {
    for device in devices(DType::F32) {
        let random = |dims: &[usize]| {
            let dims = Dims::try_from(dims).unwrap();
            device.put(&Host::random(DType::F32, dims, 1.0, 1))
        };
        let shape = attention_shape();
        let (q, kv, probs) = (random(&[10, 24]), random(&[10, 12]), random(&shape.probs()));
        let (q, kv, probs) = (q.view(), kv.view(), probs.view());
        let [mut out, mut dk, mut dv] = [24, 12, 12].map(|width| random(&[10, width]));
        let mut scratch = device.room(DType::F32, [1]);
        let before = device.take(&out);
        for probability in [1.0, -0.1, f32::NAN, f32::INFINITY] {
            let placed = Dropped::put(
                Some(Dropped {
                    probability,
                    key: 1,
                }),
                &device,
            );
            let dropout = placed.view().expect("something is dropped");
            let called = [
                device.kernels.run(FlashAttention {
                    out: Some(out.view_mut()),
                    lse: None,
                    scratch: scratch.view_mut(),
                    q,
                    k: kv,
                    v: kv,
                    shape,
                    options: FlashOptions {
                        dropout: Some(dropout),
                        ..FlashOptions::default()
                    },
                }),
                device.kernels.run(Attention {
                    out: Some(out.view_mut()),
                    probs: None,
                    scratch: scratch.view_mut(),
                    q,
                    k: kv,
                    v: kv,
                    shape,
                    dropout: Some(dropout),
                }),
                device.kernels.run(AttentionBackward {
                    dq: out.view_mut(),
                    dk: dk.view_mut(),
                    dv: dv.view_mut(),
                    scratch: scratch.view_mut(),
                    dout: q,
                    probs,
                    q,
                    k: kv,
                    v: kv,
                    shape,
                    dropout: Some(dropout),
                }),
                device.kernels.run(BiasDropoutAdd {
                    out: out.view_mut(),
                    bias: None,
                    dropout: Some(dropout),
                    first: 0,
                    residual: None,
                }),
                device.kernels.run(DropoutBackward {
                    dx: out.view_mut(),
                    dy: q,
                    dropout,
                    first: 0,
                }),
            ];
            for called in called {
                let error = called.expect_err(&format!("{probability}"));
                assert!(error.message.starts_with("dropout of "), "{error}");
            }
            assert!(device.take(&out) == before);
        }
    }
}

#[test]
fn positions_of_broken_sequences_or_beyond_the_table_are_refused() {
    for device in devices(DType::F32) {
        let random = |rows| device.put(&Host::random(DType::F32, [rows, 6], 1.0, 1));
        let (mut x, mut table) = (random(10), random(7));
        let before = [&x, &table].map(|tensor| device.take(tensor));
        for seq in [0, 3, 10] {
            let called = device.kernels.run(AddPositions {
                x: x.view_mut(),
                table: table.view(),
                positions: Positions::Sequences(seq),
            });
            let error = called.expect_err(&format!("{seq}"));
            assert_eq!(error.operation, "add_positions");
            let called = device.kernels.run(AddPositionsBackward {
                dtable: table.view_mut(),
                dx: x.view(),
                positions: Positions::Sequences(seq),
                init: Init::Overwrite,
            });
            let error = called.expect_err(&format!("{seq}"));
            assert_eq!(error.operation, "add_positions_backward");
            let angles = device.put(&Host::random(DType::F32, [2, 7, 3], 1.0, 1));
            let called = device.kernels.run(Rotary {
                x: x.view_mut(),
                table: angles.view(),
                positions: Positions::Sequences(seq),
                inverse: false,
            });
            let error = called.expect_err(&format!("{seq}"));
            assert_eq!(error.operation, "rotary");
        }
        assert!([&x, &table].map(|tensor| device.take(tensor)) == before);
    }
}

/// An update of seven weights with everything as it should be, but for what `edit` does to it.
fn refused_update(
    device: &Device,
    weights: DType,
    master: Option<DType>,
    edit: impl Fn(&mut AdamW),
    word: &str,
) {
    let random = |dtype, n: usize| Host::random(dtype, [n], 1.0, 1);
    let before = random(weights, 7);
    let mut parameters = device.put(&before);
    let [mut first, mut second] = [(); 2].map(|()| device.put(&random(DType::F32, 7)));
    let mut beside = device.put(&random(master.unwrap_or(DType::F32), 7));
    let [gradients, rates, clip] =
        [7, 3, 2].map(|n| device.put(&Host::new(DType::F32, [n], vec![1.0; n])));
    let key = device.put(&Host::new(DType::U32, [2], [1.0; 2]));
    let mut update = AdamW {
        parameters: parameters.view_mut(),
        master: match master {
            None => MasterOperand::Parameters,
            Some(DType::F32) => MasterOperand::F32(beside.view_mut()),
            Some(_) => MasterOperand::Remainder(beside.view_mut()),
        },
        first_moment: MomentOperand::Plain(first.view_mut()),
        second_moment: MomentOperand::Plain(second.view_mut()),
        gradients: gradients.view(),
        rates: rates.view(),
        clip: clip.view(),
        key: key.view(),
        first_index: 0,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
    };
    edit(&mut update);
    let error = device.kernels.run(update).unwrap_err();
    assert_eq!(error.operation, "adamw");
    assert!(error.message.contains(word), "{word}: {error}");
    assert!(device.memory.is_shapes() || device.take(&parameters) == before);
}

#[test]
fn a_master_belongs_to_bf16_weights_alone() {
    for device in devices(DType::F32) {
        for master in [DType::F32, DType::I16] {
            refused_update(
                &device,
                DType::F32,
                Some(master),
                |_| {},
                "their own master",
            );
        }
    }
}

#[test]
fn both_moments_have_one_form() {
    let call: Call = |kernels, outs, ins| {
        let [parameters, _, plain, codes, absmax] = outs else {
            unreachable!("as below");
        };
        kernels.run(AdamW {
            parameters: parameters.reborrow(),
            master: MasterOperand::Parameters,
            first_moment: MomentOperand::Quantised {
                codes: codes.reborrow(),
                absmax: absmax.reborrow(),
            },
            second_moment: MomentOperand::Plain(plain.reborrow()),
            gradients: ins[0],
            rates: ins[1],
            clip: ins[2],
            key: ins[3],
            first_index: 0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
        })
    };
    for device in devices(DType::F32) {
        let all = signatures(DType::F32, &device);
        let mut signature = otherwise(all, "adamw", call);
        let elements = signature.outs[0].dims[0];
        signature.outs.extend([
            argument("codes", DType::U8, &[elements]),
            argument("absmax", DType::F32, &[elements.div_ceil(BLOCK)]),
        ]);
        refused(&device, &signature, None, "moments of two forms");
    }
}

/// Blocks of 256 and random numbers count from the range's first element.
#[test]
fn a_range_starts_at_a_block() {
    for device in devices(DType::BF16) {
        for first_index in [1, 255, 257] {
            let edit = |update: &mut AdamW| update.first_index = first_index;
            refused_update(&device, DType::BF16, None, edit, "`first_index`");
        }
    }
}

#[test]
fn transfers_of_another_size_or_of_strided_tensors_are_refused() {
    for dtype in DTYPES {
        for device in devices(dtype) {
            let before = Host::random(dtype, [4, 6], 1.0, 1);
            let mut tensor = device.put(&before);
            for bytes in [0, before.bytes.len() - 1, before.bytes.len() + 1] {
                let error = device
                    .kernels
                    .upload(tensor.view_mut(), &vec![0; bytes])
                    .unwrap_err();
                assert_eq!(error.operation, "upload");
                let mut host = vec![7; bytes];
                assert_eq!(
                    device
                        .kernels
                        .download(&mut host, tensor.view())
                        .unwrap_err()
                        .operation,
                    "download"
                );
                assert!(host.iter().all(|byte| *byte == 7));
            }
            let mut host = vec![7; before.bytes.len()];
            assert_eq!(
                device
                    .kernels
                    .download(&mut host, tensor.view().t())
                    .unwrap_err()
                    .operation,
                "download"
            );
            assert!(device.memory.is_shapes() || device.take(&tensor) == before);
        }
    }
}
