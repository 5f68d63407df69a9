//! Devices around another device: one holds its work back, one waits for it with a clock.

pub mod scheduled;
pub mod timed;
