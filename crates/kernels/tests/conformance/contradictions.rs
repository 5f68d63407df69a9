//! Calls whose tensors fit one by one and not together are refused as well.

use crate::DTYPES;
use crate::host::Host;
use crate::refusals::{devices, refused};
use crate::signatures::{Call, Signature, attention_shape, signatures};
use kernels::{AdamW, AttentionShape, Init};
use memory::DType;

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
fn only_matmul_adds_to_another_tensor() {
    let calls: [(&str, Call); 5] = [
        ("sum", |kernels, outs, ins| {
            kernels.sum(outs[0].reborrow(), ins[0], Init::Add(ins[0].rows(0..1)))
        }),
        ("bias_backward", |kernels, outs, ins| {
            let residual = ins[0].rows(0..1).reshape([6]);
            kernels.bias_backward(outs[0].reborrow(), ins[0], Init::Add(residual))
        }),
        ("embedding_backward", |kernels, outs, ins| {
            kernels.embedding_backward(outs[0].reborrow(), ins[0], ins[1], Init::Add(ins[0]))
        }),
        ("rms_norm_backward", |kernels, outs, ins| {
            let [dx, dweight] = outs else { unreachable!() };
            let (dx, dweight, add) = (dx.reborrow(), dweight.reborrow(), Init::Add(ins[0]));
            kernels.rms_norm_backward(
                dx,
                add,
                dweight,
                Init::Overwrite,
                ins[0],
                ins[1],
                ins[2],
                ins[3],
            )
        }),
        ("rms_norm_backward", |kernels, outs, ins| {
            let [dx, dweight] = outs else { unreachable!() };
            let (dx, dweight, add) = (dx.reborrow(), dweight.reborrow(), Init::Add(ins[2]));
            kernels.rms_norm_backward(
                dx,
                Init::Overwrite,
                dweight,
                add,
                ins[0],
                ins[1],
                ins[2],
                ins[3],
            )
        }),
    ];
    for device in devices(DType::F32) {
        for (operation, call) in calls {
            let signature = otherwise(signatures(DType::F32, &device), operation, call);
            refused(&device, &signature, None, "Init::Add");
        }
    }
}

#[test]
fn attention_shapes_that_contradict_the_tensors_are_refused() {
    let change: [fn(&mut AttentionShape); 7] = [
        |shape| shape.batch = 1,
        |shape| shape.seq = 4,
        |shape| shape.heads = 2,
        |shape| shape.kv_heads = 3,
        |shape| shape.kv_heads = 0,
        |shape| shape.kv_heads = 1,
        |shape| shape.head_dim = 5,
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
            let called = device.kernels.attention(
                Some(out.view_mut()),
                None,
                scratch.view_mut(),
                q,
                k,
                v,
                shape,
            );
            assert_eq!(
                called.expect_err(&format!("{shape:?}")).operation,
                "attention"
            );
            assert!(device.memory.is_shapes() || device.take(&out) == before);
        }
    }
}

#[test]
fn a_master_belongs_to_bf16_weights_alone() {
    for dtype in DTYPES {
        for device in devices(dtype) {
            let states = [(); 3].map(|()| device.put(&Host::random(DType::F32, [7], 1.0, 1)));
            let [mut first, mut second, mut master] = states;
            let before = Host::random(dtype, [7], 1.0, 2);
            let mut parameters = device.put(&before);
            let [gradients, rates, clip] =
                [7, 3, 2].map(|n| device.put(&Host::new(DType::F32, [n], vec![1.0; n])));
            let called = device.kernels.adamw(AdamW {
                parameters: parameters.view_mut(),
                master: (dtype == DType::F32).then(|| master.view_mut()),
                first_moment: first.view_mut(),
                second_moment: second.view_mut(),
                gradients: gradients.view(),
                rates: rates.view(),
                clip: clip.view(),
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.0,
            });
            assert_eq!(called.unwrap_err().operation, "adamw");
            assert!(device.memory.is_shapes() || device.take(&parameters) == before);
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
