//! `trainer report`: a page about a run or two, and what it says of runs that did not end.

use crate::metrics::Metrics;
use crate::workplace::Workplace;
use serde_json::{Value, json};

/// A place with a run in `run`.
fn place_with_run() -> Workplace {
    let place = Workplace::new();
    place
        .trainer("--config small.toml --device cpu --recompute full --out run")
        .succeeds();
    place
}

/// A number as pages have it.
fn exact(number: &Value) -> String {
    let digits = number.as_u64().unwrap().to_string();
    let parts = digits.as_bytes().rchunks(3).rev();
    let parts: Vec<_> = parts
        .map(|part| std::str::from_utf8(part).unwrap())
        .collect();
    parts.join(",")
}

#[track_caller]
fn needs_no_network(page: &str) {
    // A name, not an address; within a frame its slashes are escaped.
    let rest = page.replace("&#x2f;", "/");
    let rest = rest.replace("http://www.w3.org/2000/svg", "");
    for reference in ["http:", "https:", " src=", "@import", "<link"] {
        assert!(!rest.contains(reference), "{reference}");
    }
}

#[test]
fn a_page_has_the_figures_of_its_run() {
    let place = place_with_run();
    place.folder("run/memory");
    place.file(
        "run/memory/timeline.svg",
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 3 1"><title>one step</title></svg>"#,
    );
    let outcome = place.trainer("report run").succeeds();
    assert_eq!(outcome.stdout, "run/report.html\n");
    let page = place.text("run/report.html");
    needs_no_network(&page);
    let plan: Value = serde_json::from_str(&place.text("run/plan.json")).unwrap();
    let losses = Metrics::read(&place, "run").losses();
    let last = format!("step 4: {:.4}", losses.last().unwrap());
    let largest = plan["largest_at_peak"][0]["name"].as_str().unwrap();
    for words in [
        ">done</strong>",
        "The last step written down is 4 of 4.",
        &last,
        &exact(&plan["peak_bytes"]),
        "The peak of every step (4) was the plan&#x27;s, to the byte.",
        largest,
        "full:uniform:2",
        "recompute.spec",
        "&lt;title&gt;one step",
    ] {
        assert!(page.contains(words), "no {words:?}");
    }
    let curves = page.matches("<polyline").count();
    assert_eq!(curves, 2, "loss and throughput");
}

/// Measured as planned, with no difference.
#[test]
fn a_page_has_what_lives_on_a_disk_and_what_crosses() {
    let place = place_with_run();
    place
        .trainer("--config small.toml --device cpu --offload-optimizer states --out elsewhere")
        .succeeds();
    let page = place.trainer("report elsewhere --text").succeeds().stdout;
    let plan: Value = serde_json::from_str(&place.text("elsewhere/plan.json")).unwrap();
    for (name, field) in [
        ("host memory, offloaded", "host_pinned_bytes"),
        ("copied to the device", "h2d_bytes"),
        ("copied to the host", "d2h_bytes"),
        ("read from the disk", "disk_read_bytes"),
        ("written to the disk", "disk_written_bytes"),
    ] {
        assert!(plan[field].as_u64() > Some(0), "{field}");
        let row = page.lines().find_map(|line| line.trim().strip_prefix(name));
        let bytes = exact(&plan[field]);
        let cells: Vec<_> = row.unwrap_or_default().split_whitespace().collect();
        let same = [bytes.as_str(), &bytes, "0"];
        assert!(cells.starts_with(&same), "{name}: {page}");
    }
    let both = place
        .trainer("report run elsewhere --text")
        .succeeds()
        .stdout;
    for field in ["on the disk", "from the disk", "to the disk"] {
        assert!(both.contains(field), "{field}: {both}");
    }
}

