//! Checkpoints: saved, cut short, damaged, found again.

mod background;
mod damage;
mod documented;
mod finding;
mod fixture;
mod hostile;
mod no_room;
mod power_cut;
mod ranks;
