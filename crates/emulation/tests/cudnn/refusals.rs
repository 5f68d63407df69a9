//! Calls that the library refuses, and its messages.

use crate::graphs::*;
use crate::library::{Descriptor, Value, load_cudnn_alone, names::*};
use crate::run::{Attention, pack_of};
use std::process::Command;

const SHAPE: Shape = Shape {
    batch: 1,
    heads: 2,
    kv_heads: 1,
    seq: 9,
    head_dim: 16,
};

#[track_caller]
fn refused<T>(result: Result<T, String>, status: i32, part: &str) {
    let Err(message) = result else {
        panic!("the mistake is not refused: {part}");
    };
    assert!(
        message.starts_with(&status.to_string()) && message.contains(part),
        "not {status} with `{part}`: {message}"
    );
}

/// Runs a test of this file in a process with another environment; true in that process.
fn is_run_with(test: &str, name: &str, value: &str) -> bool {
    if std::env::var(name).is_ok_and(|set| set == value) {
        return true;
    }
    let ended = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("refusals::{test}")])
        .env(name, value)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(
        ended.status.success() && said.contains("1 passed"),
        "{said}"
    );
    false
}

#[test]
fn attributes_that_are_wrong() {
    refused(Descriptor::new(1), 3000, "kind 1 are not known");
    let tensor = Descriptor::new(TENSOR).unwrap();
    refused(
        tensor.set(902, Value::Real(1.0)),
        2010,
        "attribute 902 of a TENSOR has type 3, not 4",
    );
    refused(
        tensor.set(906, Value::Numbers(&[1, 2])),
        2000,
        "has from 1 to 1 elements, not 2",
    );
    refused(
        tensor.set(902, Value::Numbers(&[1; 9])),
        2000,
        "has from 1 to 8 elements, not 9",
    );
    refused(
        tensor.set(1500, Value::Choice(DATA_TYPE, F32)),
        3000,
        "attribute 1500 is not one of a TENSOR",
    );
    refused(tensor.finalize(), 2000, "a TENSOR lacks its attribute 901");
    refused(tensor.number(902), 2004, "not finalized");
    let plan = Descriptor::new(PLAN).unwrap();
    refused(plan.set(402, Value::Numbers(&[0])), 3000, "cannot be set");
}

#[test]
fn descriptors_that_are_not_what_they_must_be() {
    let unfinished = Descriptor::new(TENSOR).unwrap();
    let operation = Descriptor::new(OPERATION_RESHAPE).unwrap();
    refused(
        operation.set(2200, Value::Descriptors(&[&unfinished])),
        2004,
        "names a TENSOR that is not finalized",
    );
    let whole = SHAPE.q(uid::Q).made().unwrap();
    refused(whole.finalize(), 2000, "finalized twice");
    refused(
        whole.set(906, Value::Numbers(&[2])),
        2000,
        "of a TENSOR that is finalized",
    );
    refused(whole.number(402), 3000, "a TENSOR has no attribute 402");
    let graph = Descriptor::new(ENGINE).unwrap();
    refused(
        graph.set(1300, Value::Descriptors(&[&whole])),
        2012,
        "names a TENSOR",
    );
    refused(
        finalized(OPERATION_GRAPH, &[(801, Value::Descriptors(&[&whole]))]),
        2012,
        "a TENSOR is no operation",
    );
    whole.destroy().unwrap();
    refused(
        operation.set(2200, Value::Descriptors(&[&whole])),
        2000,
        "does not exist",
    );
}

#[test]
fn tensors_that_cannot_be() {
    let good = SHAPE.q(uid::Q);
    refused(
        Tensor {
            strides: vec![1],
            ..good.clone()
        }
        .made(),
        2000,
        "4 dimensions and 1 strides",
    );
    let strides = vec![288, 16, 16, 1];
    refused(
        Tensor {
            strides,
            ..good.clone()
        }
        .made(),
        2000,
        "lie at the same place by strides 288x16x16x1",
    );
    refused(good.clone().of_kind(F16).made(), 3003, "has type 2");
    refused(good.clone().of_kind(I32).made(), 3003, "has type 4");
    refused(
        Tensor {
            dims: vec![1, 0, 9, 16],
            ..good.clone()
        }
        .made(),
        2000,
        "has dimensions 1x0x9x16",
    );
    refused(
        Tensor {
            is_by_value: true,
            ..good
        }
        .made(),
        2000,
        "and not one number",
    );
}

