//! The figures of one step on shapes.

use crate::gpus;
use crate::room::Needs;
use kernels::meta::FlopCounter;
use kernels::{StepTraffic, Target};
use memory::{ByPhase, LiveLease, Memory, Peak};
use session::{
    PeaksBetween, Result, Session, few_micro_batches, micro_batches_on_shapes,
    shape_of_micro_batches,
};
use settings::Settings;
use std::sync::atomic::{AtomicU64, Ordering};

/// What one step on shapes needs.
pub(crate) struct Figures {
    pub(crate) peak: Peak,
    pub(crate) phase_peaks: ByPhase<u64>,
    pub(crate) slab_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) host_pinned_bytes: u64,
    pub(crate) persistent_bytes: u64,
    pub(crate) recompute_flops_fraction: f64,
    pub(crate) largest_at_peak: Vec<LiveLease>,
    pub(crate) between: PeaksBetween,
    pub(crate) session: Session,
    target: Target,
    made: usize,
    crossed_by_made: StepTraffic,
    /// Bytes that crossed for the last micro-batch.
    by_last: StepTraffic,
}

impl Figures {
    /// The most live device bytes, also between steps: a limit must hold this much.
    pub(crate) fn most_bytes(&self) -> u64 {
        self.between.most(self.peak.bytes)
    }

    /// What a run needs of device and host.
    pub(crate) fn needs(&self) -> Needs {
        let settings = self.session.settings();
        Needs {
            peak_bytes: self.most_bytes(),
            reserved_bytes: self.reserved_bytes,
            device_bytes: self.reserved_bytes + gpus::overhead_bytes(self.target, settings),
            host_pinned_bytes: self.host_pinned_bytes,
            disk_bytes: self.session.disk_bytes().unwrap_or(0),
        }
    }

    /// Bytes that cross in the whole step. Without ranks, each micro-batch that was not made counts like the last one. With ranks it counts
    /// like one more in a step, which takes another step on shapes to find out.
    ///
    /// # Errors
    /// As [`figures`].
    pub(crate) fn crossed(&self) -> Result<StepTraffic> {
        let settings = self.session.settings();
        let at_a_time = settings.micro_batches_at_a_time();
        let not_made = settings.accum - self.made;
        let another = match settings.ranks {
            Some(_) if not_made > 0 => {
                let fewer = self.made - at_a_time;
                another_of_a_rank(settings, self.target, (self.crossed_by_made, fewer))?
            }
            _ => self.by_last,
        };
        Ok(self
            .crossed_by_made
            .plus(another.times(not_made / at_a_time)))
    }
}

/// Steps that plans have made on shapes in this process.
static STEPS: AtomicU64 = AtomicU64::new(0);

/// How many steps plans have made on shapes so far, so that others can see a long plan's progress.
pub fn steps_on_shapes() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

/// Counts a step that is made on shapes.
pub(crate) fn count_step() {
    STEPS.fetch_add(1, Ordering::Relaxed);
}

/// Makes one step on shapes.
pub(crate) fn figures(settings: &Settings, target: Target) -> Result<Figures> {
    figures_of(settings, target, micro_batches_on_shapes(settings))
}

/// The same in less time, for comparisons: of a pipeline the slab may come out a little smaller than a run's.
pub(crate) fn quick_figures(settings: &Settings, target: Target) -> Result<Figures> {
    figures_of(settings, target, few_micro_batches(settings))
}

/// Makes `made` micro-batches of a step on shapes.
fn figures_of(settings: &Settings, target: Target, made: usize) -> Result<Figures> {
    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
    let mut session = Session::on_shapes(settings.clone(), &memory, target, flops.clone())?;
    let persistent_bytes = memory.live_bytes();
    let outcome = session.step(&shape_of_micro_batches(settings, &vec![settings.seq; made]))?;
    count_step();
    let step = outcome.memory;
    let (flops, largest_at_peak) = (flops.by_phase(), memory.largest_at_peak());
    let between = session.between_steps_on_shapes()?;
    let slab_bytes = memory.step_memory().slab_bytes;
    Ok(Figures {
        peak: step.peak,
        phase_peaks: step.phase_peaks,
        slab_bytes,
        reserved_bytes: persistent_bytes + slab_bytes,
        host_pinned_bytes: step.host_pinned_bytes,
        persistent_bytes,
        recompute_flops_fraction: flops.recompute as f64 / (flops.forward + flops.backward) as f64,
        largest_at_peak,
        between,
        session,
        target,
        made,
        crossed_by_made: outcome.crossed,
        by_last: outcome.micro_batch,
    })
}

