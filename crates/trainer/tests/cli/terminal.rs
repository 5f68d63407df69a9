//! What a person sees on a terminal.

use crate::workplace::Workplace;
use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Stdio;

/// Runs the binary with a terminal for its standard error: what it shows there, and whether it succeeded.
fn shown(place: &Workplace, arguments: &str) -> (String, bool) {
    let (mut ours, mut theirs) = (0, 0);
    let size = libc::winsize {
        ws_row: 40,
        ws_col: 160,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: both descriptors are written by the call, and owned by nobody else after it.
    let (mut terminal, stderr) = unsafe {
        let opened = libc::openpty(
            &mut ours,
            &mut theirs,
            std::ptr::null_mut(),
            std::ptr::null(),
            &size,
        );
        assert_eq!(opened, 0, "a pseudo terminal");
        (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs))
    };
    let mut command = place.command(arguments);
    let mut child = command
        .env("TERM", "xterm")
        .stdout(Stdio::null())
        .stderr(stderr)
        .spawn()
        .unwrap();
    // Ours of the child's end is closed with the command; reading then ends with the child.
    drop(command);
    let mut shown = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(read) = terminal.read(&mut buffer) {
        if read == 0 {
            break;
        }
        shown.extend_from_slice(&buffer[..read]);
    }
    let is_success = child.wait().unwrap().success();
    (String::from_utf8_lossy(&shown).into_owned(), is_success)
}

/// Lines of losses stay, as where there is no terminal; the bar below them shows the step.
#[test]
fn losses_stay_above_the_bar() {
    let place = Workplace::new();
    let run = "--config small.toml --steps 4 --set log.every=2 --out";
    let (text, is_success) = shown(&place, &format!("{run} watched"));
    assert!(is_success, "{text}");
    for (step, is_told) in [(1, true), (2, true), (3, false), (4, true)] {
        let line = format!("step    {step}/4 (accum 2) loss ");
        assert_eq!(text.contains(&line), is_told, "{line}: {text}");
    }
    assert!(text.contains("4/4"), "the bar: {text}");
    assert!(text.contains("loading the model"), "{text}");
    let (quiet, is_success) = shown(&place, &format!("{run} quiet --quiet"));
    assert!(is_success && !quiet.contains("loss "), "{quiet}");
}

/// A plan that takes long is seen to go on; nothing of that goes elsewhere.
#[test]
fn planning_is_seen_to_go_on() {
    let place = Workplace::new();
    let plan = "plan --config small.toml --device cpu";
    let (text, is_success) = shown(&place, plan);
    assert!(
        is_success && text.contains("steps on shapes so far"),
        "{text}"
    );
    let elsewhere = place.trainer(plan).succeeds();
    assert!(
        !elsewhere.stderr.contains("steps on shapes"),
        "{elsewhere:?}"
    );
}
