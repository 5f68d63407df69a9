//! Sessions that only infer, and how steps are stopped.

mod inference;
mod stop;
