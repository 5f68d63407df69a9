//! Sessions before their first step: what lives across steps is leased.

use crate::Result;
use crate::losses::Losses;
use crate::routers::Routers;
use crate::session::{PassOrders, Session};
use crate::shapes::shape_of_a_step;
use crate::snapshot::{CopyPlace, StateOnDevice};
use crate::sum_of_ranks::SumOfRanks;
use collectives::Alone;
use kernels::cpu::Cpu;
use kernels::meta::{FlopCounter, Meta};
use kernels::{Kernels, Target};
use memory::{Home, Homes, Layer, Memory, Phase, Rank};
use model::{BatchShape, Computation, LossPart, Model};
use optim::{Optimizer, Recipe};
use scratch::ScratchFolder;
use settings::{BetweenSteps, Settings, StepObjective};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use units::{Gradients, Ranks, Weights, Zero};

impl Session {
    /// A session on the processor, alone or as the one rank of a group; its weights are zero until they are set.
    ///
    /// # Errors
    /// [`SessionError::OutOfMemory`](crate::SessionError::OutOfMemory) if what lives across steps does not fit.
    pub fn on_cpu(settings: Settings, memory: &Memory) -> Result<Session> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let dtype = settings.narrowest_dtype();
        let kernels = match &settings.ranks {
            Some(_) => Cpu::in_group(memory, dtype, Arc::new(Alone))?,
            None => Cpu::new(memory, dtype)?,
        };
        Session::new(settings, memory, Box::new(kernels))
    }

    /// A session on shapes, which leases what the target would, computes nothing, and counts operations.
    ///
    /// # Errors
    /// As [`Session::on_cpu`].
    pub fn on_shapes(
        settings: Settings,
        memory: &Memory,
        target: Target,
        flops: FlopCounter,
    ) -> Result<Session> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        let dtype = settings.narrowest_dtype();
        let kernels =
            Meta::new(memory, target, dtype, flops)?.of_rank(settings.rank_of_all().number);
        Session::new(settings, memory, Box::new(kernels))
    }

    /// A session on kernels that work in `memory`; its weights are zero until they are set.
    ///
    /// # Errors
    /// As [`Session::on_cpu`].
    pub fn on_kernels(
        settings: Settings,
        memory: &Memory,
        kernels: Box<Kernels>,
    ) -> Result<Session> {
        let _place = memory.enter(Phase::Load, Layer::Whole);
        Session::new(settings, memory, kernels)
    }

    fn new(settings: Settings, memory: &Memory, kernels: Box<Kernels>) -> Result<Session> {
        let architecture = settings.architecture();
        let layout = Rc::new(settings.layout(&architecture)?);
        let dtype = settings.dtype;
        let computation = Computation {
            dtype,
            seq: settings.seq,
            head_chunk: settings.head_chunk,
        };
        let model = Model::new(architecture, layout.clone(), memory, &*kernels, computation)?;
        let (homes, ranks) = (&settings.homes, settings.ranks.as_ref());
        let mut weights = Weights::lease(memory, &layout, dtype, homes, ranks)?;
        let matrices = model
            .architecture()
            .parameters
            .matrices_with_step_codes(&layout);
        if matrices.elements() > 0 {
            weights.lease_step_codes(memory, &matrices)?;
        }
        let states = &settings.states;
        let (gradients, home) = (states.gradients, &homes.gradients);
        let adding = ranks.map(|ranks| (ranks, settings.accum));
        let gradients = Gradients::lease(memory, &layout, gradients, home, adding)?;
        let recipe = Recipe {
            hyperparameters: settings.optimizer,
            matrices: settings.matrices(model.architecture(), &layout)?,
            formats: (states.moments, states.master),
            weights: dtype,
            gradients: states.gradients,
        };
        let mut optimizer = Optimizer::lease(memory, &layout, &recipe, homes, ranks)?;
        let rank = settings.rank_of_all();
        let scratch = states_file(&homes.states, memory, rank, &mut optimizer)?;
        let copy_place = settings.checkpoint_copy.then(|| {
            let declared = &model.architecture().parameters;
            let held = StateOnDevice {
                kernels: &*kernels,
                weights: &weights,
                optimizer: &optimizer,
            };
            CopyPlace::lease(memory, &settings, declared, held)
        });
        let architecture = model.architecture();
        let rate = settings.router_bias_rate;
        let routers = Routers::lease(memory, (architecture, &layout), ranks, rate)?;
        let parts = match (settings.objective, architecture.router_losses) {
            (StepObjective::Preferences { .. } | StepObjective::Policy, _) => LossPart::MOST,
            (StepObjective::NextTokens, Some(_)) => LossPart::WITH_ROUTERS,
            (StepObjective::NextTokens, None) => 1,
        };
        let losses = Losses::lease(memory, ranks, settings.accum, parts)?;
        let shape = BatchShape {
            rows: settings.micro_batch,
            seq: settings.part_seq(),
        };
        let held = settings.held(model.layers());
        let saved = architecture.lease_saved(memory, dtype, &settings.policy, (shape, &held))?;
        let names = ["all_fp8_underflows", "sum_of_fp8_underflows"];
        let counted = saved.underflows_counted();
        let underflows_of_ranks = SumOfRanks::lease(memory, names, ranks, counted)?;
        if let Some(ranks) = &settings.ranks {
            kernels.count_ranks_from(ranks.first_of_stage());
        }
        let memory = memory.clone();
        Ok(Session {
            orders: orders(&settings)?,
            memory,
            kernels,
            settings,
            model,
            weights,
            gradients,
            optimizer,
            copy_place: copy_place.transpose()?,
            saved,
            losses,
            routers,
            underflows_of_ranks,
            step: 0,
            updates: 0,
            stop: Box::new(|| false),
            each_micro_batch: Box::new(|_, _| {}),
            in_flight: None,
            finished: None,
            is_half_updated: false,
            _scratch: scratch,
        })
    }
}

