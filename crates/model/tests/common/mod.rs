//! What the tests of this crate share.
#![allow(dead_code, reason = "every test uses a part of it")]

pub mod harness;
pub mod oracle;
pub mod synthetic;
