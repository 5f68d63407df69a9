//! Groups of ranks: threads, and processes over MPI and NCCL.

mod launchers;
#[path = "../rank/rules.rs"]
mod rules;

mod mpi;
mod nccl;
mod threads;
