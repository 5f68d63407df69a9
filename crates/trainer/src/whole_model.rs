//! The model for pictures and text whose text part a run trained: exports copy the rest of it from the folder that the run started from.

use crate::failure::{Failure, Result};
use crate::model_tokens::json;
use checkpoint::{LeftOutWeights, STATE_FILE};
use model::{Architecture, Attention, ModelConfig, ModelWeights, Origin, Parameters, WholeModel};
use std::path::Path;

/// What exports of a model copy: from its folder, or, if that is a checkpoint's, from the one that its run started from. A folder that
/// cannot be read has none; who loads the model says why.
pub(crate) fn left_out(folder: &Path, model: &ModelConfig) -> Option<LeftOutWeights> {
    let mut state = json(&folder.join(STATE_FILE));
    if !state.is_null() {
        return serde_json::from_value(state["left_out"].take()).ok();
    }
    let architecture = Architecture::of(model, Attention::default());
    let weights = ModelWeights::open(folder, &architecture.parameters).ok()?;
    let whole = WholeModel::of(Origin::read(folder).ok()?, weights)?;
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.into());
    Some(LeftOutWeights {
        folder: folder.to_string_lossy().into_owned(),
        beginnings: whole.beginnings().map(Into::into).collect(),
        bytes: whole.untrained_bytes(),
    })
}

/// The model that an export completes; none, which is said, if its folder no longer has all that was left out.
pub(crate) fn whole_model<'a>(
    left_out: Option<&LeftOutWeights>,
    parameters: &'a Parameters,
) -> Option<WholeModel<'a>> {
    let left_out = left_out?;
    let opened = open(left_out, parameters);
    let say = |why: &Failure| {
        let names = left_out.beginnings.iter().map(|name| format!("`{name}*`"));
        tracing::warn!(
            "the text model is written alone, without the tensors of {}: {why}; with the folder that the run started from in its place, \
             an export has them",
            names.collect::<Vec<_>>().join(", ")
        );
    };
    opened.inspect_err(say).ok()
}

/// Opens the folder with what was left out.
fn open<'a>(left_out: &LeftOutWeights, parameters: &'a Parameters) -> Result<WholeModel<'a>> {
    let folder = Path::new(&left_out.folder);
    let origin = Origin::read(folder)?;
    let whole = WholeModel::of(origin, ModelWeights::open(folder, parameters)?);
    let is_all = |whole: &WholeModel| {
        whole.beginnings().eq(left_out.beginnings.iter())
            && whole.untrained_bytes() == left_out.bytes
    };
    whole.filter(is_all).ok_or_else(|| Failure::Malformed {
        path: folder.into(),
        reason: "it no longer has them".into(),
    })
}

/// Bytes that an export copies, if the folder still has them.
pub(crate) fn copied_bytes(left_out: &LeftOutWeights, model: &ModelConfig) -> u64 {
    let architecture = Architecture::of(model, Attention::default());
    open(left_out, &architecture.parameters).map_or(0, |whole| whole.untrained_bytes())
}
