//! With everything elsewhere, the device holds what is used, and files of states are what they are without.

use crate::common::elsewhere::{Bits, all_pinned, forms, models, resident, run, with_form};
use crate::common::{plan, session, variants};
use files::{Disk, write_tensors};
use memory::{DType, Home, Homes};
use session::Session;
use settings::Settings;
use std::path::Path;

/// With weights, gradients and states of a larger model elsewhere, the device has a fraction of them.
#[test]
fn the_device_holds_what_is_used() {
    let (_, model) = models(12).swap_remove(0);
    let here = with_form(model, forms()[0], "full", DType::F32);
    let elsewhere = Settings {
        homes: all_pinned(),
        ..here.clone()
    };
    let plans = [&here, &elsewhere].map(plan);
    let persistent = plans.each_ref().map(|plan| plan.persistent_bytes);
    assert!(10 * persistent[1] < persistent[0], "{persistent:?}");
    assert!(2 * plans[1].peak_bytes < plans[0].peak_bytes);
    let Bits { steps, state } = run(&mut session(&here), &here, 0..2, |_| {});
    let actual = run(&mut session(&elsewhere), &elsewhere, 0..2, |_| {});
    assert_eq!(actual.steps, steps);
    assert!(actual.state == state);
    assert!(resident(&elsewhere).homes == here.homes);
}

/// As a checkpoint holds them.
fn save_states(session: &Session, folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let state = session.state();
    write_tensors(&Disk, folder, "optimizer", &state.optimizer(), u64::MAX).unwrap();
}

fn states(folder: &Path) -> Vec<u8> {
    std::fs::read(folder.join("optimizer.safetensors")).unwrap()
}

#[test]
fn saved_states_are_those_of_a_run_without_offload() {
    let [_, _, (_, tied), ..] = variants(3);
    let resident = with_form(tied, forms()[10], "none", DType::F32);
    let offloaded = Settings {
        homes: Homes {
            states: Home::Pinned,
            chunk_bytes: 20_000,
            ..Homes::default()
        },
        ..resident.clone()
    };
    let folder = tempfile::tempdir().unwrap();
    let saved = |settings: &Settings, name: &str| {
        let mut session = session(settings);
        run(&mut session, settings, 0..3, |_| {});
        let path = folder.path().join(name);
        save_states(&session, &path);
        path
    };
    let folders = [saved(&resident, "resident"), saved(&offloaded, "offloaded")];
    let bytes = folders.each_ref().map(|folder| states(folder));
    assert!(bytes[0] == bytes[1]);
    let mut restored = session(&offloaded);
    restored.import_optimizer(&folders[0]).unwrap();
    let again = folder.path().join("again");
    save_states(&restored, &again);
    assert!(states(&again) == bytes[0]);
}