#[test]
fn a_comparison_begins_with_what_was_set_differently() {
    let place = place_with_run();
    place
        .trainer("--config small.toml --device cpu --recompute none --out other")
        .succeeds();
    let outcome = place.trainer("report run other").succeeds();
    assert_eq!(outcome.stdout, "other/report-vs-run.html\n");
    let page = place.text("other/report-vs-run.html");
    needs_no_network(&page);
    let at = |words: &str| page.find(words).unwrap_or_else(|| panic!("no {words:?}"));
    assert!(at("recompute.spec") < at("last loss") && at("last loss") < at("<polyline"));
    assert_eq!(
        page.matches("<polyline").count(),
        4,
        "two curves in two pictures"
    );
    assert!(!page.contains("train.seed"), "what is the same is left out");

    let text = place.trainer("report run other --text").succeeds().stdout;
    let plan = |run: &str| -> Value {
        serde_json::from_str(&place.text(&format!("{run}/plan.json"))).unwrap()
    };
    let row = |name: &str| {
        let line = text
            .lines()
            .find(|line| line.trim_start().starts_with(name));
        line.unwrap_or_else(|| panic!("no {name}: {text}"))
            .to_string()
    };
    let peaks = row("measured peak, bytes");
    for run in ["run", "other"] {
        assert!(peaks.contains(&exact(&plan(run)["peak_bytes"])), "{peaks}");
    }
    assert!(peaks.contains('+'), "{peaks}");
    assert!(
        row("last loss").ends_with(" 0"),
        "the same, bit for bit: {text}"
    );
    assert!(text.contains("the same in all 4 steps"), "{text}");
    let same = place.trainer("report run run --text").succeeds().stdout;
    assert!(same.contains("The settings are the same."), "{same}");
}

#[test]
fn the_text_form_has_memory_and_the_largest_tensors() {
    let place = place_with_run();
    let page = place.path("run/report.html");
    let _ = std::fs::remove_file(&page);
    let text = place.trainer("report run --text").succeeds().stdout;
    let plan: Value = serde_json::from_str(&place.text("run/plan.json")).unwrap();
    for part in ["peak_by_category", "phase_peak_bytes"] {
        for (name, bytes) in plan[part].as_object().unwrap() {
            let line = text
                .lines()
                .find(|line| line.contains(&format!(" {name} ")));
            match bytes.as_u64().unwrap() {
                0 => assert!(line.is_none(), "{name}: {text}"),
                _ => {
                    let cells = exact(bytes);
                    let row = format!("{name} {cells} {cells} 0 ");
                    let line: Vec<&str> = line.unwrap().split_whitespace().collect();
                    assert!(line.join(" ").contains(&row), "{row}: {text}");
                }
            }
        }
    }
    let largest = &plan["largest_at_peak"][0];
    let (name, bytes) = (largest["name"].as_str().unwrap(), exact(&largest["bytes"]));
    assert!(
        text.lines()
            .any(|line| line.contains(name) && line.contains(&bytes)),
        "{text}"
    );
    assert!(text.lines().nth(1).unwrap().starts_with("done. "), "{text}");
    assert!(!page.exists(), "--text writes nothing");
}

#[test]
fn an_out_of_memory_error_is_told_with_its_fixes() {
    let place = Workplace::new();
    let command = "--config small.toml --device cpu --memory-limit 300KiB --out run";
    place.trainer(command).fails(3, &["out of memory"]);
    let oom: Value = serde_json::from_str(&place.text("run/oom.json")).unwrap();
    place.trainer("report run").succeeds();
    for text in [
        place.trainer("report run --text").succeeds().stdout,
        place.text("run/report.html").replace("<wbr>", ""),
    ] {
        assert!(
            text.contains("out of memory") && text.contains("307,200 bytes"),
            "{text}"
        );
        assert!(text.contains(oom["name"].as_str().unwrap()), "{text}");
        for fix in oom["fixes"].as_array().unwrap() {
            let flag = format!("--set {}", fix["set"][0].as_str().unwrap());
            assert!(text.contains(&flag), "no {flag}: {text}");
        }
    }
}

