//! Kernels that are others on Hopper, by the PTX that it runs.

use crate::case::{Cases, judge};
use crate::device::{Device, interpreting, interpreting_hopper};
use crate::interpreted::{ON_HOPPER, TEXTS_ON_HOPPER, noted, texts_on_hopper};
use crate::{
    DTYPES, flash_attention, fp8, grouped_products, largest, layer_norm, rms_norm, swiglu,
};
use memory::DType;
use ptx::PtxTexts;
use std::sync::Arc;

/// Cases that launch kernels whose codes of FP8 may be made by the instruction, beside `largest::find_and_know`.
const OF_CODES: [Cases; 2] = [fp8::cases, swiglu::cases];

/// Cases that launch the others of the same sources. `interpreted` finds opcodes that no case executes.
const OTHERS: [Cases; 2] = [rms_norm::cases, layer_norm::cases];

/// Cases of kernels for Hopper alone.
const OF_EXPERTS: [Cases; 2] = [
    grouped_products::cases,
    grouped_products::several_tiles_a_block,
];

/// Judges cases on these texts, whose conversion to FP8 is as expected or not.
fn conform(texts: &Arc<PtxTexts>, converts: bool, cases: impl IntoIterator<Item = Cases>) {
    let all: Vec<Cases> = cases.into_iter().collect();
    for dtype in DTYPES {
        let (memory, kernels) = interpreting(texts, dtype);
        memory.set_poison(true);
        for _ in ["first", "again"] {
            assert_eq!(kernels.check_conversion_to_fp8().unwrap(), converts);
        }
        let name = format!("interpreted PTX of Hopper for {dtype:?}");
        let devices = [Device::new(name, memory, Box::new(kernels))];
        for case in all.iter().flat_map(|cases| cases(dtype)) {
            judge(case.as_ref(), &devices);
        }
        largest::find_and_know(&devices[0], dtype);
    }
}

#[test]
fn as_it_is() {
    conform(&TEXTS_ON_HOPPER, true, OF_CODES.into_iter().chain(OTHERS));
}

#[test]
fn products_of_experts() {
    let devices = [interpreting_hopper(DType::BF16)];
    devices[0].memory.set_poison(true);
    for case in OF_EXPERTS.iter().flat_map(|cases| cases(DType::BF16)) {
        judge(case.as_ref(), &devices);
    }
}

#[test]
fn attention() {
    let devices = [interpreting_hopper(DType::BF16)];
    devices[0].memory.set_poison(true);
    flash_attention::has_own_bits(&devices[0]);
    for case in flash_attention::of_hopper(DType::BF16) {
        judge(case.as_ref(), &devices);
    }
}

/// A device whose instruction makes other codes: of the other format.
#[test]
fn codes_by_integers_where_the_instruction_makes_others() {
    let formats = ["e4m3x2", "e5m2x2"].map(|format| format!("cvt.rn.satfinite.{format}.f32"));
    let [e4m3, e5m2] = &formats;
    let mut texts = PtxTexts::on_hopper();
    let converting = texts_on_hopper().filter(|(_, text)| text.contains(e4m3));
    let mut names = Vec::new();
    for (name, text) in converting {
        names.push(name);
        let swapped = text
            .replace(e4m3, "?")
            .replace(e5m2, e4m3)
            .replace('?', e5m2);
        texts = texts.replacing(name, swapped);
    }
    assert_eq!(names, ["fp8", "gelu", "layer_norm", "rms_norm", "swiglu"]);
    conform(&noted(texts, ON_HOPPER), false, OF_CODES);
}
