//! `doctor` under a launcher: who is there, over what, and how fast.

use crate::ranks::job::{command, open_mpi, place};
use crate::workplace::outcome;
use serde_json::Value;

#[test]
fn tells_of_the_ranks() {
    let place = place();
    let ended = outcome(command(&place, open_mpi(2), "doctor --json"), "doctor").succeeds();
    let found: Value = serde_json::from_str(&ended.stdout).unwrap();
    let ranks = &found["ranks"];
    assert_eq!(
        (&ranks["size"], ranks["hosts"].as_array().unwrap().len()),
        (&2.into(), 1),
        "{ranks}"
    );
    assert!(
        ranks["engine"].as_str().unwrap().contains("Open MPI"),
        "{ranks}"
    );
    assert!(ranks["link_gbps"].as_f64().unwrap() > 0.01, "{ranks}");
    let slowest = ranks["slowest"].as_str().unwrap();
    assert!(slowest.starts_with("rank "), "{ranks}");
    assert_eq!(ranks["engine_bytes"], Value::Null, "a GPU's alone");
    for (grid, place_of) in [
        (
            "--cp 2",
            ["(group 0, part 0 of 2)", "(group 0, part 1 of 2)"],
        ),
        ("--pp 2", ["(stage 0 of 2)", "(stage 1 of 2)"]),
    ] {
        let doctor = format!("doctor --json {grid}");
        let ended = outcome(command(&place, open_mpi(2), &doctor), "doctor").succeeds();
        let found: Value = serde_json::from_str(&ended.stdout).unwrap();
        let slowest = found["ranks"]["slowest"].as_str().unwrap();
        assert!(
            place_of.iter().any(|place| slowest.contains(place)),
            "{slowest}"
        );
    }
    let refused = outcome(command(&place, open_mpi(2), "doctor --cp 3"), "doctor");
    // Whichever rank ends first ends the other, before or after it says so too.
    assert_eq!(refused.code, Some(2), "{refused:?}");
    let words = "2 ranks do not divide into";
    assert!(refused.stderr.contains(words), "{refused:?}");
    let ended = outcome(command(&place, open_mpi(2), "doctor"), "doctor").succeeds();
    assert_eq!(
        ended.stdout.matches("hardware.link_gbps = ").count(),
        1,
        "{ended:?}"
    );
}

#[test]
fn alone_there_are_none() {
    let found: Value =
        serde_json::from_str(&place().trainer("doctor --json").succeeds().stdout).unwrap();
    assert_eq!(found["ranks"], Value::Null);
}
