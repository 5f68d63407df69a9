//! Runs the suite on the PTX of this binary, and checks that every opcode of every kernel was executed.

use crate::adamw::{Form, Moments, Steps};
use crate::case::Case;
use crate::device::{Device, interpreting};
use ptx::{Module, PtxKernel, PtxTexts};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, LazyLock, Mutex};

/// Names a folder of PTX that is interpreted in place of the build's, with `NAME.on_hopper.ptx` for what Hopper runs:
/// `scripts/check-mutations` breaks kernels there.
const REPLACED: &str = "CONFORMANCE_PTX";

/// Names a file that gets a line for every opcode of a kernel, when it is first executed.
const OPCODES: &str = "CONFORMANCE_OPCODES";

/// Comes after the names of kernels in that file, of PTX that is Hopper's own.
pub const ON_HOPPER: &str = "@sm_90";

/// The PTX that all tests run: this binary's, or that of a folder.
pub static TEXTS: LazyLock<Arc<PtxTexts>> = LazyLock::new(|| {
    noted(
        replaced(PtxTexts::of_this_binary(), kernels::cuda::ptx(), ".ptx"),
        "",
    )
});

/// The same of what Hopper runs.
pub static TEXTS_ON_HOPPER: LazyLock<Arc<PtxTexts>> = LazyLock::new(|| {
    let own = kernels::cuda::ptx_on_hopper();
    noted(
        replaced(PtxTexts::on_hopper(), own, ".on_hopper.ptx"),
        ON_HOPPER,
    )
});

/// Texts with those of the folder in place of `sources`.
fn replaced(
    texts: PtxTexts,
    sources: impl Iterator<Item = (&'static str, String)>,
    ending: &str,
) -> PtxTexts {
    sources.fold(texts, |texts, (name, _)| match other(name, ending) {
        Some(other) => texts.replacing(name, other),
        None => texts,
    })
}

/// The text of the folder in place of a source's.
fn other(name: &str, ending: &str) -> Option<String> {
    let folder = std::env::var_os(REPLACED)?;
    std::fs::read_to_string(Path::new(&folder).join(format!("{name}{ending}"))).ok()
}

/// What Hopper runs, by source.
pub fn texts_on_hopper() -> impl Iterator<Item = (&'static str, String)> {
    let texts = kernels::cuda::ptx_on_hopper();
    texts.map(|(name, text)| (name, other(name, ".on_hopper.ptx").unwrap_or(text)))
}

/// Texts that write down which opcodes of which kernels are executed, if that is wanted.
pub fn noted(texts: PtxTexts, on: &'static str) -> Arc<PtxTexts> {
    let Some(path) = std::env::var_os(OPCODES) else {
        return Arc::new(texts);
    };
    let file = File::options().create(true).append(true).open(path);
    let noted = Mutex::new((BTreeSet::new(), file.unwrap()));
    Arc::new(texts.reporting_to(move |kernel, report| {
        let (seen, file) = &mut *noted.lock().unwrap();
        for opcode in &report.opcodes {
            if seen.insert((kernel.to_string(), *opcode)) {
                let line = format!("{kernel}{on} {opcode}\n");
                file.write_all(line.as_bytes()).unwrap();
            }
        }
    }))
}

/// Opcodes that no case executes, by kernel or, at a `*`, in all kernels.
const NOT_EXECUTED: [(&str, &str); 12] = [
    // Quotients of numbers of more than 32 bits; smaller ones are divided by a shorter way.
    ("*", "div.u64"),
    ("*", "rem.u64"),
    ("count_choices_f32", "bra.uni"),
    ("count_choices_f32", "sub.s64"),
    ("group_by_expert_i32", "bra.uni"),
    ("route_f32", "sub.s64"),
    ("route_backward_f32", "sub.s64"),
    ("route_backward_bf16", "sub.s64"),
    ("router_z_loss_f32", "bra.uni"),
    ("router_z_loss_f32", "sub.s64"),
    // The loop over more than seven times a block's threads of grains: eight million elements.
    ("adafactor_rate", "shl.b32"),
    // Losses that begin at no multiple of 16 bytes, as none that are leased do.
    ("sum_f32", "mov.f32"),
];

/// The opcodes of each kernel of a text.
fn opcodes(text: &str) -> Vec<(String, &'static str)> {
    let module = Module::parse(text).unwrap();
    let of = |kernel: &PtxKernel| {
        let name = kernel.name().to_string();
        kernel
            .opcodes()
            .into_iter()
            .map(move |opcode| (name.clone(), opcode))
    };
    module.kernels().iter().flat_map(of).collect()
}

/// The opcodes of all kernels; of what Hopper runs only those that the kernel has not elsewhere.
fn all_opcodes() -> BTreeSet<(String, &'static str)> {
    let texts = kernels::cuda::ptx();
    let elsewhere: BTreeSet<_> = texts.flat_map(|(_, text)| opcodes(&text)).collect();
    let on_hopper = kernels::cuda::ptx_on_hopper().flat_map(|(_, text)| opcodes(&text));
    let own = on_hopper.filter(|pair| !elsewhere.contains(pair));
    let own = own.map(|(kernel, opcode)| (format!("{kernel}{ON_HOPPER}"), opcode));
    let own: Vec<_> = own.collect();
    elsewhere.into_iter().chain(own).collect()
}

/// The suite runs on the interpreter, in a process of its own, and executes every opcode of every kernel that is not listed.
#[test]
fn every_opcode_of_every_kernel_is_executed_or_listed() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("executed-opcodes");
    // Left by an earlier run; the suite makes it when it first asks for the interpreter.
    let _ = std::fs::remove_file(&path);
    let suite = Command::new(std::env::current_exe().unwrap())
        .args(["--skip", "gpu::", "--skip", "interpreted::"])
        .env("CONFORMANCE_DEVICES", "cpu,ptx")
        .env(OPCODES, &path)
        .status();
    assert!(suite.unwrap().success());
    let executed = std::fs::read_to_string(&path).unwrap();
    let executed: BTreeSet<(&str, &str)> = executed
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    let all = all_opcodes();
    let all: BTreeSet<(&str, &str)> = all
        .iter()
        .map(|(kernel, opcode)| (&kernel[..], *opcode))
        .collect();
    let is_listed = |(kernel, opcode): &(&str, &str)| {
        let mut rows = NOT_EXECUTED.iter();
        rows.any(|row| ["*", *kernel].contains(&row.0) && row.1 == *opcode)
    };
    let unknown: Vec<_> = NOT_EXECUTED
        .iter()
        .filter(|row| {
            !all.iter()
                .any(|pair| ["*", pair.0].contains(&row.0) && row.1 == pair.1)
        })
        .collect();
    assert!(unknown.is_empty(), "no kernel has {unknown:?}");
    let missing: Vec<_> = all
        .difference(&executed)
        .filter(|pair| !is_listed(pair))
        .collect();
    assert!(missing.is_empty(), "no case executes {missing:#?}");
    let run: Vec<_> = executed.iter().filter(|pair| is_listed(pair)).collect();
    assert!(run.is_empty(), "listed, and executed: {run:?}");
    println!(
        "{} opcodes of kernels, {} executed",
        all.len(),
        executed.len()
    );
}

