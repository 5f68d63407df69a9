//! Several ranks, as people start them: the real binary under Open MPI's `mpirun` and MPICH's `mpiexec`, on a model that trains in
//! milliseconds.

#[path = "../../../../collectives/tests/it/launchers/mpi.rs"]
#[allow(dead_code, reason = "the tests of collectives use the rest")]
mod mpi;

pub mod job;

mod between;
mod checkpoints;
mod controls;
mod doctor;
mod engines;
mod faults;
#[cfg(feature = "cuda")]
mod nccl;
mod pipeline;
mod sharing;
mod signals;
mod stages;
