//! Tests of the public interface; every fixture is written by the test that reads it.

mod bad_files;
mod bad_values;
mod fixture;
mod fuzz;
mod index_files;
mod packing;
mod pairs;
mod shards;
mod sources;
mod steps;
