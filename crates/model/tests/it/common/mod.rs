//! What the tests of this crate share.

pub mod harness;
pub mod oracle;
pub mod synthetic;
