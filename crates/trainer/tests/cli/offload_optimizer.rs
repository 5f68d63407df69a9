//! `--offload-optimizer`: the same losses, other memory.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::Value;

/// A plan as JSON, and the metrics of the run.
fn plan_and_run(place: &Workplace, settings: &str, out: &str) -> (Value, Metrics) {
    let settings = format!("--config small.toml --device cpu --dtype bf16 {settings}");
    let plan = place.trainer(&format!("plan --json {settings}")).succeeds();
    place.trainer(&format!("{settings} --out {out}")).succeeds();
    (
        serde_json::from_str(&plan.stdout).unwrap(),
        Metrics::read(place, out),
    )
}

#[test]
fn states_in_host_memory_give_the_same_losses() {
    let place = Workplace::new();
    let (resident_plan, resident) = plan_and_run(&place, "", "resident");
    assert_eq!(resident_plan["host_pinned_bytes"], 0);
    for (index, options) in [
        "",
        "--set offload.window=end",
        "--set offload.fraction=0.5 --set offload.buffer_count=2",
    ]
    .into_iter()
    .enumerate()
    {
        let settings = format!("--offload-optimizer pinned --set offload.slab_mib=1 {options}");
        let (plan, offloaded) = plan_and_run(&place, &settings, &format!("offloaded-{index}"));
        assert!(plan["host_pinned_bytes"].as_u64().unwrap() > 0);
        assert!(plan["h2d_bytes"].as_u64() > resident_plan["h2d_bytes"].as_u64());
        let steps = offloaded.steps();
        assert_eq!(steps.len(), resident.steps().len());
        // Outcomes come late, but every step has its own time.
        for step in &steps {
            let forward_ms = step["phase_ms"]["forward"].as_f64().unwrap();
            assert!(step["step_ms"].as_f64().unwrap() > forward_ms / 2.0);
        }
        for (step, before) in steps.iter().zip(resident.steps()) {
            for key in ["step", "loss", "grad_norm", "lr"] {
                assert_eq!(step[key], before[key], "{options} {key}");
            }
            for key in [
                "peak_bytes",
                "host_pinned_bytes",
                "h2d_bytes",
                "d2h_bytes",
                "slab_bytes",
            ] {
                assert_eq!(step[key], plan[key], "{options} {key}");
            }
            assert_eq!(
                step["phase_peak_bytes"], plan["phase_peak_bytes"],
                "{options}"
            );
        }
    }
}

/// States in a folder: the same losses, what crosses as planned, and nothing is left there.
#[test]
fn states_on_a_disk_give_the_same_losses() {
    let place = Workplace::new();
    let (_, resident) = plan_and_run(&place, "", "resident");
    for (index, settings) in [
        "--offload-optimizer states",
        "--set offload.path=made/on/the/way",
        "--offload-optimizer disk --set offload.path=states --set offload.window=end",
    ]
    .into_iter()
    .enumerate()
    {
        let settings = format!("{settings} --set offload.slab_mib=1");
        let (plan, run) = plan_and_run(&place, &settings, &format!("disk-{index}"));
        let states = plan["disk_bytes"].as_u64().unwrap();
        assert!(states > 0 && plan["disk_read_bytes"] == states, "{plan}");
        for (step, before) in run.steps().iter().zip(resident.steps()) {
            for key in ["step", "loss", "grad_norm", "lr"] {
                assert_eq!(step[key], before[key], "{settings} {key}");
            }
            for key in [
                "peak_bytes",
                "host_pinned_bytes",
                "h2d_bytes",
                "d2h_bytes",
                "disk_read_bytes",
                "disk_written_bytes",
            ] {
                assert_eq!(step[key], plan[key], "{settings} {key}");
            }
        }
        for folder in ["states", "made/on/the/way"] {
            assert!(!place.path(folder).exists(), "{settings}");
        }
    }
}

/// A killed run of more ranks has left folders that no rank of this run opens.
#[test]
fn folders_of_killed_ranks_go_with_the_next_run() {
    let place = Workplace::new();
    let left = place.path("states/rank-3");
    let note = left.join("trainer-scratch.txt");
    let scratch = scratch::ScratchFolder::open(&left).unwrap();
    let text = std::fs::read(&note).unwrap();
    drop(scratch);
    place.folder("states/rank-3");
    place.folder("states/rank-mine");
    std::fs::write(&note, text).unwrap();
    place.file("states/rank-3/optimizer-states.trainer-scratch", "left");
    let run =
        "--config small.toml --device cpu --quiet --steps 1 --offload-optimizer states --out run";
    place.trainer(run).succeeds();
    assert_eq!(place.names("states"), ["rank-mine"]);
}

/// On the processor all memory is the host's: what the plan needs is known before anything is leased or written.
#[test]
fn more_than_the_host_has_is_refused_before_anything_is_written() {
    let place = Workplace::new();
    for offload in ["", "--offload-optimizer pinned"] {
        let settings =
            format!("--config llama-3.1-405b --device cpu --dtype bf16 {offload} --out run");
        let words = [
            "TiB of memory on the CPU device, but ",
            "hint: ",
            "--recompute full",
        ];
        place.trainer(&settings).fails(3, &words);
        assert!(!place.path("run").exists());
    }
    // A limit says how much is taken; what it refuses is explained by the lease.
    place
        .trainer("--config llama-3.1-405b --device cpu --memory-limit 1MiB --out run")
        .fails(3, &["CPU out of memory. Tried to allocate"]);
}

#[test]
fn the_summary_says_what_is_on_the_host() {
    let place = Workplace::new();
    let settings = "--config small.toml --device cpu";
    let offload = "--offload-optimizer pinned --offload-activations mlp";
    let outcome = place.trainer(&format!("{settings} {offload}")).succeeds();
    let plan = place.trainer(&format!("plan {settings} {offload}"));
    let plan = plan.succeeds().stdout;
    for part in [
        ", mlp offloaded, optimizer states offloaded\n",
        "in host memory ",
        "  host memory ",
    ] {
        assert!(outcome.stdout.contains(part), "{part}: {outcome:?}");
    }
    assert!(plan.contains("in host memory ") && plan.contains(" bytes) for what is offloaded; "));
    for text in [&outcome.stdout, &outcome.stderr, &plan] {
        assert!(
            !text.contains("pinned host") && !text.contains(" pinned;"),
            "{text}"
        );
    }
    let outcome = place.trainer(&format!(
        "{settings} --offload-optimizer states --offload-gradients pinned"
    ));
    for part in [
        "/states, gradients offloaded\n",
        "  scratch files on the disk ",
    ] {
        assert!(outcome.stdout.contains(part), "{part}: {outcome:?}");
    }
    let outcome = place.trainer(settings).succeeds();
    assert!(!outcome.stdout.contains("offloaded"), "{outcome:?}");
    assert!(!outcome.stdout.contains("host"), "{outcome:?}");
}