#[test]
fn operations_whose_shapes_do_not_fit() {
    let (q, keys) = (SHAPE.q(uid::Q), SHAPE.kv(0).transposed(uid::K));
    refused(
        matmul(&q, &SHAPE.kv(uid::K), &SHAPE.scores(100)),
        2008,
        "1x2x9x16 times 1x1x9x16 is not 1x2x9x9",
    );
    let three = Tensor::packed(5, &[1, 3, 9, 9]);
    refused(matmul(&q, &keys, &three), 2008, "is not 1x3x9x9");
    refused(
        pointwise(ADD, &[&SHAPE.scores(1), &q], &SHAPE.scores(2)),
        2008,
        "1x2x9x16 does not spread to 1x2x9x9",
    );
    refused(
        pointwise(ADD, &[&SHAPE.scores(1)], &SHAPE.scores(2)),
        2000,
        "another number of operands",
    );
    refused(
        pointwise(EXP, &[&SHAPE.scores(1), &q], &SHAPE.scores(2)),
        2000,
        "another number of operands",
    );
    refused(
        pointwise(207, &[&SHAPE.scores(1), &q], &SHAPE.scores(2)),
        3000,
        "mode 207",
    );
    refused(
        index(4, &SHAPE.scores(1), &SHAPE.scores(2)),
        2000,
        "along no axis of 1x2x9x9",
    );
    refused(
        reduction(&q, &three),
        2008,
        "1x2x9x16 does not reduce to 1x3x9x9",
    );
    refused(
        reduction_by(1, &q, &SHAPE.row_numbers(5)),
        3000,
        "of kind 1",
    );
    refused(
        reshape(&q, &SHAPE.scores(5)),
        2008,
        "has not the places of 1x2x9x16 by 288x16x32x1",
    );
    refused(
        band_mask(&q, &SHAPE.scores(5)),
        2008,
        "a mask makes 1x2x9x9 of 1x2x9x16",
    );
    refused(
        attention(SHAPE, Tensor::packed(uid::Q, &[1, 2, 9, 8])),
        2008,
        "attention of q 1x2x9x8, k 1x1x9x16",
    );
}

#[test]
fn graphs_that_do_not_hang_together() {
    let scores = |uid| SHAPE.scores(uid);
    let add = |x, b, y| pointwise(ADD, &[&scores(x), &scores(b)], &scores(y)).unwrap();
    refused(
        graph(&[add(1, 2, 3), add(4, 5, 3)]),
        2000,
        "tensor 3 is written twice",
    );
    refused(
        graph(&[add(1, 2, 3), add(3, 4, 2)]),
        2000,
        "2 operations wait for each other",
    );
    let other = pointwise(ADD, &[&SHAPE.q(1), &SHAPE.q(4)], &SHAPE.q(5)).unwrap();
    refused(
        graph(&[add(1, 2, 3), other]),
        2009,
        "two tensors have the number 1: 1x2x9x9 and 1x2x9x16",
    );
    let (device, unwritten) = (described(H100).unwrap(), graph(&[add(1, 2, 3)]).unwrap());
    refused(
        heuristic(&unwritten, Some(&device)),
        2000,
        "is virtual, and nothing writes it",
    );
    let copy = graph(&[pointwise(IDENTITY, &[&SHAPE.q(1)], &SHAPE.q(2)).unwrap()]).unwrap();
    refused(
        heuristic(&copy, Some(&device)),
        3001,
        "1 operations with 0 products are neither",
    );
}

#[test]
fn devices_that_are_not_described() {
    refused(described("{}"), 2000, "no object");
    refused(
        described(&H100.replace("\"warpSize\": 32, ", "")),
        2000,
        "lacks warpSize",
    );
    let graph = forward(SHAPE).unwrap();
    let ampere = described(&H100.replace("900", "800")).unwrap();
    refused(heuristic(&graph, Some(&ampere)), 3007, "not 8.0");
    // No thread of this test has made a context current.
    refused(
        heuristic(&graph, None),
        1001,
        "no context of a device is current",
    );
}

