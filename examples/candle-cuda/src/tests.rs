//! On libraries that stand in for NVIDIA's (`scripts/check-candle-cuda`): none of candle's kernels is run, all of the trainer's are.

use candle_core::{DType, Device, Tensor};
use trainer::{Config, Failure, StepOutcome, Trainer, configuration};

const TOKENS: usize = 32;

#[test]
fn the_example_runs() {
    super::main().unwrap();
}

/// A small model on the GPU: two micro-batches of two rows of eight tokens.
fn config(more: &[&str]) -> Config {
    let small = [
        "model.hidden=32",
        "model.layers=2",
        "model.heads=4",
        "model.kv_heads=2",
        "model.head_dim=8",
        "model.ffn=40",
        "model.vocab=23",
        "model.init_std=0.2",
        "train.device=cuda",
        "data.seq=8",
        "batch.micro=2",
        "batch.accum=2",
        "lr.peak=0.01",
    ];
    configuration("tiny", &[&small[..], more].concat()).unwrap()
}

fn gpu() -> Device {
    Device::new_cuda_with_stream(0).unwrap()
}

/// Four rows of eight ids, and the tokens after them, two of which are not asked for.
fn batch(device: &Device, step: i32) -> (Tensor, Tensor) {
    let ids: Vec<i32> = (0..TOKENS as i32)
        .map(|place| (place * 7 + step) % 23)
        .collect();
    let target = |place: i32| match place % 16 {
        5 => -100,
        _ => (place * 5 + step) % 23,
    };
    let targets: Vec<i32> = (0..TOKENS as i32).map(target).collect();
    let tensor = |tokens: Vec<i32>| Tensor::from_vec(tokens, (4, 8), device).unwrap();
    (tensor(ids), tensor(targets))
}

/// Three steps with tokens on a device.
fn trained(more: &[&str], device: &Device) -> (Trainer, Vec<StepOutcome>) {
    let mut trainer = Trainer::new(config(more)).unwrap();
    let step = |step| {
        let (ids, targets) = batch(device, step);
        trainer.step(&ids, &targets).unwrap()
    };
    let outcomes = (0..3).map(step).collect();
    (trainer, outcomes)
}

