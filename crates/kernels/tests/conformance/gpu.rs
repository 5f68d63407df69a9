//! The code that calls the driver and cuBLASLt, without a GPU: some cases on the libraries that stand in for them.

use crate::case::judge;
use crate::device::gpu;
use crate::{DTYPES, SUITE};
use std::process::Command;

/// Cases on the GPU alone, if there is one: every product, and a few cases of every other operation.
#[test]
fn some_cases_of_every_operation() {
    for dtype in DTYPES {
        let Some(device) = gpu(dtype) else { return };
        let devices = [device];
        let [device] = &devices;
        device.memory.set_poison(true);
        for (name, cases) in SUITE {
            let cases = cases(dtype);
            let apart = match *name {
                "matmul" => 1,
                // Emulated, a case takes most of a second.
                "flash_attention" => 16,
                _ => 5,
            };
            for case in cases.iter().step_by(apart) {
                judge(case.as_ref(), &devices);
            }
            println!("{name}: passed on {}", device.name);
        }
    }
}

/// The suite runs in a process of its own, since a process finds one driver.
#[test]
fn the_stand_in_gives_what_a_gpu_must() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "gpu::some_cases_of_every_operation",
            "grouped_products::kernels_for_hopper_on_a_gpu",
            "--nocapture",
        ])
        .env("LD_LIBRARY_PATH", emulation::stand_in_folder())
        .output()
        .unwrap();
    let [stdout, stderr] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{stdout}{stderr}");
    assert!(!stderr.contains("stand-in: "), "{stderr}");
    let passed = stdout.matches("passed on Stand-in GPU").count();
    // The last one is of the kernels for Hopper.
    assert_eq!(passed, DTYPES.len() * SUITE.len() + 1, "{stdout}");
}