/// Evaluations, texts and a resumption of a real run, with some lines that a worse one would have written.
#[test]
fn what_happens_between_steps_is_on_the_page() {
    let place = Workplace::new();
    let text = "the rain in spain stays mainly in the plain ".repeat(9);
    place.file("text.txt", &text);
    let run = "--config small.toml --device cpu --quiet --data text.txt --save-every 2 --eval-every 2 --eval-data text.txt";
    place
        .trainer(&format!("{run} --sample-every 2 --out run"))
        .succeeds();
    let changed = "--resume run --steps 6 --lr 0.01 --allow-change --quiet";
    place.trainer(changed).succeeds();
    let metrics = Metrics::read(&place, "run");
    let last = metrics.of_kind("eval").last().unwrap();
    let number = |name: &str| last[name].as_f64().unwrap();

    place.trainer("report run").succeeds();
    let text = place.trainer("report run --text").succeeds().stdout;
    let page = place.text("run/report.html");
    needs_no_network(&page);
    let peak = exact(&last["peak_bytes"]);
    let row = text
        .lines()
        .find(|line| line.contains("peak in an evaluation"));
    let row: Vec<&str> = row.unwrap().split_whitespace().collect();
    assert_eq!(row[4..7], [&peak, &peak, "0"], "{text}");
    for (name, words) in [
        ("loss", format!("{:.4}", number("loss"))),
        ("perplexity", format!("{:.2}", number("perplexity"))),
        ("bits per byte", format!("{:.4}", number("bits_per_byte"))),
        ("resumed", "It was resumed after step 4.".into()),
        ("change", "lr.peak: 0.001 before, 0.01 now".into()),
        ("sample", "step 6".into()),
    ] {
        assert!(text.contains(&words), "no {name}, {words:?}: {text}");
        assert!(page.contains(&words), "no {name}, {words:?}");
    }
    assert_eq!(
        page.matches("<polyline").count(),
        3,
        "loss, evaluation, throughput"
    );
    assert_eq!(
        page.matches("<line class=\"resumed\"").count(),
        2,
        "in both pictures"
    );
    assert_eq!(page.matches(">best</text>").count(), 1);

    let other = format!("{run} --recompute full --out other");
    place.trainer(&other).succeeds();
    let text = place.trainer("report other run --text").succeeds().stdout;
    for words in [
        "best evaluation loss",
        "its bits per byte",
        "run, step 6: The |",
    ] {
        assert!(text.contains(words), "no {words:?}: {text}");
    }
}

/// A model's text may be anything, an evaluation may not be finite, and data may be slow.
#[test]
fn lines_of_bad_runs_are_shown_and_not_obeyed() {
    let place = place_with_run();
    let plain = place.trainer("report run --text").succeeds().stdout;
    for words in ["valuation", "Texts", "esumed"] {
        assert!(!plain.contains(words), "{words}: {plain}");
    }
    let mut records = Metrics::read(&place, "run").0;
    for step in records.iter_mut().filter(|record| record["kind"] == "step") {
        step["data_wait_ms"] = json!(step["step_ms"].as_f64().unwrap() / 8.0);
    }
    for step in 1..=9 {
        let loss = [Value::Null, json!(2.5), json!(2.5)][step % 3].clone();
        records.push(json!({"kind": "eval", "step": step, "loss": loss, "perplexity": 3e9, "peak_bytes": step}));
        let text = format!("</td><script>\u{1b}[2J{step}");
        records.push(json!({"kind": "sample", "step": step, "prompt": "", "text": text}));
    }
    let lines: Vec<String> = records.iter().map(ToString::to_string).collect();
    place.file("run/metrics.jsonl", lines.join("\n") + "\n");
    let text = place.trainer("report run --text").succeeds().stdout;
    for words in [
        "For 12.5 % of their time, steps waited for data",
        "step 1 2.5000 3.00e9 best",
        "step 9 not finite",
        "step 9: |</td><script>␛[2J9",
    ] {
        let cells: Vec<&str> = text.split_whitespace().collect();
        assert!(cells.join(" ").contains(words), "no {words:?}: {text}");
    }
    assert!(!text.contains('\u{1b}') && !text.contains("[2J5"), "{text}");
    place.trainer("report run").succeeds();
    let page = place.text("run/report.html");
    assert!(page.contains("&lt;script&gt;␛[2J9") && page.matches("<script>").count() == 1);
}

