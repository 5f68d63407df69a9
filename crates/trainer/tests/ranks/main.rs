//! Several ranks, as people start them: the real binary under Open MPI's `mpirun` and MPICH's `mpiexec`, on a model that trains in
//! milliseconds.

#[path = "../cli/batches.rs"]
#[allow(dead_code, reason = "the tests of the command line use the rest")]
mod batches;
#[path = "../cli/metrics.rs"]
#[allow(dead_code, reason = "as above")]
mod metrics;
#[path = "../../../collectives/tests/launchers/mpi.rs"]
#[allow(dead_code, reason = "as above")]
mod mpi;
#[path = "../cli/workplace.rs"]
#[allow(dead_code, reason = "as above")]
mod workplace;

mod job;

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