/// Whatever a warp of AdamW writes in accesses of 16 bytes a lane, f32 too, is 16 whole sectors.
#[test]
fn wide_stores_of_adamw_write_whole_sectors() {
    let (_, text) = kernels::cuda::ptx()
        .find(|(name, _)| *name == "adamw")
        .unwrap();
    let lines: Vec<String> = text.lines().map(str::to_string).collect();
    let kernels_seen = Arc::new(Mutex::new(BTreeSet::new()));
    let seen = Arc::clone(&kernels_seen);
    let texts = PtxTexts::of_this_binary().reporting_to(move |kernel, report| {
        let wide = |line: u32| lines[line as usize - 1].contains("st.global.v4");
        for line in report.lines.iter().filter(|line| wide(line.line)) {
            assert_eq!(
                line.counts.sectors,
                16 * line.counts.global,
                "{kernel}: {line:?}"
            );
            seen.lock().unwrap().insert(kernel.to_string());
        }
    });
    let texts = Arc::new(texts);
    let mut forms_run = 0;
    for dtype in crate::DTYPES {
        let (memory, kernels) = interpreting(&texts, dtype);
        let device = Device::new("interpreted PTX", memory, Box::new(kernels));
        let forms = Form::all(dtype).into_iter();
        for form in forms.filter(|form| form.moments != Moments::Quantised) {
            let steps = Steps {
                form,
                // Every lane of a block, in every round.
                elements: 256 * 8 * 8,
                steps: 1..2,
                weight_decay: 0.1,
                clip: 1.0,
            };
            steps.run(&device).unwrap();
            forms_run += 1;
        }
    }
    // A kernel a form.
    assert_eq!(kernels_seen.lock().unwrap().len(), forms_run);
}