/// The orders in which the passes of a micro-batch use units, replays included; empty if all weights stay on the device. They depend on the
/// policy, on how many parts of it a rank has, and on the stage of a pipeline: a step on shapes, with all weights on the device, shows them.
fn orders(settings: &Settings) -> Result<PassOrders> {
    let ranks = settings.ranks.as_ref();
    let is_divided = ranks.is_some_and(|ranks| ranks.zero == Zero::Weights);
    if settings.homes.weights == Home::Device && !is_divided {
        return Ok(PassOrders::new());
    }
    let alone = |ranks: &Ranks| Ranks {
        rank: Rank::ALONE,
        sharing: 1,
        // One rank has everything; where gradients live on the host, stage 0 is refused.
        zero: Zero::States,
        shard_group: None,
        ..ranks.clone()
    };
    let is_needed = |ranks: &&Ranks| ranks.parts_each > 1 || ranks.stage.of > 1;
    let settings = Settings {
        accum: settings.micro_batches_at_a_time(),
        between: BetweenSteps::default(),
        checkpoint_copy: false,
        ranks: ranks.filter(is_needed).map(alone),
        // A pass for the reference has the order of a forward pass.
        objective: settings.objective.with_reference(),
        homes: Homes {
            states: Home::Device,
            weights: Home::Device,
            ..settings.homes.clone()
        },
        ..settings.clone()
    };
    let batch = shape_of_a_step(&settings, settings.seq);
    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
    let mut session = Session::on_shapes(settings, &memory, Target::Cuda, flops)?;
    session.weights.keep_record();
    session.step(&batch)?;
    Ok(session.orders)
}

/// Makes the file in the folder that is the states' home, before anything is computed. None on shapes.
fn states_file(
    home: &Home,
    memory: &Memory,
    rank: Rank,
    optimizer: &mut Optimizer,
) -> Result<Option<ScratchFolder>> {
    let (Home::Disk(path), Some(bytes), false) = (home, optimizer.disk_bytes(), memory.is_shapes())
    else {
        return Ok(None);
    };
    sweep_other_ranks(path, rank);
    let folder = ScratchFolder::open(path)?;
    optimizer.use_file(folder.create("optimizer-states", bytes)?);
    Ok(Some(folder))
}

/// Removes folders of a killed run's ranks that are no rank's of this run, because that run had more of them.
fn sweep_other_ranks(path: &Path, rank: Rank) {
    let (folder, first) = match rank {
        Rank { of: 0 | 1, .. } => (Some(path), 0),
        Rank { number: 0, of } => (path.parent(), of),
        _ => return,
    };
    let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
    for entry in entries.into_iter().flatten().flatten() {
        let name = entry.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("rank-"));
        let number = number.and_then(|number| number.parse::<usize>().ok());
        if number.is_some_and(|number| number >= first) {
            ScratchFolder::sweep(&entry.path());
        }
    }
}