/// Bits of a tensor of f32, wherever it is.
fn bits(tensor: &Tensor) -> Vec<u32> {
    assert_eq!(tensor.dtype(), DType::F32);
    let values = tensor
        .to_device(&Device::Cpu)
        .unwrap()
        .flatten_all()
        .unwrap();
    let values = values.to_vec1::<f32>().unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

/// Everything that two trainers have, of which the second gives it on the GPU.
fn assert_alike(on_host: &Trainer, on_gpu: &Trainer, what: &str) {
    let names: Vec<String> = on_host.parameter_names().map(String::from).collect();
    for name in names {
        let given = [on_host, on_gpu].map(|trainer| trainer.parameter(&name).unwrap());
        assert!(!given[0].device().is_cuda() && given[1].device().is_cuda());
        assert_eq!(given[0].dims(), given[1].dims());
        assert_eq!(bits(&given[0]), bits(&given[1]), "{what}: {name}");
        let given = [on_host, on_gpu].map(|trainer| trainer.gradient(&name).unwrap());
        assert!(given[1].device().is_cuda());
        assert_eq!(
            bits(&given[0]),
            bits(&given[1]),
            "{what}: gradient of {name}"
        );
        let given = [on_host, on_gpu].map(|trainer| trainer.states(&name).unwrap());
        for (state, host) in &given[0] {
            let copy = &given[1][state];
            assert!(copy.device().is_cuda());
            let copy = copy.to_device(&Device::Cpu).unwrap();
            assert_eq!(
                format!("{host}"),
                format!("{copy}"),
                "{what}: {state} of {name}"
            );
        }
    }
}

/// Types that copies are widened from, gradients and weights that live on the host, and matrices that files have transposed.
#[test]
fn a_step_has_the_same_bits_wherever_its_tensors_are() {
    const GPT2: &[&str] = &[
        "model.norm=layer",
        "model.activation=gelu_tanh",
        "model.positions=learned",
        "model.max_positions=12",
        "model.biases=true",
        "model.tie_embeddings=true",
        "model.kv_heads=4",
    ];
    let offload = ["offload.parameters=pinned", "offload.gradients=pinned"];
    for more in [
        &["train.dtype=f32"][..],
        &["train.dtype=bf16"],
        &offload,
        GPT2,
    ] {
        let (on_host, outcomes) = trained(more, &Device::Cpu);
        let device = gpu();
        let (mut on_gpu, of_gpu) = trained(more, &device);
        on_gpu.give_on(&device).unwrap();
        for (host, gpu) in outcomes.iter().zip(&of_gpu) {
            assert_eq!(host.loss.to_bits(), gpu.loss.to_bits(), "{more:?}");
            assert_eq!(
                host.grad_norm.to_bits(),
                gpu.grad_norm.to_bits(),
                "{more:?}"
            );
            let planned = on_gpu.plan().peak_bytes;
            assert_eq!(
                (host.memory.peak.bytes, gpu.memory.peak.bytes),
                (planned, planned)
            );
        }
        assert!(of_gpu[2].loss != of_gpu[0].loss);
        assert_alike(&on_host, &on_gpu, &format!("{more:?}"));
    }
}

/// Those of the micro-batches that are one graph are uploaded, since a graph reads the same place every time.
#[test]
fn tokens_on_the_gpu_are_read_where_they_are() {
    for (graphs, lent) in [
        ("train.graphs=off", TOKENS),
        ("train.graphs=auto", TOKENS / 4),
    ] {
        let more = ["batch.micro=1", "batch.accum=4", graphs];
        let uploaded = |device: &Device| {
            let (_, outcomes) = trained(&more, device);
            outcomes[2].traffic.h2d_bytes
        };
        let less = uploaded(&Device::Cpu) - uploaded(&gpu());
        assert_eq!(less, 2 * 4 * lent as u64, "{graphs}");
    }
}

/// What cannot be read where it is, is read by way of the host: another type, or elements that lie apart.
#[test]
fn tokens_of_other_types_and_strides_are_uploaded() {
    let device = gpu();
    let losses = |ids: &Tensor, targets: &Tensor| {
        let mut trainer = Trainer::new(config(&[])).unwrap();
        let outcome = trainer.step(ids, targets).unwrap();
        (outcome.loss.to_bits(), outcome.traffic.h2d_bytes)
    };
    let (ids, targets) = batch(&device, 0);
    let (loss, lent) = losses(&ids, &targets);
    let (host_ids, host_targets) = batch(&Device::Cpu, 0);
    let wide = Tensor::cat(&[&host_ids, &host_ids], 1)
        .unwrap()
        .to_device(&device)
        .unwrap();
    let long = host_targets
        .to_dtype(DType::I64)
        .unwrap()
        .to_device(&device)
        .unwrap();
    for (ids, targets) in [
        (&wide.narrow(1, 8, 8).unwrap(), &targets),
        (&ids, &long),
        (&ids, &host_targets),
    ] {
        let (other, uploaded) = losses(ids, targets);
        assert_eq!(loss, other);
        assert!(uploaded > lent);
    }
    // Part of a tensor that lies in one piece is lent.
    let twice = Tensor::cat(&[&host_ids, &host_ids], 0)
        .unwrap()
        .to_device(&device)
        .unwrap();
    assert_eq!(
        losses(&twice.narrow(0, 4, 4).unwrap(), &targets),
        (loss, lent)
    );
    let unsigned = host_ids
        .to_dtype(DType::U32)
        .unwrap()
        .to_device(&device)
        .unwrap();
    assert_eq!(losses(&unsigned, &targets), (loss, lent));
}

/// candle's work for another GPU leaves its context in this thread.
#[test]
fn work_on_another_gpu_comes_between() {
    let (first, second) = (gpu(), Device::new_cuda_with_stream(1).unwrap());
    let (_, expected) = trained(&[], &first);
    let mut trainer = Trainer::new(config(&[])).unwrap();
    for step in 0..3 {
        let (ids, targets) = batch(if step == 1 { &second } else { &first }, step);
        let _elsewhere = Tensor::zeros(100, DType::F32, &second).unwrap();
        let outcome = trainer.step(&ids, &targets).unwrap();
        assert_eq!(
            outcome.loss.to_bits(),
            expected[step as usize].loss.to_bits()
        );
    }
    let refused = trainer.give_on(&second).unwrap_err();
    assert!(matches!(refused, Failure::Usage(_)), "{refused}");
    assert!(refused.to_string().contains("gpu_id: 1"), "{refused}");
}

#[test]
fn a_trainer_on_the_processor_takes_tensors_from_the_gpu_and_gives_none_there() {
    let device = gpu();
    let losses = [&device, &Device::Cpu].map(|of| {
        let (mut trainer, outcomes) = trained(&["train.device=cpu"], of);
        assert!(trainer.give_on(&device).is_err());
        outcomes[2].loss.to_bits()
    });
    assert_eq!(losses[0], losses[1]);
}
