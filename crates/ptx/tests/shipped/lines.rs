//! Lines of the CUDA sources, from a second compilation.

use crate::device::{Device, numbers, put, room};
use crate::texts;
use kernels::{OutputForm, RmsNorm};
use memory::DType;
use ptx::{PtxTexts, SourceLines, with_lines};
use std::sync::{Arc, Mutex};

/// So that a line that an error names is that of the instruction that ran.
#[test]
fn line_information_changes_no_instruction() {
    let on_hopper = kernels::cuda::ptx_on_hopper().map(|text| (text, "sm_90"));
    let all = texts().map(|text| (text, "sm_80")).chain(on_hopper);
    let left = Mutex::new(all.collect::<Vec<_>>());
    let next = || left.lock().unwrap().pop();
    let check = || {
        while let Some(((name, text), target)) = next() {
            let lines = SourceLines::new(&text, &with_lines(name, target).unwrap());
            let lines = lines.unwrap_or_else(|error| panic!("{name}.cu: {error}"));
            let last = text.lines().position(|line| line.trim() == "ret;").unwrap();
            let place = lines.of(last as u32 + 1).unwrap();
            assert!(place.contains(".cu"), "{name}.cu: {place}");
        }
    };
    std::thread::scope(|scope| {
        let threads = [(); 2].map(|()| scope.spawn(check));
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_mistake_names_the_line_of_the_source() {
    let device = Device::new(&Arc::new(PtxTexts::of_this_binary()), DType::F32);
    let (x, mut y) = (
        room(&device, DType::F32, [3, 64]),
        room(&device, DType::F32, [3, 64]),
    );
    let weight = put(&device, [64], &numbers(64, 1.0, 1));
    let error = device.kernels.run(RmsNorm {
        y: Some(y.view_mut()),
        rstd: None,
        form: OutputForm::Values,
        x: x.view(),
        weight: weight.view(),
        plus_one: false,
        eps: 1e-5,
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("never written"), "{message}");
    let (_, place) = message.split_once(" of the PTX (pack.cuh:").unwrap();
    let (_, call) = place.split_once("inlined at row.cuh:").expect(place);
    let call: usize = call.split(')').next().unwrap().parse().unwrap();
    let source = include_str!("../../../../kernels/row.cuh");
    let line = source.lines().nth(call - 1).unwrap();
    assert!(
        line.contains("held[i] = hold_if<WIDE>(place(i) < n, x"),
        "{line}"
    );
}
