//! `--memory-limit`: the plan's peak is enough, one granule less is not.

use crate::metrics::Metrics;
use crate::workplace::{Outcome, Workplace, outcome};
use serde_json::Value;

#[test]
fn the_limit_acts_to_the_granule() {
    let place = Workplace::new();
    for mode in ["none", "core_attn", "full"] {
        let settings = format!("--config small.toml --device cpu --recompute {mode}");
        let plan = place.trainer(&format!("plan --json {settings}")).succeeds();
        let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
        let peak = plan["peak_bytes"].as_u64().unwrap();
        let granule = plan["granularity_bytes"].as_u64().unwrap();
        let run = |limit: u64, out: &str| {
            place.trainer(&format!(
                "{settings} --memory-limit {limit} --out {mode}-{out}"
            ))
        };
        let enough = run(peak, "enough").succeeds();
        assert!(!enough.stderr.contains("WARN"), "{enough:?}");

        let short =
            run(peak - granule, "short").fails(3, &["hint: cheapest fix: --set ", "oom.json"]);
        let limit = format!("({} bytes)", peak - granule);
        assert!(short.stderr.contains(&limit), "{short:?}");
        // People search for PyTorch's words.
        let begin = "\nerror: CPU out of memory. Tried to allocate ";
        assert!(short.stderr.contains(begin), "{short:?}");
        let metrics = Metrics::read(&place, &format!("{mode}-short"));
        assert_eq!(
            (metrics.steps().len(), metrics.end_reason()),
            (0, "out_of_memory")
        );
        let tables = short.stderr.find("Largest tensors at the peak");
        assert!(tables.is_some() && tables < short.stderr.find(begin));

        // What was refused on paper is what the run would have failed at.
        let forced = place.trainer(&format!(
            "{settings} --memory-limit {} --out {mode}-forced --force",
            peak - granule
        ));
        let forced = forced.fails(3, &["out of memory"]);
        let warning = "WARN the plan's peak of";
        assert!(forced.stderr.contains(warning), "{forced:?}");
        assert!(!short.stderr.contains(warning), "{short:?}");
        let report = |out: &str| -> Value {
            serde_json::from_str(&place.text(&format!("{mode}-{out}/oom.json"))).unwrap()
        };
        assert_eq!(report("short"), report("forced"), "{forced:?}");
    }
}

/// `oom.json` has the facts, and each of its fixes, added to the same command, fits under the same limit.
#[test]
fn every_fix_of_an_out_of_memory_error_works() {
    let place = Workplace::new();
    for dtype in ["f32", "bf16"] {
        every_fix_works(&place, dtype);
    }
}

fn every_fix_works(place: &Workplace, dtype: &str) {
    let settings = format!(
        "--config small.toml --device cpu --dtype {dtype} --micro-batch 4 --recompute none --steps 1"
    );
    let plan = place.trainer(&format!("plan --json {settings}")).succeeds();
    let plan: Value = serde_json::from_str(&plan.stdout).unwrap();
    let peak = plan["peak_bytes"].as_u64().unwrap();
    let limit = peak - plan["granularity_bytes"].as_u64().unwrap();
    let limited = format!("{settings} --memory-limit {limit}");
    place
        .trainer(&format!("{limited} --out {dtype}-short"))
        .fails(3, &["cheapest fix"]);
    let oom: Value = serde_json::from_str(&place.text(&format!("{dtype}-short/oom.json"))).unwrap();
    assert_eq!(oom["limit_bytes"], limit);
    assert_eq!(oom["planned_peak_bytes"], peak);
    assert_eq!(
        (&oom["cause"], &oom["space"]),
        (&"capacity".into(), &"device".into())
    );
    assert!(oom["name"].is_string() && oom["phase"].is_string());
    assert!(oom["requested_bytes"].as_u64().unwrap() > 0);
    let fixes = oom["fixes"].as_array().unwrap();
    assert!(fixes.len() >= 5, "{fixes:?}");
    let changes = |fix: &&Value| fix["changes_math"] == true;
    assert!(fixes.iter().any(|fix| changes(&fix)) && !fixes.iter().all(|fix| changes(&fix)));
    for (number, fix) in fixes.iter().enumerate() {
        let set = fix["set"].as_array().unwrap().iter();
        let set: Vec<String> = set
            .map(|one| format!("--set {}", one.as_str().unwrap()))
            .collect();
        let out = format!("{dtype}-fixed-{number}");
        place
            .trainer(&format!("{limited} {} --out {out}", set.join(" ")))
            .succeeds();
        let step = Metrics::read(place, &out).steps()[0].clone();
        assert_eq!(step["peak_bytes"], fix["peak_bytes"], "{fix}");
    }
}

