//! The source of dropout's random numbers.

use crate::Result;
use kernels::{Dropout, Kernels, random};
use memory::{Buffer, Category, DType, Memory};

/// What distinguishes a micro-batch's random numbers from those of others. A mask is a function of this, of the layer
/// and of the site, so that replays and resumed runs drop the same elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Randomness {
    /// The run's seed.
    pub seed: u64,
    /// The step, from 1.
    pub step: u64,
    /// The micro-batch within the step.
    pub micro_batch: u64,
}

/// The stream of random numbers that dropout draws from. The optimizer's rounding draws from others with the same seed.
const DROPOUT: u32 = 0x6472_6f70;

impl Randomness {
    /// The key of the numbers of one site of the model.
    fn key(self, site: u64) -> u64 {
        let of_step = random::key(self.seed, self.step, DROPOUT);
        let of_micro_batch = random::key(of_step, self.micro_batch, DROPOUT);
        random::key(of_micro_batch, site, DROPOUT)
    }
}

/// A site of a block at which elements are dropped, and their share. The sites of a block have different numbers,
/// because a mask is a function of seed, step, micro-batch, layer and site.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutSite {
    /// Tells the sites of a block apart.
    pub site: u32,
    /// The share that is dropped.
    pub rate: f32,
}

impl DropoutSite {
    /// A site at which nothing is dropped.
    pub const NONE: DropoutSite = DropoutSite { site: 0, rate: 0.0 };
}

/// A site of the model: its layer, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    layer: usize,
    site: u32,
}

/// The keys of a micro-batch, on the device, where a captured micro-batch finds its own each time.
pub struct DropoutKeys {
    places: Vec<Place>,
    /// `[places, 2]` u32: low and high half of each.
    keys: Buffer,
}

impl DropoutKeys {
    /// Leases and uploads a micro-batch's keys for these sites, each with its layer; none if nothing is dropped.
    ///
    /// # Errors
    /// [`ModelError`] if memory is refused, or the device fails.
    pub(crate) fn upload(
        memory: &Memory,
        kernels: &Kernels,
        sites: &[(usize, DropoutSite)],
        randomness: Randomness,
    ) -> Result<Option<DropoutKeys>> {
        let sites = sites.iter().filter(|(_, site)| site.rate > 0.0);
        let places = sites.map(|&(layer, DropoutSite { site, .. })| Place { layer, site });
        let places: Vec<Place> = places.collect();
        if places.is_empty() {
            return Ok(None);
        }
        let key =
            |place: &Place| randomness.key((place.layer as u64) << 32 | u64::from(place.site));
        let halves = |key: u64| [key as u32, (key >> 32) as u32];
        let halves: Vec<u32> = places.iter().map(key).flat_map(halves).collect();
        let shape = [places.len(), 2];
        let mut keys = memory.lease(Category::Input, "dropout_keys", shape, DType::U32)?;
        kernels.upload(keys.view_mut(), bytemuck::cast_slice(&halves))?;
        Ok(Some(DropoutKeys { places, keys }))
    }

    /// Dropout at a site of a layer; none if its rate is 0.
    ///
    /// # Panics
    /// If no stage of the layer declared the site.
    pub(crate) fn at(
        &self,
        layer: usize,
        DropoutSite { site, rate }: DropoutSite,
    ) -> Option<Dropout<'_>> {
        if rate == 0.0 {
            return None;
        }
        let asked = Place { layer, site };
        let row = self.places.iter().position(|place| *place == asked);
        let row = row.unwrap_or_else(|| panic!("no stage declares that it drops at {asked:?}"));
        Some(Dropout {
            probability: rate,
            key: self.keys.view().rows(row..row + 1).reshape([2]),
        })
    }
}
