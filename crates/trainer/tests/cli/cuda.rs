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

#[test]
fn the_processor_is_the_default_where_there_is_no_gpu() {
    let place = Workplace::new();
    let mut command = place.command("--config small.toml --steps 1 --out run");
    let output = command.env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(place.text("run/config.toml").contains("device = \"cpu\""));
}
