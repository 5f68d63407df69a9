//! Micro-batches that repeat an earlier one's calls, which a device may then launch together.

use data::MicroBatch;
use kernels::{RaggedDocuments, Section};
use memory::Home;
use model::{Architecture, BatchShape};
use settings::Settings;

/// The name under which a micro-batch's calls can be repeated; none if they cannot. Attention makes other calls where documents are
/// packed, and again others where there are more than cuDNN has room for.
///
/// The first micro-batch of a step differs from later ones: it overwrites gradients, and updates of what is not on the
/// device may run beside it. So does the last if something is not on the device: gradients leave, and states come.
pub(crate) fn section(
    settings: &Settings,
    architecture: &Architecture,
    (index, count): (usize, usize),
    micro: &MicroBatch,
) -> Option<Section> {
    let homes = &settings.homes;
    let all_on_device = homes.states == Home::Device && homes.gradients == Home::Device;
    let is_other = index == 0 || (index + 1 == count && !all_on_device);
    if settings.graphs_off.is_some() || is_other {
        return None;
    }
    let shape = BatchShape {
        rows: micro.rows,
        seq: micro.seq,
    };
    let attention = match (&micro.documents, architecture.ragged_shape(shape)) {
        (None, _) => 0,
        (Some(starts), Some(shape)) => {
            match RaggedDocuments::fits(shape, starts, micro.lengths.as_deref()) {
                true => 1,
                false => 2,
            }
        }
        (Some(_), None) => 1,
    };
    Some(Section([micro.rows, micro.seq, attention]))
}
