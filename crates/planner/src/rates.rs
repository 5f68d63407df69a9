//! The rates that times on paper are computed from: those of the settings, or else of an H100 and its host, or of a processor.

use kernels::Target;
use kernels::timeline::Rates;
use settings::{KernelChoice, KernelFamily, Settings};

/// A PCIe Gen5 slot with 16 lanes, pinned memory: 54.9 to 55.5 on hosts of an H100 and an H200 (`benches/results/2026-11-27-h100.md`).
const GBPS: f64 = 55.0;

/// The share of the sum of both rates that is left while both directions are busy, by the same page: 0.87 on the H100's host, 0.85 and 0.92 on the H200's.
const BOTH_WAYS: f64 = 0.85;

/// One NVMe drive in a PCIe Gen4 slot, by data sheet. Drives for Gen5 read twice as fast.
const DISK_GBPS: f64 = 6.5;

/// NVLink 4 of an H100, each way, by data sheet.
const NVLINK_GBPS: f64 = 450.0;

/// GPUs of one machine, which NVLink connects. With more ranks, a rank sends most of its bytes to other machines.
pub(crate) const NVLINK_RANKS: usize = 8;

/// One network card of 400 Gbit/s for each GPU, by data sheet.
const NETWORK_GBPS: f64 = 50.0;

/// Copies on an H100, read and written, by the same page. An H200 has 3,660.
const MEMORY_GBPS: f64 = 2720.0;

/// H100 and H200 by data sheet, dense bf16.
const PEAK_TFLOPS: f64 = 989.0;

/// The share of the peak that the products of a step reach, each timed alone on an H200: 0.60 in Qwen2.5-0.5B and 0.73 in Llama-3.2 1B
/// (`benches/results/2026-11-26-h200.md`). Large ones reach 0.79.
pub(crate) const UTILISATION: f64 = 0.7;

/// The share that grouped products reach by kernels for 8.0, by the same page: 0.20 to 0.28.
const GROUPED_UTILISATION: f64 = 0.25;

/// The shares that flash attention reaches forward and backward by kernels for 8.0 at 4,096 tokens, by the same page: 0.32 and 0.20 with heads
/// of 128, 0.24 and 0.17 with heads of 64.
const ATTENTION_UTILISATION: [f64; 2] = [0.3, 0.2];

/// TFLOP/s that grouped products are expected to reach by Hopper's kernels: no GPU has confirmed it. By counts of clocks and bytes 500 to 600.
const EXPECTED_GROUPED_TFLOPS: f64 = 550.0;

/// TFLOP/s that Hopper's kernels of flash attention are expected to reach, forward and backward, from so many tokens on: with heads of up to
/// 64, and with wider ones. No GPU has confirmed it. By counts of their machine code, and by what like kernels reach (FlashAttention-3,
/// Shah et al. 2024).
const EXPECTED_ATTENTION_TFLOPS: [(usize, [[f64; 2]; 2]); 3] = [
    (8192, [[480.0, 370.0], [610.0, 440.0]]),
    (4096, [[440.0, 340.0], [560.0, 410.0]]),
    (0, [[320.0, 260.0], [400.0, 320.0]]),
];

/// TFLOP/s that the gated delta rule is expected to reach in bf16, by counts of what its kernels read in shared memory. No GPU has confirmed
/// it.
const EXPECTED_DELTA_TFLOPS: f64 = 20.0;

/// Rates of one or two cores, where none were measured.
const CPU: Rates = Rates {
    flops: 0.15e12,
    grouped_flops: 0.15e12,
    attention_flops: [0.15e12; 2],
    delta_flops: 0.15e12,
    memory: 20e9,
    upload: 10e9,
    download: 10e9,
    both_ways: 15e9,
    disk: 1e9 * DISK_GBPS,
    link: 2e9,
    near_link: 2e9,
    near_ranks: NVLINK_RANKS,
};

/// The rates of the settings, and assumed ones where they have none.
pub(crate) fn assumed(settings: &Settings, target: Target) -> Rates {
    let assumed = h100(settings);
    let hardware = &settings.hardware;
    let of_products = hardware.peak_tflops.map_or(CPU.flops, |_| assumed.flops);
    match target {
        Target::Cuda => assumed,
        Target::Cpu => Rates {
            flops: of_products,
            grouped_flops: of_products,
            attention_flops: [of_products; 2],
            delta_flops: of_products,
            memory: hardware.memory_gbps.map_or(CPU.memory, |_| assumed.memory),
            upload: hardware.h2d_gbps.map_or(CPU.upload, |_| assumed.upload),
            download: hardware.d2h_gbps.map_or(CPU.download, |_| assumed.download),
            both_ways: hardware
                .both_ways_gbps
                .map_or(CPU.both_ways, |_| assumed.both_ways),
            disk: assumed.disk,
            link: hardware.link_gbps.map_or(CPU.link, |_| assumed.link),
            near_link: hardware
                .link_gbps
                .map_or(CPU.near_link, |_| assumed.near_link),
            near_ranks: CPU.near_ranks,
        },
    }
}

