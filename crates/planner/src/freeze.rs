//! What freezing parameters saves.

use kernels::Target;
use kernels::meta::FlopCounter;
use memory::{Memory, format_bytes};
use optim::Hyperparameters;
use serde::Serialize;
use session::{Session, SessionError};
use settings::Settings;

/// The effect of not training some parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PlannedFreeze {
    /// Number of parameters that are trained.
    pub trained_parameters: usize,
    /// Bytes of gradients and optimizer states that frozen parameters do not take, on device, host and disk.
    pub saved_bytes: u64,
    /// Whether all but adapters is frozen.
    #[serde(skip)]
    pub by_adapters: bool,
}

impl PlannedFreeze {
    /// Compares with a session that trains everything; none if nothing is frozen.
    pub(crate) fn new(
        settings: &Settings,
        target: Target,
        session: &Session,
    ) -> Result<Option<PlannedFreeze>, SessionError> {
        if settings.freeze.is_empty() && settings.lora.is_none() {
            return Ok(None);
        }
        let everything = Settings {
            freeze: Vec::new(),
            lora: None,
            optimizer: Hyperparameters {
                faster: None,
                ..settings.optimizer
            },
            ..settings.clone()
        };
        let (memory, flops) = (Memory::shapes(), FlopCounter::default());
        let everything = Session::on_shapes(everything, &memory, target, flops)?;
        let saved = everything.training_bytes();
        Ok(Some(PlannedFreeze {
            trained_parameters: session.model().layout().trained_parameters(),
            saved_bytes: saved.saturating_sub(session.training_bytes()),
            by_adapters: settings.lora.is_some(),
        }))
    }

    /// The same as a sentence.
    pub(crate) fn note(&self, parameters: usize) -> String {
        let by = match self.by_adapters {
            true => "--lora",
            false => "train.freeze",
        };
        format!(
            "{} of {parameters} parameters are trained; freezing the others ({by}) saves {} of gradients and optimizer \
             states ({} bytes)",
            self.trained_parameters,
            format_bytes(self.saved_bytes),
            self.saved_bytes
        )
    }
}
