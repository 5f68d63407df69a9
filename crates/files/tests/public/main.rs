//! Tensors in files: written and read again; hostile files are refused.

mod hostile;
mod pieces;
mod power_cut;
mod round_trip;
mod source;
