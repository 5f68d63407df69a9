//! Makes a session for a run: refuses what does not fit, then leases everything that lives across steps.

use super::Run;
use super::resuming::Resumed;
use crate::adapters::fill_adapters;
use crate::device::DeviceStep;
use crate::failure::Result;
use crate::limits::refuse_what_does_not_fit;
use crate::tracer::Tracer;
use kernels::Target;
use memory::{DType, Layer, Phase, format_bytes};
use model::{Model, ModelWeights};
use report::Busy;
use session::Session;
use settings::FloatType;
use std::path::Path;

/// From this size on, leasing host memory is announced.
const LEASING_TAKES_A_WHILE: u64 = 1 << 30;

/// A message before host memory is leased, because zeroing it, and pinning it for a GPU, take seconds for every few GiB.
fn leasing(target: Target, bytes: u64) -> Option<String> {
    let work = match target {
        Target::Cpu => "zeroing",
        Target::Cuda => "pinning and zeroing",
    };
    (bytes >= LEASING_TAKES_A_WHILE).then(|| {
        format!(
            "{work} {} of host memory, which may take a while",
            format_bytes(bytes)
        )
    })
}

/// The type of the weights in a folder, if it is narrower than that of a model.
pub(crate) fn narrower_type(folder: &Path, model: &Model) -> Result<Option<String>> {
    let parameters = &model.architecture().parameters;
    let stored = ModelWeights::open(folder, parameters)?.dtype();
    let is_narrower = (stored, model.dtype()) == (DType::BF16, DType::F32);
    Ok(is_narrower.then(|| FloatType::Bf16.name().to_owned()))
}

impl Run {
    /// Leases everything that lives across steps, fills the weights, and reserves the slab.
    pub(super) fn load(&mut self, step: DeviceStep, resumed: Option<&Resumed>) -> Result<Session> {
        let run = (&self.decided.config, &step.settings);
        refuse_what_does_not_fit(run, &self.plan, &self.device, self.limit)?;
        let memory = self.device.memory();
        memory.set_limit(self.limit);
        self.announce();
        let kernels = match self.decided.config.log.trace {
            false => self.device.kernels(&step, &memory)?,
            true => {
                let tracer = self.tracer.insert(Tracer::new(&memory));
                tracer.kernels(&self.device, &step)?
            }
        };
        self.device.warn_if_full(self.plan.reserved_bytes)?;
        let mut session = Session::on_kernels(step.settings, &memory, kernels)?;
        {
            let _place = memory.enter(Phase::Load, Layer::Whole);
            let options = &self.decided.options;
            let _busy = Busy::with(
                || "loading the model".into(),
                options.quiet || !self.job.leads(),
            );
            match (resumed, &options.init_from) {
                (Some(resumed), folder) => {
                    self.saver.origin_dtype = resumed.state().origin_dtype.clone();
                    self.base = resumed.base(&self.decided.config, folder.as_deref())?;
                    let base = self.base.as_ref();
                    resumed.restore(&mut session, &self.decided.config, base)?;
                }
                (None, Some(folder)) => {
                    self.saver.origin_dtype = narrower_type(folder, session.model())?;
                    if let Some(left_out) = session.incoming().import(folder)? {
                        tracing::info!("{left_out}");
                    }
                }
                (None, None) => session.initialise(self.decided.config.train.seed)?,
            }
            if resumed.is_none() {
                self.base = fill_adapters(&mut session, &self.decided.config, options)?;
            }
        }
        memory.reserve_slab(self.plan.slab_bytes)?;
        Ok(session)
    }

    /// Warns if the plan is above the limit, and announces what may take a while.
    fn announce(&self) {
        let planned = self.plan.most_bytes();
        if let Some(limit) = self.limit.filter(|limit| planned > *limit) {
            let (planned, limit) = (format_bytes(planned), format_bytes(limit));
            tracing::warn!(
                "the plan's peak of {planned} is above the limit of {limit}; --force tries it anyway"
            );
        }
        if let Some(news) = leasing(self.device.target(), self.plan.host_pinned_bytes) {
            tracing::info!("{news}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn only_much_host_memory_is_announced() {
        assert_eq!(leasing(Target::Cuda, GIB - 1), None);
        for (target, words) in [
            (Target::Cuda, "pinning and zeroing 80.0 GiB of host memory"),
            (Target::Cpu, "zeroing 80.0 GiB of host memory"),
        ] {
            let news = leasing(target, 80 * GIB).unwrap();
            assert!(news.starts_with(words), "{news}");
        }
    }
}
