//! Evaluations and samples between the steps of a run, as planned.

use kernels::Target;
use memory::{Memory, Phase};
use planner::{Plan, first_refused};
use session::{
    Session, SessionError, longest_and_shortest, shape_of_a_micro_batch, shape_of_a_step,
};
use settings::{Config, Settings};

fn settings(set: &[&str]) -> Settings {
    let mut config = Config::default();
    (config.model.hidden, config.model.ffn, config.model.layers) = (64, 176, 2);
    (config.data.seq, config.batch.micro) = (48, 1);
    let set: Vec<String> = ["train.device=cpu", "train.dtype=f32", "recompute.spec=full"]
        .iter()
        .chain(set)
        .map(ToString::to_string)
        .collect();
    Settings::new(&config.with(&set).unwrap()).unwrap()
}

fn plan(settings: &Settings) -> Plan {
    Plan::new(settings, Target::Cpu).unwrap()
}

/// An evaluation in larger micro-batches than training's, and a sample.
const BETWEEN: [&str; 4] = [
    "eval.every=1",
    "eval.path=held-out.txt",
    "eval.micro_batch=40",
    "log.sample_every=1",
];

#[test]
fn the_slab_holds_what_is_computed_between_steps() {
    let (alone, both) = (plan(&settings(&[])), settings(&BETWEEN));
    let plan = plan(&both);
    assert_eq!(
        plan.peak_bytes, alone.peak_bytes,
        "a step needs what it needs"
    );
    assert!(plan.eval_peak_bytes > Some(plan.peak_bytes));
    assert!(plan.sample_peak_bytes < Some(plan.peak_bytes));
    assert!(plan.slab_bytes > alone.slab_bytes);
    assert_eq!(
        (alone.eval_peak_bytes, alone.most_bytes()),
        (None, alone.peak_bytes)
    );

    let memory = Memory::host();
    memory.set_limit(Some(plan.most_bytes()));
    let mut session = Session::on_cpu(both.clone(), &memory).unwrap();
    session.initialise(1).unwrap();
    memory.reserve_slab(plan.slab_bytes).unwrap();
    for _ in 0..2 {
        let step = session
            .step(&shape_of_a_step(&both, both.seq))
            .unwrap()
            .memory;
        assert_eq!(
            (step.peak.bytes, step.slab_bytes),
            (plan.peak_bytes, plan.slab_bytes)
        );
        assert_eq!(step.phase_peaks, plan.phase_peak_bytes);
        let micro = shape_of_a_micro_batch(&both, 40, both.seq);
        let batches = [Ok::<_, SessionError>(micro.clone()), Ok(micro)];
        let evaluation = session.forward().unwrap().evaluate(batches).unwrap();
        assert_eq!(Some(evaluation.peak_bytes), plan.eval_peak_bytes);
        let [(_, wanted), _] = longest_and_shortest(1, both.between.sample.unwrap().tokens);
        let mut forward = session.forward().unwrap();
        forward
            .generate(&[vec![3; 20]], &wanted, |_, _| ())
            .unwrap();
    }
}

#[test]
fn a_limit_below_the_evaluation_is_refused_there() {
    let settings = settings(&BETWEEN);
    let most = plan(&settings).most_bytes();
    let refused = |limit| first_refused(&settings, Target::Cpu, limit).unwrap();
    assert!(refused(most).is_none());
    let place = refused(most - 256).unwrap().place;
    assert_eq!(place.phase, Phase::Eval);
}
