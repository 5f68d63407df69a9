//! A rank of a test's job: started by a launcher, it does what its argument says. `tests/it/mpi.rs` and `tests/it/nccl.rs` start it.

mod on_device;
mod rules;

use collectives::{Device, Engine, Group, GroupError, Launch, Patience, start};
use std::sync::Arc;
use std::time::Duration;

/// The exit code of ranks that printed what they saw.
const SEEN: i32 = 7;

fn main() {
    let [what, timeout_s] = std::env::args()
        .skip(1)
        .collect::<Vec<_>>()
        .try_into()
        .expect("a task and a timeout");
    let timeout = Duration::from_secs_f64(timeout_s.parse().expect("seconds"));
    let launch = match Launch::from_environment() {
        Ok(Some(launch)) => launch,
        other => panic!("no launcher started this: {other:?}"),
    };
    let begun = |engine, device| match start(&launch, engine, device, Patience::new(timeout), 0) {
        Ok(group) => group,
        Err(error) => fail(&error),
    };
    let on_cpu = || begun(Engine::Auto, Device::Cpu);
    let on_gpu = || begun(Engine::Auto, Device::Cuda { ordinal: 0 });
    match what.as_str() {
        "rules" => good(on_cpu()),
        "rules on a device" => good(on_device::OnDevice::of(on_gpu())),
        "late" => late(&*on_cpu(), timeout),
        "late on a device" => late(&*on_device::OnDevice::of(on_gpu()), timeout),
        "misfit" => misfit(&*on_cpu()),
        "misfit on a device" => misfit(&*on_device::OnDevice::of(on_gpu())),
        "abort" => abort(&*on_cpu()),
        "abort on a device" => abort(&*on_device::OnDevice::of(on_gpu())),
        other => panic!("no task is called `{other}`"),
    }
}

fn fail(error: &GroupError) -> ! {
    eprintln!("error: {error}");
    std::process::exit(SEEN)
}

/// Tests all rules; then the job ends in order.
fn good(group: Arc<dyn Group>) {
    rules::all(&*group);
    println!(
        "rank {} of {} by {}",
        group.rank(),
        group.size(),
        group.engine()
    );
    if let Some(device) = group.on_device() {
        println!("holding {} bytes of a GPU", device.device_bytes());
    }
    group.leave();
    let after = group.share(b"x");
    assert!(after.is_err(), "a group that was left shares {after:?}");
}

/// The last rank takes part neither in an exchange nor in a share.
fn late(group: &dyn Group, timeout: Duration) {
    let last = group.size() - 1;
    group.share(b"here").unwrap();
    if group.rank() == last {
        std::thread::sleep(timeout * 120);
        panic!("nobody ended this rank");
    }
    let begun = std::time::Instant::now();
    let mut bytes = [0; 4];
    // SAFETY: the bytes live on, untouched.
    let error = unsafe { group.exchange(&[], &[rules::comes(last, &mut bytes)]) }.unwrap_err();
    // A busy machine may be slow, but not as slow as without a deadline.
    let waited = begun.elapsed();
    assert!(waited < timeout * 30, "{waited:?}");
    assert!(matches!(error, GroupError::Late(_)), "{error:?}");
    eprintln!("error: {error}");
    // After the failed exchange the share does not wait: it returns the exchange's error.
    assert_eq!(group.share(b"x"), Err(error));
    group.abort(3);
}

/// Rank 0 sends rank 1 more than it expects.
fn misfit(group: &dyn Group) {
    let mut bytes = [0; 8];
    // SAFETY: the bytes live on, untouched.
    let result = unsafe {
        match group.rank() {
            0 => group.exchange(&[rules::goes(1, &bytes)], &[]),
            1 => group.exchange(&[], &[rules::comes(0, &mut bytes[..5])]),
            _ => Ok(()),
        }
    };
    if group.rank() == 1 {
        fail(&result.unwrap_err());
    }
    std::thread::sleep(Duration::from_secs(60));
}

/// Rank 1 ends all, while the others wait for it.
fn abort(group: &dyn Group) {
    group.share(b"here").unwrap();
    if group.rank() == 1 {
        group.abort(3);
    }
    let mut bytes = [0; 4];
    // SAFETY: the bytes live on, untouched.
    let waited = unsafe { group.exchange(&[], &[rules::comes(1, &mut bytes)]) };
    fail(&waited.unwrap_err());
}
