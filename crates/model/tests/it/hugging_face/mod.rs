//! Folders in Hugging Face layout: what is read is written again to the bit, and what does not fit is refused by name.

mod aliases;
mod experts;
mod folders;
mod hostile;
mod interrupted;
mod mxfp4;
mod quantised;
mod refused;
mod round_trip;
mod transposed_experts;
mod wrapped;
