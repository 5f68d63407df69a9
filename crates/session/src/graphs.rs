//! Micro-batches that repeat an earlier one's calls, which a device may then launch together.

use data::MicroBatch;
use kernels::Section;
use memory::Home;
use settings::Settings;

/// The name under which a micro-batch's calls can be repeated; none if they cannot. Attention makes other calls where documents are
/// packed.
///
/// The first micro-batch of a step differs from later ones: it overwrites gradients, and updates of what is not on the
/// device may run beside it. So does the last if something is not on the device: gradients leave, and states come.
pub(crate) fn section(
    settings: &Settings,
    (index, count): (usize, usize),
    micro: &MicroBatch,
) -> Option<Section> {
    let homes = &settings.homes;
    let all_on_device = homes.states == Home::Device && homes.gradients == Home::Device;
    let is_other = index == 0 || (index + 1 == count && !all_on_device);
    if settings.graphs_off.is_some() || is_other {
        return None;
    }
    let is_packed = usize::from(micro.documents.is_some());
    Some(Section([micro.rows, micro.seq, is_packed]))
}
