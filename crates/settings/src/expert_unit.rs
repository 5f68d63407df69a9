//! Units of some of a layer's experts (`memory.expert_unit`).

use super::choices::{BaseType, Release};
use super::error::{not_with, refused};
use super::schema::Config;
use crate::Result;
use memory::{Home, Layout, Window};
use optim::OptimizerKind;

/// Refuses groups of experts that a run cannot bring apart.
pub(crate) fn check(config: &Config) -> Result {
    let Some(experts) = config.memory.expert_unit else {
        return Ok(());
    };
    let Some(all) = config.model.experts.as_ref().map(|experts| experts.count) else {
        return refused(
            "memory.expert_unit divides experts into units, and the model has none; leave it out",
        );
    };
    if !all.is_multiple_of(experts) {
        let divisors = (1..=all).filter(|one| all.is_multiple_of(*one));
        let divisors: Vec<String> = divisors.map(|one| one.to_string()).collect();
        return refused(format!(
            "memory.expert_unit is {experts}, which does not divide the {all} experts of a layer; take one of {}",
            divisors.join(", ")
        ));
    }
    let homes = config.homes()?;
    let refused_with = [
        (
            config.optim.kind != OptimizerKind::AdamW,
            "other optimizers than adamw update them as a whole; set optim.kind = \"adamw\"",
        ),
        (
            config.optim.release == Release::Backward,
            "gradients that are released are updated with all of their block; set optim.release = \"step\"",
        ),
        (
            config.own_parts().count > 1,
            "each would come once for every part of a sequence; let a rank have one part",
        ),
        (
            !matches!(config.lora.base_dtype, None | Some(BaseType::Bf16)),
            "a frozen layer's experts are one matrix of codes; set lora.base_dtype = \"bf16\"",
        ),
        (
            homes.weights != Home::Device && homes.window == Window::Forward,
            "a forward pass updates the weights of a block together; set offload.window = \"end\"",
        ),
    ];
    match refused_with.into_iter().find(|(is_set, _)| *is_set) {
        Some((_, why)) => not_with(
            "memory.expert_unit divides the experts of a layer into units",
            why,
            "leave it out",
        ),
        None => Ok(()),
    }
}

/// Refuses groups of `experts` of `all` that the files of a family do not have apart, or that would change the norm of gradients.
pub(crate) fn check_layout(
    layout: &Layout,
    experts: Option<usize>,
    (all, ranks): (usize, usize),
) -> Result {
    let mut units = (0..layout.entries().len()).map(|entry| layout.units_of(entry).len());
    if experts.is_some_and(|experts| experts < all) && units.all(|units| units <= 1) {
        return refused(
            "memory.expert_unit divides experts into units, and files of this family have all experts of a layer in one tensor; \
             leave it out",
        );
    }
    match layout.groups_are_whole_grains(ranks) {
        true => Ok(()),
        false => refused(
            "memory.expert_unit makes units that ranks cannot divide into whole grains of 4,096 elements; take more experts, or leave \
             it out",
        ),
    }
}
