//! Tests a disk that fails during a step, at every read and write in turn. The run must end with an error, and what was
//! saved before must equal what a run without the fault saves.

use crate::{Result, Session, SessionError};
use data::{MicroBatch, StepBatch};
use fakes::{DiskFault, Faults};
use files::TensorSource;
use kernels::Fault;
use memory::Memory;
use scratch::ScratchFolder;
use settings::{Config, Settings};
use std::io::{self, ErrorKind};
use std::path::Path;

const STEPS: usize = 2;

fn settings(folder: &Path, set: &[&str]) -> Settings {
    let mut config = Config::default();
    let model = &mut config.model;
    (model.hidden, model.layers, model.heads) = (16, 2, 2);
    (model.kv_heads, model.ffn, model.vocab) = (2, 24, 50);
    model.head_dim = 8;
    (config.data.seq, config.batch.micro, config.batch.accum) = (8, 1, 2);
    let mut all = vec!["train.device=cpu".to_string(), "train.dtype=bf16".into()];
    all.push(format!("offload.path={}", folder.display()));
    all.extend(set.iter().map(ToString::to_string));
    Settings::new(&config.with(&all).unwrap()).unwrap()
}

fn batch(settings: &Settings, step: usize) -> StepBatch {
    let tokens = settings.micro_batch * settings.seq;
    let token = |at: usize| ((at * at + step * 31) % settings.model.vocab) as i32;
    let micro = MicroBatch {
        input_ids: (0..tokens).map(token).collect(),
        targets: (1..=tokens).map(token).collect(),
        rows: settings.micro_batch,
        seq: settings.seq,
        part: memory::Rank::ALONE,
        documents: None,
        lengths: None,
        beside: None,
    };
    StepBatch::from_iter(vec![micro; settings.accum])
}

/// Weights and optimizer states, as a checkpoint holds them.
fn save(session: &Session) -> io::Result<Vec<u8>> {
    let (state, mut bytes) = (session.state(), Vec::new());
    let sources: [&dyn TensorSource; 2] = [&state.weights(), &state.optimizer()];
    for source in sources {
        for index in 0..source.tensors().len() {
            source.write_to(index, &mut bytes)?;
        }
    }
    Ok(bytes)
}

/// Trains and saves after every step. Returns what was saved, and how the run ended.
fn run(settings: &Settings, faults: &Faults) -> (Vec<Vec<u8>>, Result) {
    let mut saved = Vec::new();
    let outcome = train(settings, faults, &mut saved);
    (saved, outcome)
}

fn train(settings: &Settings, faults: &Faults, saved: &mut Vec<Vec<u8>>) -> Result {
    let mut session = Session::on_cpu(settings.clone(), &Memory::host())?;
    let folder = tempfile::tempdir().unwrap();
    let scratch = ScratchFolder::open(folder.path()).unwrap();
    let bytes = session.disk_bytes().expect("states are on a disk");
    let file = scratch.create("states", bytes).unwrap();
    session.optimizer.use_file(faults.on(file));
    session.initialise(3)?;
    for step in 0..STEPS {
        session.step(&batch(settings, step))?;
        match save(&session) {
            Ok(bytes) => saved.push(bytes),
            Err(error) => {
                let file = folder.path().join("checkpoint");
                return Err(SessionError::File {
                    path: file,
                    source: error,
                });
            }
        }
    }
    Ok(())
}

#[test]
fn a_fault_at_any_read_or_write_ends_the_run_with_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let ways: [&[&str]; 2] = [
        &["offload.slab_mib=1", "offload.window=forward"],
        &[
            "offload.window=end",
            "offload.parameters=pinned",
            "offload.gradients=pinned",
        ],
    ];
    for set in ways {
        let settings = settings(folder.path(), set);
        let never = Faults::new(u64::MAX, DiskFault::Short);
        let (undisturbed, outcome) = run(&settings, &never);
        outcome.unwrap();
        assert_eq!(undisturbed.len(), STEPS);
        assert!(undisturbed[0] != undisturbed[1], "steps change the state");
        let operations = never.operations();
        assert!(operations > 10, "{set:?}: {operations} reads and writes");
        for at in 0..operations {
            let fault = match at % 2 {
                0 => DiskFault::Error(ErrorKind::StorageFull),
                _ => DiskFault::Short,
            };
            let (saved, outcome) = run(&settings, &Faults::new(at, fault));
            let error = outcome.expect_err("what fails is told");
            let said = error.to_string();
            assert!(said.contains("states"), "{set:?} at {at}: {said}");
            if let SessionError::Kernel(error) = error {
                assert_eq!(error.fault, Fault::Disk, "{set:?} at {at}: {said}");
            }
            assert!(saved.len() < STEPS);
            assert!(
                saved[..] == undisturbed[..saved.len()],
                "{set:?} at {at}: what was saved is whole"
            );
        }
    }
}