#[test]
fn a_plan_says_whether_a_limit_is_enough() {
    let place = Workplace::new();
    let plan = |more: &str| place.trainer(&format!("plan --config small.toml --device cpu {more}"));
    let enough = plan("--memory-limit 10GiB").succeeds();
    assert!(
        enough.stdout.contains("\nthe peak fits the limit"),
        "{enough:?}"
    );

    let peak = |printed: &str| -> Value {
        let plan: Value = serde_json::from_str(printed).unwrap();
        plan["peak_bytes"].clone()
    };
    let kept = peak(&plan("--json").succeeds().stdout);
    let limit = kept.as_u64().unwrap() - 1;
    let short = plan(&format!("--memory-limit {limit}"));
    let words = [
        "error: the peak is ",
        "does not fit the limit",
        "hint: cheapest fix: --set ",
    ];
    let short = short.prints_and_fails(3, &words);
    assert!(
        short.stdout.contains("\nthe peak does not fit the limit"),
        "{short:?}"
    );
    let json = plan(&format!("--memory-limit {limit} --json")).prints_and_fails(3, &words);
    assert_eq!(peak(&json.stdout), kept);
    // What is advised is accepted as it is written.
    for hint in short
        .stderr
        .lines()
        .filter(|line| line.starts_with("hint: "))
    {
        let (_, set) = hint.split_once("--set ").unwrap();
        let (set, _) = set.split_once(" has a peak of ").unwrap();
        plan(&format!("--memory-limit {limit} --set {set}")).succeeds();
    }
}

#[test]
fn a_limit_below_the_weights() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --memory-limit 1000 --out run")
        .fails(
            3,
            &["CPU out of memory. Tried to allocate", "load", "1000 B"],
        );
    assert_eq!(Metrics::read(&place, "run").end_reason(), "out_of_memory");
}

#[test]
fn a_share_of_the_machine() {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --steps 1 --memory-limit 95% --out run")
        .succeeds();
    place
        .trainer("--config small.toml --steps 1 --memory-limit 0.0000001%")
        .fails(3, &["CPU out of memory"]);
}

/// A limit on the address space of a process, which the binary is part of.
fn beside_binary(bytes: u64) -> u64 {
    let binary = std::fs::metadata(env!("CARGO_BIN_EXE_trainer")).unwrap();
    (binary.len() + bytes).next_multiple_of(1 << 20)
}

/// How a command ends under a limit of its process.
fn limited(
    place: &Workplace,
    arguments: &str,
    resource: libc::__rlimit_resource_t,
    bytes: u64,
) -> Outcome {
    use std::os::unix::process::CommandExt;
    let mut command = place.command(arguments);
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: bytes,
    };
    // SAFETY: `setrlimit` may be called between fork and exec.
    unsafe {
        command.pre_exec(move || match libc::setrlimit(resource, &limit) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
    outcome(command, arguments)
}

/// What `ulimit -v` leaves is less than a run needs: that is told before anything is loaded or written.
#[test]
fn a_limit_on_the_address_space_is_compared_with_the_plan() {
    let place = Workplace::new();
    let arguments = "--config small.toml --set model.vocab=2000000 --device cpu --threads 2 --steps 1 --out run";
    let limit = beside_binary(600 << 20);
    let of_limit = format!(
        "the limit of {} on its address space leaves",
        memory::format_bytes(limit)
    );
    let words = [&of_limit[..], "raise it with ulimit -v"];
    limited(&place, arguments, libc::RLIMIT_AS, limit).fails(3, &words);
    assert!(!place.path("run").exists());
}

/// A record is held as a whole, so one for which memory is too small is refused, and nothing of it stays.
#[test]
fn a_long_record_is_refused_under_a_limit() {
    let place = Workplace::new();
    let long = "x".repeat(48 << 20);
    place.file(
        "lines.jsonl",
        format!("{{\"text\": \"a\"}}\n{{\"text\": \"{long}\"}}\n"),
    );
    place.file("list.json", format!("[{{\"text\": \"{long}\"}}]"));
    for (file, record) in [("lines.jsonl", "line 2"), ("list.json", "element 1")] {
        let arguments = format!("prepare {file} --tokenizer bytes --threads 1 --out out");
        let place_of_it = format!("{file}, {record}: it has more than ");
        let words = [&place_of_it[..], "allow more memory"];
        limited(
            &place,
            &arguments,
            libc::RLIMIT_AS,
            beside_binary(900 << 20),
        )
        .fails(3, &words);
    }
    let left = place.names(".");
    assert!(!left.iter().any(|name| name.contains("out")), "{left:?}");
}

/// The first thread's stack is as large as `ulimit -s` says; the work has one of its own.
#[test]
fn a_small_stack_is_enough() {
    let place = Workplace::new();
    for arguments in [
        "plan --config small.toml --device cpu",
        "--config small.toml --device cpu --quiet --steps 1 --out run",
    ] {
        limited(&place, arguments, libc::RLIMIT_STACK, 64 << 10).succeeds();
    }
}
