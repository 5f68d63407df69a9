//! Plans against models that are computed by hand.

mod between;
mod experts;
mod operations;
