//! Watches a GPU while a run is measured, and who else uses it, by NVML, NVIDIA's management library. Without NVML
//! nothing is reported.

mod figures;
#[cfg(feature = "cuda")]
mod nvml;
#[cfg(not(feature = "cuda"))]
#[path = "not_built.rs"]
mod nvml;
mod tenants;
mod warnings;

pub(crate) use figures::GpuFigures;
pub(crate) use warnings::warnings;

use memory::Cause;
use nvml::Gpu;
use planner::OomReport;
use settings::Device;
use std::convert::Infallible;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Time between two readings: short compared with a run, long compared with a reading, which takes about 1 ms.
const PERIOD: Duration = Duration::from_millis(200);

/// Runs `work`, which waits for another process, and watches a GPU meanwhile. There are no figures for the CPU, and
/// none without NVML.
pub(crate) fn watched<T>(device: Device, work: impl FnOnce() -> T) -> (T, Option<GpuFigures>) {
    let Some(gpu) = &Gpu::find(device) else {
        return (work(), None);
    };
    let before = gpu.tenants();
    let (done, readings) = std::thread::scope(|scope| {
        let (stop, stopped) = channel::<Infallible>();
        let reader = scope.spawn(move || {
            let mut readings = vec![gpu.read()];
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                readings.push(gpu.read());
            }
            readings
        });
        let done = work();
        drop(stop);
        (done, reader.join().expect("a reading does not panic"))
    });
    let tenants = [before, gpu.tenants()];
    (
        done,
        Some(GpuFigures::new(gpu.limits(), &readings, &tenants)),
    )
}

/// Adds the other processes on the GPU to the report of a lease that the GPU refused.
pub(crate) fn name_others(report: &mut OomReport, device: Device) {
    if report.device_bytes.is_none() && report.cause != Cause::OtherProcess {
        return;
    }
    let Some(tenants) = Gpu::find(device).map(|gpu| gpu.tenants()) else {
        return;
    };
    // If NVML does not even show this process, it does not know whose memory is whose.
    report.unowned_bytes = tenants.unowned_bytes.filter(|_| tenants.shows_this_process);
    report.other_processes = tenants.others;
}
