//! Micro-batches that are asked for again as they were: a device may launch each of them at once.

use data::MicroBatch;
use kernels::Section;
use memory::Home;
use settings::Settings;

/// The name under which a micro-batch of a step is asked for again; none if it is asked for as it comes.
///
/// The first one of a step is another than those after it: it overwrites gradients, and what is not on the device may be
/// updated beside it. So is the last, where it is not all on the device: gradients leave, and what the update needs comes.
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
    let packed = usize::from(micro.documents.is_some());
    Some(Section([micro.rows, micro.seq, packed]))
}
