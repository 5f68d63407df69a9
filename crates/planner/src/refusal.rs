//! Finds the lease at which a run would fail, before the run.

use kernels::Target;
use kernels::meta::FlopCounter;
use memory::{DeviceBytes, Memory, OutOfMemory, Refusal};
use session::{Result, Session, SessionError, shape_of_a_step};
use settings::Settings;

/// The lease that is refused if live device bytes have to stay within `limit`; none if a step fits.
///
/// # Errors
/// As [`crate::Plan::new`].
pub fn first_refused(
    settings: &Settings,
    target: Target,
    limit: u64,
) -> Result<Option<OutOfMemory>> {
    let memory = Memory::shapes();
    memory.set_limit(Some(limit));
    let step = || -> Result {
        let flops = FlopCounter::default();
        let mut session = Session::on_shapes(settings.clone(), &memory, target, flops)?;
        session.step(&shape_of_a_step(settings, settings.seq))?;
        session.between_steps_on_shapes()?;
        Ok(())
    };
    match step() {
        Ok(()) => Ok(None),
        Err(SessionError::OutOfMemory(error)) => Ok(Some(named(&error, target))),
        Err(other) => Err(other),
    }
}

/// The same for a device, which has to hold all reserved bytes. The slab is larger than the peak, because leases lie
/// between others; so leases get less than the device's memory.
///
/// # Errors
/// As [`crate::Plan::new`].
pub fn first_refused_by_device(
    settings: &Settings,
    target: Target,
    (peak_bytes, reserved_bytes): (u64, u64),
    device: DeviceBytes,
) -> Result<Option<OutOfMemory>> {
    let room = device.room();
    if reserved_bytes <= room {
        return Ok(None);
    }
    let within = room.saturating_sub(reserved_bytes - peak_bytes);
    let refused = first_refused(settings, target, within)?;
    let cause = match device.others_are_in_the_way(reserved_bytes) {
        true => memory::Cause::OtherProcess,
        false => memory::Cause::Capacity,
    };
    Ok(refused.map(|error| {
        Refusal {
            limit_bytes: None,
            device_bytes: Some(device),
            cause,
            ..(*error).clone()
        }
        .into()
    }))
}

/// Replaces the device's name by that of the plan, because shapes have no device.
fn named(error: &OutOfMemory, target: Target) -> OutOfMemory {
    let device = match (target, error.space) {
        (Target::Cuda, memory::Space::Device) => "CUDA",
        _ => error.device,
    };
    Refusal {
        device,
        ..(**error).clone()
    }
    .into()
}