/// What one more micro-batch of a rank crosses; where virtual stages take turns, one more round of them. It is the difference between a
/// step on shapes, which crosses `crossed`, and one with `fewer`. The last micro-batch is no measure: it ends the reductions, and may be the only one with any.
fn another_of_a_rank(
    settings: &Settings,
    target: Target,
    (crossed, fewer): (StepTraffic, usize),
) -> Result<StepTraffic> {
    let settings = Settings {
        accum: fewer,
        ..settings.clone()
    };
    let (memory, flops) = (Memory::shapes(), FlopCounter::default());
    let batch = shape_of_micro_batches(&settings, &vec![settings.seq; fewer]);
    let mut session = Session::on_shapes(settings, &memory, target, flops)?;
    Ok(crossed.since(session.step(&batch)?.crossed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::StepBatch;
    use memory::Rank;
    use session::shape_of_a_micro_batch;
    use settings::Config;
    use units::Zero;

    /// Only two micro-batches are made on shapes. What is added for the others must equal what they really cross.
    #[test]
    fn what_ranks_send_is_that_of_every_micro_batch() {
        let (micro_batches, size) = (5, 3);
        for zero in Zero::ALL {
            for (reduce, reshard, weights) in [
                ("micro-batch", true, "none"),
                ("micro-batch", false, "none"),
                ("step", true, "none"),
                ("micro-batch", true, "pinned"),
            ] {
                let mut config = Config::default();
                config
                    .join(Rank {
                        number: 1,
                        of: size,
                    })
                    .unwrap();
                let set = [
                    format!("collectives.zero={}", zero.stage()),
                    format!("collectives.reduce={reduce}"),
                    format!("offload.parameters={weights}"),
                    format!("collectives.reshard_after_forward={reshard}"),
                    "collectives.bucket_size=100KB".into(),
                    format!("batch.accum={micro_batches}"),
                    "data.seq=32".into(),
                ];
                // Reducing once a step is refused if gradients are divided.
                let Ok(config) = config.with(&set) else {
                    continue;
                };
                let settings = Settings::new(&config).unwrap();
                let planned = figures(&settings, Target::Cuda).unwrap().crossed();
                let micro = shape_of_a_micro_batch(&settings, settings.micro_batch, settings.seq);
                let whole = StepBatch::from_iter(vec![micro; size * micro_batches]);
                let (memory, flops) = (Memory::shapes(), FlopCounter::default());
                let session = Session::on_shapes(settings, &memory, Target::Cuda, flops);
                let made = session.unwrap().step(&whole).unwrap().crossed;
                assert_eq!(planned.unwrap(), made, "{set:?}");
                assert!(made.total().sent_bytes > 0, "{set:?}");
            }
        }
    }

    /// Comparisons make few micro-batches of a pipeline. They have the peak and the traffic of all.
    #[test]
    fn few_micro_batches_of_a_stage_have_the_peak_of_all() {
        let all = [
            "parallel.pipeline=4",
            "model.layers=8",
            "model.tie_embeddings=false",
            "batch.accum=28",
            "data.seq=64",
        ];
        for set in [
            &["recompute.spec=none"][..],
            &["recompute.spec=full", "offload.activations=block_input"],
            &["recompute.spec=mlp", "offload.optimizer=pinned"],
            &["recompute.spec=none", "collectives.zero=2"],
            &["recompute.spec=full", "parallel.schedule=interleaved"],
            &["recompute.spec=full", "parallel.schedule=zb-h1"],
            &["parallel.schedule=zb-h1", "collectives.zero=2"],
            &["offload.parameters=pinned", "collectives.zero=2"],
            &[
                "parallel.schedule=interleaved",
                "offload.activations=qkv",
                "collectives.zero=2",
            ],
        ] {
            for stage in 0..4 {
                let mut config = Config::default();
                let number = 2 * stage + 1;
                config.join(Rank { number, of: 8 }).unwrap();
                let set = [&all[..], set].concat();
                let set: Vec<String> = set.into_iter().map(String::from).collect();
                let config = config.with(&set).unwrap();
                let settings = Settings::new(&config).unwrap();
                let [exact, quick] = [figures, quick_figures]
                    .map(|figures| figures(&settings, Target::Cuda).unwrap());
                assert!(few_micro_batches(&settings) < settings.accum);
                assert_eq!(quick.peak.bytes, exact.peak.bytes, "{set:?} {stage}");
                let [exact_crossed, quick_crossed] =
                    [&exact, &quick].map(|figures| figures.crossed().unwrap());
                assert_eq!(quick_crossed, exact_crossed, "{set:?} {stage}");
                assert_eq!(quick.host_pinned_bytes, exact.host_pinned_bytes);
                assert!(quick.reserved_bytes <= exact.reserved_bytes);
            }
        }
    }
}