#[test]
fn shapes_and_layouts_that_no_engine_takes() {
    let device = described(H100).unwrap();
    let plan = |shape| heuristic(&forward(shape).unwrap(), Some(&device));
    refused(
        plan(Shape {
            head_dim: 100,
            ..SHAPE
        }),
        3002,
        "heads of 100",
    );
    refused(
        plan(Shape {
            head_dim: 264,
            ..SHAPE
        }),
        3002,
        "heads of 264",
    );
    let one = Shape { seq: 1, ..SHAPE };
    let graph = backward(one, false).unwrap();
    refused(
        chosen(&graph, 6, ORDERED, Some(&device)),
        3002,
        "of one query",
    );
    let mut q = SHAPE.q(uid::Q);
    q.strides[1] = 20;
    q.strides[2] = 44;
    q.strides[0] = 400;
    let loose = crate::graphs::graph(&[attention(SHAPE, q).unwrap()]).unwrap();
    refused(
        heuristic(&loose, Some(&device)),
        3004,
        "strides 400x20x44x1",
    );
}

#[test]
fn engines_and_knobs_that_are_not_the_ordered_ones() {
    let device = described(H100).unwrap();
    let (graph, direct) = (
        backward(SHAPE, false).unwrap(),
        backward(SHAPE, true).unwrap(),
    );
    refused(
        chosen(&graph, 9, ORDERED, Some(&device)),
        3000,
        "engine 9 does not take this graph",
    );
    let without = &ORDERED[..5];
    assert!(chosen(&graph, 6, without, Some(&device)).is_ok());
    for knob in 0..ORDERED.len() {
        let mut knobs = ORDERED.to_vec();
        knobs[knob].1 += 1;
        refused(
            chosen(&graph, 6, &knobs, Some(&device)),
            3000,
            "engine 6 has no knobs",
        );
    }
    let twice: Vec<(i32, i64)> = ORDERED.iter().chain(&ORDERED[..1]).copied().collect();
    refused(
        chosen(&graph, 6, &twice, Some(&device)),
        2009,
        "knob 40 is there twice",
    );
    // The ordered engine adds up in memory.
    refused(
        chosen(&direct, 6, ORDERED, Some(&device)),
        3000,
        "engine 6 has no knobs",
    );
    let blackwell = described(&H100.replace("900", "1000")).unwrap();
    refused(
        chosen(&graph, 6, ORDERED, Some(&blackwell)),
        3000,
        "engine 6 does not take this graph on capability 10.0",
    );
}

#[test]
fn a_library_that_is_too_old() {
    if !is_run_with(
        "a_library_that_is_too_old",
        "STAND_IN_CUDNN_VERSION",
        "92100",
    ) {
        return;
    }
    let device = described(H100).unwrap();
    let graph = backward(SHAPE, false).unwrap();
    assert!(heuristic(&graph, Some(&device)).is_ok());
    refused(
        chosen(&graph, 6, ORDERED, Some(&device)),
        3000,
        "has no knobs 40=2 41=1 24=2 38=0 27=0 14=4 for this graph in version 92100",
    );
    let reshape = Descriptor::new(OPERATION_RESHAPE).unwrap();
    refused(
        reshape.set(2202, Value::Choice(31, 0)),
        3000,
        "cannot be set in version 92100",
    );
}

#[test]
fn a_library_without_attention() {
    if is_run_with(
        "a_library_without_attention",
        "STAND_IN_CUDNN_VERSION",
        "91200",
    ) {
        refused(
            Descriptor::new(OPERATION_ATTENTION),
            3000,
            "from version 91300 on",
        );
    }
}

#[test]
fn without_cublaslt_the_process_ends() {
    const ALONE: &str = "STAND_IN_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        load_cudnn_alone();
        return;
    }
    let ended = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "refusals::without_cublaslt_the_process_ends",
            "--nocapture",
        ])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        !ended.status.success() && said.contains("there is no cuBLASLt"),
        "{said}"
    );
}

