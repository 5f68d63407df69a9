//! Jobs beside training.

use checkpoint::BackgroundWriter;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

#[test]
fn a_job_runs_beside_its_caller_and_its_outcome_is_taken_once() {
    let (go_on, waiting) = mpsc::channel();
    let mut writer = BackgroundWriter::new();
    assert!(!writer.is_busy() && writer.take_outcome().is_none());
    assert_eq!(writer.start(move || waiting.recv().unwrap()).unwrap(), None);
    assert!(writer.is_busy() && writer.take_outcome().is_none());
    go_on.send(7).unwrap();
    assert_eq!((writer.wait(), writer.wait()), (Some(7), None));
}

#[test]
fn the_next_job_waits_and_brings_the_outcome_before() {
    let mut writer = BackgroundWriter::new();
    writer.start(|| 1).unwrap();
    assert_eq!(writer.start(|| 2).unwrap(), Some(1));
    assert_eq!(writer.wait(), Some(2));
}

#[test]
fn dropping_it_waits_for_the_job() {
    let done = Arc::new(AtomicBool::new(false));
    let (go_on, waiting) = mpsc::channel();
    let mut writer = BackgroundWriter::new();
    let set = done.clone();
    let job = move || {
        waiting.recv().unwrap();
        set.store(true, Ordering::SeqCst);
    };
    writer.start(job).unwrap();
    let sender = std::thread::spawn(move || go_on.send(()).unwrap());
    drop(writer);
    assert!(done.load(Ordering::SeqCst));
    sender.join().unwrap();
}

#[test]
fn a_panic_arrives_where_the_outcome_is_taken() {
    let mut writer = BackgroundWriter::<()>::new();
    writer.start(|| panic!("a defect")).unwrap();
    let panic = catch_unwind(AssertUnwindSafe(|| writer.wait())).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"a defect"));
}
