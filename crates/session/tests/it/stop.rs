//! Steps that are broken off, at every place where one can be: nothing is left of them.

use data::{MicroBatch, StepBatch};
use files::TensorSource;
use memory::Memory;
use session::{Session, SessionError, StepOutcome};
use settings::{Config, Settings};
use std::cell::Cell;
use std::rc::Rc;

/// Everything on the device; states, or all that there is, on the host, updated at a step's end, in the next one's forward
/// pass, or in the backward pass, which then is not broken off.
const WAYS: [&[&str]; 6] = [
    &[],
    &["offload.optimizer=pinned", "offload.window=end"],
    &["offload.optimizer=pinned", "offload.window=forward"],
    &[
        "offload.optimizer=pinned",
        "offload.parameters=pinned",
        "offload.gradients=pinned",
        "offload.window=end",
    ],
    &[
        "offload.optimizer=pinned",
        "offload.parameters=pinned",
        "offload.gradients=pinned",
        "offload.window=forward",
        "recompute.spec=full",
    ],
    &[
        "offload.optimizer=pinned",
        "offload.parameters=pinned",
        RELEASE,
        "optim.clip_norm=inf",
        "batch.accum=1",
    ],
];

const RELEASE: &str = "optim.release=backward";

fn settings(set: &[&str]) -> Settings {
    let mut config = Config::default();
    let model = &mut config.model;
    (model.hidden, model.layers, model.heads) = (16, 2, 2);
    (model.kv_heads, model.ffn, model.vocab) = (2, 24, 50);
    model.head_dim = 8;
    (config.data.seq, config.batch.micro, config.batch.accum) = (8, 2, 2);
    let mut all = vec!["train.device=cpu".to_string(), "train.dtype=f32".into()];
    all.extend(set.iter().map(ToString::to_string));
    Settings::new(&config.with(&all).unwrap()).unwrap()
}

fn batch(settings: &Settings, step: usize) -> StepBatch {
    let micro = (0..settings.accum).map(|micro| {
        let seed = 2 * step + micro;
        let token = |at: usize| ((at * at + seed * 31 + at / 7) % settings.model.vocab) as i32;
        let tokens = settings.micro_batch * settings.seq;
        MicroBatch {
            input_ids: (0..tokens).map(token).collect(),
            targets: (1..=tokens).map(token).collect(),
            rows: settings.micro_batch,
            seq: settings.seq,
            part: memory::Rank::ALONE,
            documents: None,
            lengths: None,
            beside: None,
        }
    });
    micro.collect()
}

fn session(settings: &Settings) -> Session {
    let mut session = Session::on_cpu(settings.clone(), &Memory::host()).unwrap();
    session.initialise(3).unwrap();
    session
}

/// Weights and optimizer states, to the bit.
fn state(session: &Session) -> Vec<u8> {
    fn write(source: &dyn TensorSource, bytes: &mut Vec<u8>) {
        for index in 0..source.tensors().len() {
            source.write_to(index, bytes).unwrap();
        }
    }
    let (state, mut bytes) = (session.state(), Vec::new());
    write(&state.weights(), &mut bytes);
    write(&state.optimizer(), &mut bytes);
    bytes
}

/// Step, loss and norm, to the bit.
fn told(outcome: &StepOutcome) -> [u32; 3] {
    let (loss, norm) = (outcome.loss.to_bits(), outcome.grad_norm.to_bits());
    [outcome.step as u32, loss, norm]
}

/// Has a session count how often it asks whether to stop; told to at `place`, it is.
fn stop_at(session: &mut Session, place: usize) -> Rc<Cell<usize>> {
    let asked = Rc::new(Cell::new(0));
    let count = asked.clone();
    session.stop_when(move || count.replace(count.get() + 1) == place);
    asked
}

/// What two steps tell that nobody breaks off, the state after each, and how often each asks.
fn undisturbed(settings: &Settings) -> [([u32; 3], Vec<u8>, usize); 2] {
    let mut session = session(settings);
    [0, 1].map(|step| {
        let asked = stop_at(&mut session, usize::MAX);
        let outcome = session.step(&batch(settings, step)).unwrap();
        (told(&outcome), state(&session), asked.get())
    })
}

#[test]
fn nothing_is_left_of_a_step_that_is_broken_off() {
    for way in WAYS {
        let settings = settings(way);
        let [first, second] = undisturbed(&settings);
        assert!(first.1 != second.1, "the second step changes the state");
        let places = second.2;
        let directions = if way.contains(&RELEASE) { 1 } else { 2 };
        assert!(places >= 2 * directions * settings.accum, "blocks");
        for place in 0..places {
            let mut session = session(&settings);
            // Its update may be left for the step that is broken off.
            session.start_step(&batch(&settings, 0)).unwrap();
            let asked = stop_at(&mut session, place);
            let error = session.start_step(&batch(&settings, 1)).unwrap_err();
            assert!(matches!(error, SessionError::Stopped), "{way:?}: {error}");
            assert_eq!(asked.get(), place + 1, "{way:?}: it ends at once");

            let outcome = session.finish_step().unwrap().unwrap();
            assert_eq!(told(&outcome), first.0, "{way:?} {place}");
            assert!(state(&session) == first.1, "{way:?} {place}: as before");
            let again = session.step(&batch(&settings, 1)).unwrap();
            assert_eq!(told(&again), second.0, "{way:?} {place}");
            assert!(state(&session) == second.1, "{way:?} {place}: as if never");
        }
    }
}
