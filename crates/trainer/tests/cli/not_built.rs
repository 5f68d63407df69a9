//! What later versions will have is refused with a sentence, not with "unexpected argument".

use crate::workplace::Workplace;

#[track_caller]
#[cfg(not(feature = "cuda"))]
fn refused(arguments: &str, words: &[&str]) {
    let outcome = Workplace::new().trainer(arguments);
    let words = [&["is not available: "], words].concat();
    let outcome = outcome.fails(2, &words);
    assert!(!outcome.stderr.contains("unexpected"), "{outcome:?}");
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_device_that_this_binary_does_not_have() {
    for device in ["cuda", "cuda:1"] {
        let words = [
            device,
            "built without CUDA",
            "--device cpu",
            "`trainer plan`",
        ];
        refused(&format!("--device {device}"), &words);
    }
    Workplace::new()
        .trainer("plan --config tiny --device cuda:1")
        .succeeds();
}

#[test]
#[cfg(not(feature = "cuda"))]
fn products_are_timed_on_a_gpu_alone() {
    let words = ["the device cuda cannot be used", "built without CUDA"];
    let place = Workplace::new();
    place.trainer("tune --config small.toml").fails(5, &words);
    assert!(!place.path("caches").exists());
}

#[test]
fn not_on_the_processor() {
    let words = [
        "`trainer tune` times products on a GPU",
        "the device is cpu",
    ];
    let tuned = Workplace::new().trainer("tune --config small.toml --device cpu");
    tuned.fails(2, &words);
}

#[test]
#[cfg(not(feature = "cuda"))]
fn ranges_for_profilers() {
    let words = ["--set log.nvtx=true", "built without CUDA"];
    refused("--set log.nvtx=true", &words);
    Workplace::new()
        .trainer("plan --config tiny --set log.nvtx=true")
        .succeeds();
}

/// The same settings under their keys.
#[test]
#[cfg(not(feature = "cuda"))]
fn keys() {
    let setting = "train.device=cuda";
    refused(
        &format!("--set {setting}"),
        &[setting, "built without CUDA"],
    );
}

/// Their defaults are no requests.
#[test]
fn defaults_are_accepted() {
    let defaults = "--state-dtype f32 --master f32 --grad-dtype f32 --optimizer adamw --attention eager \
                    --offload-optimizer none --offload-parameters none --offload-gradients none \
                    --offload-activations none --set optim.release=step";
    Workplace::new()
        .trainer(&format!("--config small.toml --steps 1 {defaults}"))
        .succeeds();
}
