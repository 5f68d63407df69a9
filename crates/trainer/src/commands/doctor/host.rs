//! The processor and its memory.

use super::copies::Copies;
use super::rates::{DeviceRates, RateWork};
use super::{bytes, rows};
use crate::failure::Result;
use kernels::Target;
use kernels::cpu::Cpu;
use memory::{DType, Memory};
use planner::memory_size;
use report::Table;
use serde::Serialize;

/// The processor and its memory.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Host {
    /// Threads that operations run on.
    threads: usize,
    /// Memory of the machine; null if the system does not report it.
    memory_bytes: Option<u64>,
    /// Memory that is free or can be freed.
    available_bytes: Option<u64>,
    /// The control group's limit; null without one. Page-locked memory counts towards it.
    group_limit_bytes: Option<u64>,
    /// The most memory that a process may lock; null without a limit.
    locked_limit_bytes: Option<u64>,
    /// Rates in f32, the processor's training type.
    f32: DeviceRates,
    /// Rates of copies beside the computation.
    #[serde(flatten)]
    copies: Copies,
}

impl Host {
    /// Reads the system's figures and measures the rates.
    ///
    /// # Errors
    /// [`Failure::OutOfMemory`] if there is no half a GiB left.
    pub(super) fn new() -> Result<Host> {
        let memory = Memory::host();
        let cpu = Cpu::new(&memory, DType::F32)?;
        Ok(Host {
            threads: rayon::current_num_threads(),
            memory_bytes: memory_size::meminfo_bytes("MemTotal:"),
            available_bytes: memory_size::meminfo_bytes("MemAvailable:"),
            group_limit_bytes: memory_size::group_limit_bytes(),
            locked_limit_bytes: memory_size::locked_limit_bytes(),
            f32: DeviceRates::measure(&cpu, &memory, DType::F32, RateWork::of(Target::Cpu))?,
            copies: Copies::measure(&cpu, &memory)?,
        })
    }

    pub(super) fn table(&self) -> Table {
        let or_none = |limit| bytes(limit).unwrap_or_else(|| "none".into());
        let rates = &self.f32;
        let table = vec![
            ("threads", Some(self.threads.to_string())),
            ("memory", bytes(self.memory_bytes)),
            ("available", bytes(self.available_bytes)),
            (
                "control group's limit",
                Some(or_none(self.group_limit_bytes)),
            ),
            (
                "locked memory's limit",
                Some(or_none(self.locked_limit_bytes)),
            ),
            ("matrix products, f32", Some(rates.products(None))),
            ("copies", Some(rates.copies())),
            ("copies beside it", Some(self.copies.to_string())),
        ];
        rows("processor", table)
    }
}
