//! The `init` command.

use crate::failure::Failure;
use crate::limits::refuse_model_without_room;
use crate::run_dir::{make_folder, refuse_non_empty};
use crate::stdout::print;
use files::{Disk, narrow};
use memory::DType;
use model::{
    Architecture, Attention, Fresh, Initial, MAX_SHARD_BYTES, Origin, OutgoingWeights, write_model,
};
use settings::Resolved;
use std::cell::RefCell;

/// Writes a freshly initialised model in Hugging Face layout.
pub(crate) fn initialise(resolved: &Resolved) -> Result<(), Failure> {
    let folder = resolved
        .options
        .out
        .as_deref()
        .ok_or_else(|| Failure::Usage("init needs --out DIR".into()))?;
    refuse_non_empty(folder)?;
    let config = &resolved.config;
    let architecture = Architecture::of(&config.model, Attention::default());
    let parameters = architecture.parameters();
    let layout = parameters.layout(|_, _| false);
    let dtype = DType::from(resolved.dtype());
    let fresh = Fresh {
        deviation: config.model.init_std,
        seed: config.train.seed,
    };
    let initial: Vec<(Initial, DType)> = parameters
        .in_layout()
        .map(|parameter| (parameter.initial, parameter.dtype(dtype)))
        .collect();
    // Elements are drawn in their order. A tensor that is written transposed is read several times, and drawn again each time.
    let drawn = RefCell::new((0, fresh.values(initial[0].0, 0)));
    let weights = OutgoingWeights::new(parameters, dtype, |index, elements| {
        let (next, values) = &mut *drawn.borrow_mut();
        let (initial, dtype) = initial[index];
        if elements.start == 0 {
            (*next, *values) = (0, fresh.values(initial, index));
        }
        assert_eq!(*next, elements.start, "elements are asked for in order");
        *next = elements.end;
        let values: Vec<f32> = values.take(elements.len()).collect();
        Ok(narrow(&values, dtype.into()).into_owned().into())
    });
    let files = Origin::default().files(&config.model, config.data.seq, dtype);
    let is_forced = config.memory.force;
    refuse_model_without_room(folder, &weights, &files, MAX_SHARD_BYTES, is_forced)?;
    make_folder(folder, "--out")?;
    write_model(&Disk, folder, &files, &weights, MAX_SHARD_BYTES)?;
    print(format_args!(
        "{} parameters in {}\n",
        layout.parameters(),
        folder.display()
    ))
}
