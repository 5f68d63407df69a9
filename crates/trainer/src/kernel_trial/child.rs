//! The process of a trial.

use super::{BEGUN, COMMAND, DEADLINE, Verdict, Widths};
use std::fs::File;
use std::io::{self, Read, Seek};
use std::process::{Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// How long a killed process may take to be gone. A driver may hold it.
const LAST: Duration = Duration::from_secs(1);

/// Tries kernels on a GPU in a process of their own.
pub(super) fn try_kernels(index: usize, widths: Widths) -> Verdict {
    match run(index, widths) {
        Err(error) => Verdict::Untried(format!("no process can be started: {error}")),
        Ok((None, said)) if said.contains(BEGUN) => Verdict::Hung,
        Ok((None, _)) => Verdict::Untried(format!(
            "the GPU was not open after {} s",
            DEADLINE.as_secs()
        )),
        Ok((Some(output), said)) => {
            let verdict = output
                .status
                .success()
                .then(|| serde_json::from_slice(&output.stdout));
            // A process that is killed, or panics, says nothing about the kernels: what they do to a GPU is an error of the driver's.
            verdict.and_then(Result::ok).unwrap_or_else(|| {
                Verdict::Untried(format!("{}{}", output.status, reason_in(&said)))
            })
        }
    }
}

/// What a process said went wrong.
fn reason_in(said: &str) -> String {
    let tells = |line: &&str| {
        ["error:", "panicked at"]
            .iter()
            .any(|word| line.contains(word))
    };
    said.lines()
        .find(tells)
        .map_or_else(String::new, |line| format!(": {line}"))
}

/// What the process wrote, if it was done in time, and what it said on its standard error.
fn run(index: usize, widths: Widths) -> io::Result<(Option<Output>, String)> {
    let mut said: File = tempfile::tempfile()?;
    let child = crate::program::again()
        .arg(COMMAND)
        .arg(format!("--gpu={index}"))
        .args(widths.arguments())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(said.try_clone()?)
        .spawn()?;
    let process = child.id();
    let (tell, ended) = channel();
    // It ends with the process, which a driver may hold longer than this program waits.
    thread::Builder::new()
        .name("kernel trial".into())
        .spawn(move || tell.send(child.wait_with_output()))?;
    let output = match ended.recv_timeout(DEADLINE) {
        Ok(output) => Some(output?),
        Err(RecvTimeoutError::Timeout) => {
            // SAFETY: sends a signal to the process. If it has ended just now, no other has its number so soon.
            unsafe { libc::kill(process as libc::pid_t, libc::SIGKILL) };
            let _ = ended.recv_timeout(LAST);
            None
        }
        Err(RecvTimeoutError::Disconnected) => unreachable!("the thread sends before it ends"),
    };
    let mut text = Vec::new();
    said.rewind()?;
    said.read_to_end(&mut text)?;
    Ok((output, String::from_utf8_lossy(&text).into_owned()))
}
