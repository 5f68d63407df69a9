//! The hidden command of a trial's process: computes products of experts by kernels for 9.0 and by those for 8.0, and prints what came
//! of it. `kernel_trial/` starts it.

mod cases;

use crate::failure::Result;
use crate::kernel_trial::{DEADLINE, ExpertWidths};
use crate::stdout::print_json;
use clap::Args;

/// Flags of the hidden command.
#[derive(Debug, Args)]
pub struct TryKernelsArgs {
    /// The GPU's number
    #[arg(long)]
    gpu: usize,
    #[command(flatten)]
    widths: ExpertWidths,
}

/// Prints the verdict as JSON.
///
/// # Errors
/// Those of standard output.
pub(crate) fn try_kernels(args: &TryKernelsArgs) -> Result {
    // A process whose starter is gone would hold the GPU as long as a kernel hangs.
    // SAFETY: has this process killed when its starter ends, and at the latest after this time.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::alarm(2 * DEADLINE.as_secs() as u32);
    }
    print_json(&cases::verdict(args.gpu, &args.widths))
}