/// What is left of a run that was killed in the middle of a line, with another record of its process.
fn cut_off(place: &Workplace, metrics: &Metrics, process: Value) {
    let mut begin = metrics.0[0].clone();
    begin["process"] = process;
    let steps: Vec<String> = metrics.steps()[..3]
        .iter()
        .map(ToString::to_string)
        .collect();
    place.file(
        "run/metrics.jsonl",
        format!("{begin}\n{}\n{{\"kind\":\"st", steps.join("\n")),
    );
}

/// The count of out-of-memory kills is the control group's; a file of the same form stands for it.
#[test]
fn a_run_that_was_cut_off_is_recognised() {
    let place = place_with_run();
    let metrics = Metrics::read(&place, "run");
    let process = &metrics.0[0]["process"];
    let told = |process: Value, words: &[&str]| {
        cut_off(&place, &metrics, process);
        let text = place.trainer("report run --text").succeeds().stdout;
        for words in words
            .iter()
            .chain(&["The last step written down is 3 of 4."])
        {
            assert!(text.contains(words), "no {words:?}: {text}");
        }
    };
    place.file("memory.events", "oom 2\noom_kill 2\n");
    let counted = |count: u64| {
        let mut process = process.clone();
        process["oom_kills"] = json!([{ "file": place.path("memory.events"), "count": count }]);
        process
    };
    let for_memory = "killed, most likely by the kernel for want of host memory";
    told(
        counted(1),
        &[for_memory, "has killed 1 process of its control group"],
    );
    told(
        counted(2),
        &["killed. ", "counts no out-of-memory kill", "kill -9"],
    );

    let mut elsewhere = process.clone();
    elsewhere["system"] = "another boot".into();
    told(elsewhere, &["cut off. ", "another machine"]);
    told(Value::Null, &["cut off. ", "no `end` record"]);
}

/// The process of this test is alive, and so would be the run that it had made.
#[test]
fn a_run_that_goes_on_is_told_from_a_dead_one() {
    let place = place_with_run();
    let metrics = Metrics::read(&place, "run");
    let mut process = metrics.0[0]["process"].clone();
    let own = serde_json::to_value(::report::ProcessRecord::current()).unwrap();
    assert_eq!(own["system"], process["system"]);
    process["pid"] = own["pid"].clone();
    process["start_ticks"] = own["start_ticks"].clone();
    cut_off(&place, &metrics, process);
    let text = place.trainer("report run --text").succeeds().stdout;
    assert!(
        text.contains("still running. ") && text.contains("resident set of"),
        "{text}"
    );
}

#[test]
fn what_cannot_be_reported_on() {
    let place = Workplace::new();
    place.folder("empty");
    for folder in ["empty", "missing", "small.toml"] {
        let outcome = place.trainer(&format!("report {folder}"));
        outcome.fails(4, &[folder, "is no run directory", "metrics.jsonl"]);
    }
    place
        .trainer("report")
        .fails(2, &["no run under runs/", "trainer report DIR"]);
    place.folder("damaged");
    place.file(
        "damaged/metrics.jsonl",
        "{\"kind\":\"run\"}\nnonsense\n{\"kind\":\"end\"}\n",
    );
    place
        .trainer("report damaged")
        .fails(4, &["damaged/metrics.jsonl is damaged"]);
    place.trainer("report a b c").fails(2, &["unexpected"]);
}

/// The newest is the one that wrote last, whatever it is called; a plan alone is enough for a page.
#[test]
fn without_a_folder_the_newest_run_is_taken() {
    let place = Workplace::new();
    place.trainer("--config small.toml --steps 1").succeeds();
    let outcome = place.trainer("report").succeeds();
    assert!(outcome.stdout.starts_with("runs/small-"), "{outcome:?}");
    let page = outcome.stdout.trim_end();
    std::fs::remove_file(place.path(page).with_file_name("metrics.jsonl")).unwrap();
    let text = place.trainer("report --text").succeeds().stdout;
    assert!(
        text.contains("never began. ") && text.contains("this is the plan"),
        "{text}"
    );
}
