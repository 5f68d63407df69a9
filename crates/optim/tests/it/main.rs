//! Optimizers against `torch.optim`, in every home and format.

mod common;

mod adafactor;
mod homes;
mod muon;
mod parts;
mod states;
mod whole_tensors;
