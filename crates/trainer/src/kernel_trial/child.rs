//! The process of a trial.

use super::{COMMAND, DEADLINE, ExpertWidths, Verdict};
use std::fs::File;
use std::io::{Read, Result, Seek};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// This program, even if its file has been replaced since it was started.
const THIS_PROGRAM: &str = "/proc/self/exe";

/// How long a killed process may take to be gone. A driver may hold it.
const LAST: Duration = Duration::from_secs(1);

/// Tries kernels on a GPU in a process of their own.
pub(super) fn try_kernels(index: usize, widths: ExpertWidths) -> Verdict {
    match run(index, widths) {
        Err(error) => Verdict::Untried(format!("no process can be started: {error}")),
        Ok(None) => Verdict::Hung,
        Ok(Some((output, said))) => {
            let verdict = serde_json::from_slice(&output.stdout);
            match (output.status.success(), verdict) {
                (true, Ok(verdict)) => verdict,
                _ => {
                    let last = said.lines().rfind(|line| !line.trim().is_empty());
                    let status = output.status;
                    Verdict::Faulted(
                        last.map_or(status.to_string(), |last| format!("{status}: {last}")),
                    )
                }
            }
        }
    }
}

/// What the process wrote, and what it said on its standard error; none if it was not done in time.
fn run(index: usize, widths: ExpertWidths) -> Result<Option<(Output, String)>> {
    let mut said: File = tempfile::tempfile()?;
    let child = Command::new(THIS_PROGRAM)
        .arg(COMMAND)
        .arg(format!("--gpu={index}"))
        .args(widths.flags())
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
    match ended.recv_timeout(DEADLINE) {
        Ok(output) => {
            let mut text = Vec::new();
            said.rewind()?;
            said.read_to_end(&mut text)?;
            Ok(Some((output?, String::from_utf8_lossy(&text).into_owned())))
        }
        Err(RecvTimeoutError::Timeout) => {
            // SAFETY: sends a signal to the process, which the thread above has not waited for yet.
            unsafe { libc::kill(process as libc::pid_t, libc::SIGKILL) };
            let _ = ended.recv_timeout(LAST);
            Ok(None)
        }
        Err(RecvTimeoutError::Disconnected) => unreachable!("the thread sends before it ends"),
    }
}
