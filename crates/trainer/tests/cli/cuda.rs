//! A binary with CUDA where there is no GPU to be had.

use crate::workplace::Workplace;

/// Without a driver, or with one that is shown no GPU.
#[test]
fn training_on_a_gpu_ends_with_a_sentence_and_leaves_nothing_behind() {
    let place = Workplace::new();
    let mut command = place.command("--config small.toml --device cuda --out run");
    let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    for words in [
        "error: the device cuda cannot be used: ",
        "driver",
        "hint: ",
        "--device cpu",
        "trainer doctor",
    ] {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
    assert!(!stderr.contains("panic"), "{stderr}");
    assert!(!place.path("run").exists());
}

/// As training does, whichever device is the default.
#[test]
fn so_does_tuning() {
    let place = Workplace::new();
    let mut command = place.command("tune --config small.toml");
    let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(5), "{stderr}");
    let words = "error: the device cuda cannot be used: ";
    assert!(stderr.contains(words), "{stderr}");
    assert!(!place.path("caches").exists());
}

#[test]
fn the_processor_is_the_default_where_there_is_no_gpu() {
    let place = Workplace::new();
    let mut command = place.command("--config small.toml --steps 1 --out run");
    let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(place.text("run/config.toml").contains("device = \"cpu\""));
}

#[test]
fn ranges_on_the_processor_have_no_effect_and_that_is_said() {
    let place = Workplace::new();
    let run = "--config small.toml --steps 1 --device cpu --set log.nvtx=true --out run";
    let outcome = place.trainer(run).succeeds();
    assert!(
        outcome.stderr.contains("WARN log.nvtx has no effect"),
        "{outcome:?}"
    );
}

#[test]
fn doctor_says_all_that_is_missing_at_once() {
    let place = Workplace::new();
    let mut command = place.command("doctor --threads 1");
    let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(0), "{stdout}");
    assert!(
        stdout.contains("missing: ") && stdout.contains("driver"),
        "{stdout}"
    );
    assert!(!stdout.contains("without CUDA"), "{stdout}");
    assert!(
        stdout.contains("kernels in this binary: sm_80, sm_90, "),
        "{stdout}"
    );
}
