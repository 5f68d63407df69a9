//! Tensors in files: written, read again, and refused where they are hostile.

mod hostile;
mod pieces;
mod power_cut;
mod round_trip;
mod source;