#[test]
fn packs_that_do_not_fit_a_graph() {
    let attention = Attention::new(SHAPE);
    let plan = heuristic(&forward(SHAPE).unwrap(), None).unwrap();
    let all = attention.forward_uids();
    let run = |uids: &[i64]| attention.execute(&plan, uids);
    run(&all).unwrap();
    refused(run(&all[1..]), 2000, "tensor 1 is not in the pack");
    refused(
        run(&[&all[..], &[uid::D_O]].concat()),
        2000,
        "tensor 6, which the graph has not",
    );
    refused(run(&[&all[..], &[uid::Q]].concat()), 2009, "tensor 1 twice");
    let pointers = vec![attention.blocks[&uid::Q].0; 2];
    refused(
        pack_of(&[1], &pointers, pointers[0]),
        2000,
        "1 numbers and 2 addresses",
    );
    refused(
        attention.session.execute(&plan, &plan),
        2012,
        "a EXECUTION_PLAN in the place of",
    );
    let unfinished = Descriptor::new(VARIANT_PACK).unwrap();
    refused(
        attention.session.execute(&plan, &unfinished),
        2004,
        "a VARIANT_PACK that is not finalized",
    );
}

#[test]
fn backward_packs_have_no_virtual_tensors() {
    let mut attention = Attention::new(SHAPE);
    let plan = chosen(&backward(SHAPE, false).unwrap(), 6, ORDERED, None).unwrap();
    let place = attention.blocks[&uid::Q];
    attention.blocks.insert(100, place);
    let uids = [attention.backward_uids(false), vec![100]].concat();
    refused(
        attention.execute(&plan, &uids),
        2000,
        "tensor 100 is virtual, and in the pack",
    );
}

/// Executes the forward pass with one tensor elsewhere.
fn moved(uid: i64, to: impl FnOnce(&Attention) -> usize) -> Result<(), String> {
    let mut attention = Attention::new(SHAPE);
    let plan = heuristic(&forward(SHAPE).unwrap(), None).unwrap();
    let address = to(&attention);
    attention.blocks.get_mut(&uid).unwrap().0 = address as *mut _;
    attention.execute(&plan, &attention.forward_uids())
}

#[test]
fn addresses_that_are_wrong() {
    let place = |attention: &Attention, uid: i64| attention.blocks[&uid].0 as usize;
    refused(moved(uid::Q, |_| 0), 2002, "tensor 1 is at no address");
    refused(
        moved(uid::Q, |all| place(all, uid::Q) + 8),
        2003,
        "not aligned to 16 bytes",
    );
    refused(
        moved(uid::Q, |all| place(all, uid::Q) + 512),
        5000,
        "tensor 1, 576 bytes at",
    );
    let host = vec![0u128; 1024];
    refused(
        moved(uid::Q, |_| host.as_ptr() as usize),
        5000,
        "is not within a live block",
    );
    refused(
        moved(uid::SCALE, |all| place(all, uid::Q)),
        2000,
        "passed by value, and its address is the device's",
    );
    refused(
        moved(uid::O, |all| place(all, uid::Q)),
        2000,
        "tensor 4 and tensor 1 lie in the same memory",
    );
    for offset in [0, 16] {
        refused(
            moved(uid::LSE, |all| place(all, uid::O) + offset),
            2000,
            "lie in the same memory",
        );
    }
}

#[test]
fn workspaces_that_are_wrong() {
    let attention = Attention::new(SHAPE);
    let plan = heuristic(&forward(SHAPE).unwrap(), None).unwrap();
    let uids = attention.forward_uids();
    let run = |place: usize| {
        let pack = attention.pack(&uids, place as *mut _)?;
        attention.session.execute(&plan, &pack)
    };
    refused(run(0), 2002, "the workspace of 256 bytes is at (nil)");
    let place = attention.session.block(512) as usize;
    run(place + 256).unwrap();
    refused(run(place + 264), 2002, "must be aligned to 16");
    refused(run(place + 272), 5000, "the workspace, 256 bytes at");
    refused(
        run(attention.blocks[&uid::Q].0 as usize),
        2000,
        "the workspace and tensor 1 lie in the same memory",
    );
    attention.session.set_stream(std::ptr::null_mut());
    refused(run(place), 5000, "or the stream does not exist");
}

#[test]
fn plans_for_devices_that_are_described_do_not_run() {
    let attention = Attention::new(SHAPE);
    let device = described(H100).unwrap();
    let plan = heuristic(&forward(SHAPE).unwrap(), Some(&device)).unwrap();
    refused(
        attention.execute(&plan, &attention.forward_uids()),
        3000,
        "described, and not there",
    );
}