/// The rates of the settings, or else of H100 hosts.
fn h100(settings: &Settings) -> Rates {
    let hardware = &settings.hardware;
    let h2d_gbps = hardware.h2d_gbps.unwrap_or(GBPS);
    let d2h_gbps = hardware.d2h_gbps.unwrap_or(GBPS);
    let both_ways_gbps = hardware.both_ways_gbps;
    let both_ways_gbps = both_ways_gbps.unwrap_or(BOTH_WAYS * (h2d_gbps + d2h_gbps));
    let link_gbps = match &settings.ranks {
        Some(ranks) if ranks.of_all().of > NVLINK_RANKS => NETWORK_GBPS,
        _ => NVLINK_GBPS,
    };
    let peak = 1e12 * hardware.peak_tflops.unwrap_or(PEAK_TFLOPS);
    let grouped = expected_grouped(settings).unwrap_or(GROUPED_UTILISATION);
    let attention = expected_attention(settings).unwrap_or(ATTENTION_UTILISATION);
    Rates {
        flops: peak * UTILISATION,
        grouped_flops: peak * grouped,
        attention_flops: attention.map(|share| peak * share),
        delta_flops: peak * EXPECTED_DELTA_TFLOPS / PEAK_TFLOPS,
        memory: hardware.memory_gbps.unwrap_or(MEMORY_GBPS) * 1e9,
        upload: h2d_gbps * 1e9,
        download: d2h_gbps * 1e9,
        both_ways: both_ways_gbps * 1e9,
        disk: hardware.disk_gbps.unwrap_or(DISK_GBPS) * 1e9,
        link: hardware.link_gbps.unwrap_or(link_gbps) * 1e9,
        near_link: hardware.link_gbps.unwrap_or(NVLINK_GBPS) * 1e9,
        near_ranks: NVLINK_RANKS,
    }
}

/// Whether a family counts with Hopper's kernels: `auto` takes them on an H100. It goes by the key alone, so that a plan and its run, and
/// all ranks, choose the same whatever a trial of the kernels says.
fn is_by_hopper(settings: &Settings, family: KernelFamily) -> bool {
    settings.kernels[family] != KernelChoice::Sm80
}

/// The share of the peak that grouped products are expected to reach; none where it was measured.
fn expected_grouped(settings: &Settings) -> Option<f64> {
    is_by_hopper(settings, KernelFamily::Experts).then_some(EXPECTED_GROUPED_TFLOPS / PEAK_TFLOPS)
}

/// The shares that flash attention is expected to reach, forward and backward; none where they were measured. There are no expectations of
/// heads wider than 128.
fn expected_attention(settings: &Settings) -> Option<[f64; 2]> {
    if !is_by_hopper(settings, KernelFamily::Attention) {
        return None;
    }
    let mut expected = EXPECTED_ATTENTION_TFLOPS.iter();
    let (_, [of_64, of_128]) = expected.find(|(tokens, _)| settings.seq >= *tokens)?;
    let spec = settings.model.attention(0);
    let tflops = match spec.qk_head_dim.max(spec.v_head_dim) {
        ..=64 => of_64,
        65..=128 => of_128,
        _ => return None,
    };
    Some(tflops.map(|tflops| tflops / PEAK_TFLOPS))
}

/// Says which rates of times on paper are expected and not measured; none where all were.
pub(crate) fn note(settings: &Settings, target: Target) -> Option<String> {
    let rates = h100(settings);
    let tflops = |flops: f64| format!("{:.0}", flops / 1e12);
    let attention = expected_attention(settings).map(|_| {
        let [forward, backward] = rates.attention_flops.map(tflops);
        format!("attention forward at {forward} and backward at {backward} TFLOP/s")
    });
    let grouped = expected_grouped(settings).map(|_| {
        let grouped = tflops(rates.grouped_flops);
        format!("products of experts at {grouped} TFLOP/s")
    });
    let expected: Vec<String> = [attention, grouped].into_iter().flatten().collect();
    let of_hopper = (!expected.is_empty()).then(|| {
        format!(
            "times on paper use estimates for Hopper's kernels, which no GPU has confirmed: {}; with attention.kernels and \
             experts.kernels at sm80 they use measured rates",
            expected.join(", ")
        )
    });
    let of_delta = settings.model.delta.as_ref().map(|_| {
        let rate = tflops(rates.delta_flops);
        format!("the gated delta rule counts with {rate} TFLOP/s on paper, an estimate that no GPU has confirmed")
    });
    let all: Vec<String> = [of_hopper, of_delta].into_iter().flatten().collect();
    (target == Target::Cuda && !all.is_empty()).then(|| all.join("; "))
}
