//! The runs that the guide to one GPU plans: its commands work, and its tables say what they say.

use crate::workplace::Workplace;
use memory::format_bytes;
use planner::CUDA_OVERHEAD_BYTES;
use serde_json::Value;

const GUIDE: &str = include_str!("../../../../docs/guides/one-gpu.md");

/// Its commands, in their order.
fn commands() -> Vec<String> {
    let whole_lines = GUIDE.replace("\\\n", " ");
    let commands = whole_lines.lines();
    let commands = commands.filter_map(|line| line.strip_prefix("$ trainer "));
    commands.map(String::from).collect()
}

fn plan(command: &str) -> Value {
    let printed = Workplace::new()
        .trainer(&format!("{command} --json"))
        .succeeds();
    serde_json::from_str(&printed.stdout).unwrap()
}

fn bytes(plan: &Value, field: &str) -> u64 {
    plan[field].as_u64().unwrap_or_else(|| panic!("{field}"))
}

/// What has to be free of a GPU.
fn device_bytes(plan: &Value) -> u64 {
    bytes(plan, "reserved_bytes") + CUDA_OVERHEAD_BYTES
}

/// Milliseconds as the tables have them.
fn time(ms: f64) -> String {
    match ms / 1e3 {
        seconds if seconds < 100.0 => format!("{seconds:.1} s"),
        seconds if seconds < 7200.0 => format!("{seconds:.0} s"),
        seconds => format!("{:.1} h", seconds / 3600.0),
    }
}

/// The cells of a run's row, between its name and its peer.
fn cells(plan: &Value) -> String {
    let elsewhere = bytes(plan, "host_pinned_bytes") + bytes(plan, "disk_bytes");
    let offload = |field: &str| plan["offload"][field].as_f64().unwrap();
    let (compute, exposed) = (offload("compute_ms"), offload("exposed_ms"));
    let disk = match bytes(plan, "disk_bytes") {
        0 => String::new(),
        bytes => format_bytes(bytes),
    };
    let cells = [
        format_bytes(device_bytes(plan)),
        format_bytes(bytes(plan, "host_pinned_bytes")),
        disk,
        format!("{:.2}", elsewhere as f64 / bytes(plan, "parameters") as f64),
        time(compute + exposed),
        format!("{} ({:.1} %)", time(exposed), 100.0 * exposed / compute),
        format!("{:.0}", offload("tokens_per_s")),
    ];
    cells.join(" | ")
}

#[test]
fn the_table_has_what_its_commands_plan() {
    let commands = commands();
    assert_eq!(commands.len(), 5);
    let plans: Vec<Value> = commands.iter().map(|command| plan(command)).collect();
    for (number, plan) in (1..).zip(&plans) {
        assert_eq!(plan["advice"]["fits"], true, "run {number}");
        assert_eq!(plan["advice"]["rungs"], Value::Array(Vec::new()));
        let row = GUIDE
            .lines()
            .find(|line| line.starts_with(&format!("| {number}. ")));
        let (row, cells) = (row.expect("every run has a row"), cells(plan));
        let cells = cells.replace(" |  | ", " | | ");
        assert!(row.contains(&format!(" | {cells} | ")), "{cells}\n{row}");
    }

    // What each run is to show.
    let [card, context, seventy, most, largest] = &plans[..] else {
        panic!("there are five")
    };
    let of_host = |plan: &Value| bytes(plan, "host_pinned_bytes");
    assert!(device_bytes(card) <= (29 << 30) / 2);
    assert_eq!(context["fits"]["H100 80GB"], true);
    let a_parameter = of_host(seventy) as f64 / bytes(seventy, "parameters") as f64;
    assert!(a_parameter <= 8.1, "{a_parameter}");
    assert!(bytes(most, "parameters") >= 180_000_000_000);
    assert!(of_host(most) <= 1_500_000_000_000);
    assert!(of_host(largest) <= 2_000_000_000_000 && bytes(largest, "disk_bytes") > 0);
    for plan in [most, largest] {
        assert_eq!(plan["fits"]["H200 141GB"], true);
    }
}

/// In tiles, activations grow with the tokens, and nothing grows faster.
#[test]
fn four_times_the_tokens_take_four_times_the_activations() {
    let command = &commands()[1];
    let peaks = [65_536u64, 262_144, 1_048_576].map(|tokens| {
        let plan = plan(&command.replace("--seq 1048576", &format!("--seq {tokens}")));
        let [peak, reserved] = ["peak_bytes", "reserved_bytes"].map(|field| bytes(&plan, field));
        let row = format!(
            "| {tokens} | {} | {} |",
            format_bytes(peak),
            format_bytes(reserved)
        );
        assert!(GUIDE.contains(&row), "{row}");
        peak
    });
    let [first, second] = [peaks[1] - peaks[0], peaks[2] - peaks[1]];
    let growth = second as f64 / first as f64;
    assert!((3.9..4.1).contains(&growth), "{growth}");
}
