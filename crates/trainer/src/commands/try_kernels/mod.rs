//! The hidden command of a trial's process: computes a family of operations by kernels for 9.0 and by those for 8.0, and prints what came
//! of it. `kernel_trial/` starts it.

mod attention;
mod experts;
mod trial;

use crate::failure::Result;
use crate::kernel_trial::{DEADLINE, Verdict, Widths};
use crate::stdout::print_json;
use clap::Args;
use experts::Experts;

/// Flags of the hidden command.
#[derive(Debug, Args)]
pub struct TryKernelsArgs {
    /// The GPU's number
    #[arg(long)]
    gpu: usize,
    #[command(subcommand)]
    widths: Widths,
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
    print_json(&verdict(args.gpu, args.widths))
}

fn verdict(gpu: usize, widths: Widths) -> Verdict {
    match widths {
        Widths::Attention(widths) => trial::verdict(gpu, attention::cases(&widths)),
        Widths::Experts(widths) => trial::verdict(gpu, Experts::new(widths).cases()),
    }
}
