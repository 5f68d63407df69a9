//! The ranks that a launcher started, and how fast they send to each other.

use super::rows;
use crate::device::OpenDevice;
use crate::failure::Result;
use crate::job::Job;
use crate::last_words::hostname;
use collectives::Launch;
use kernels::{Exchange, KernelError, Kernels, Queue};
use memory::{Buffer, Category, DType, Memory, Rank, format_bytes};
use report::Table;
use serde::Serialize;
use settings::{Config, Device, Settings};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// The ranks of a job.
#[derive(Clone, Debug, Serialize)]
pub(super) struct RankLinks {
    /// What moves bytes between them.
    engine: String,
    /// How many there are.
    size: usize,
    /// Their machines, each once.
    hosts: Vec<String>,
    /// The rate at which the slowest rank sends to and receives from the others at the same time, each way, in units of
    /// 10^9 bytes a second: `hardware.link_gbps`. Null with one rank.
    link_gbps: Option<f64>,
    /// The rank that took longest, and its machine; null with one rank.
    slowest: Option<String>,
    /// GPU memory that the engine took, on the rank where it took most; null for the CPU.
    engine_bytes: Option<u64>,
}

/// Bytes that a rank sends to all others together, and as many that it receives.
const BYTES: usize = 64 << 20;

/// The number of exchanges, of which the fastest counts.
const REPETITIONS: usize = 5;

impl RankLinks {
    /// Starts the job that a launcher asks for, and measures it. Every rank calls this, and gets the same result.
    ///
    /// # Errors
    /// [`Failure::Ranks`] if ranks cannot reach each other, [`Failure::OutOfMemory`] if there are no 128 MiB left.
    pub(super) fn measure(config: &Config, launch: &Launch) -> Result<(Rc<Job>, RankLinks)> {
        let device = Device::best().of_rank(launch.local_rank);
        let opened = OpenDevice::open(device)?;
        let memory = opened.memory();
        let step = opened.step(Settings::new(&Config::default())?)?;
        let job = Rc::new(Job::start(config, device, Some(launch))?);
        let opened = opened.joining(job.group());
        let kernels = job.agree(opened.kernels(&step, &memory))?;
        let seconds = job.agree(exchanges(&job, &*kernels, &memory))?;
        let all = job.everybodys(&(hostname(), seconds))?;
        let mut hosts: Vec<String> = all.iter().map(|(host, _)| host.clone()).collect();
        hosts.sort();
        hosts.dedup();
        let times = all.iter().enumerate();
        let times = times.filter_map(|(rank, (host, seconds))| Some((rank, host, (*seconds)?)));
        let slowest = times.max_by(|(.., one), (.., other)| one.total_cmp(other));
        let ranks = RankLinks {
            engine: job.engine().unwrap_or_default(),
            size: job.size(),
            hosts,
            link_gbps: slowest.map(|(.., seconds)| BYTES as f64 / seconds / 1e9),
            slowest: slowest.map(|(number, host, _)| {
                let of = job.size();
                format!(
                    "rank {} on {host}",
                    config.parallel.name(Rank { number, of })
                )
            }),
            engine_bytes: job
                .group()
                .and_then(|group| Some(group.on_device()?.device_bytes())),
        };
        Ok((job, ranks))
    }

    pub(super) fn table(&self) -> Table {
        let link =
            |rate| format!("{rate:.2} GB/s each way, a rank: hardware.link_gbps = {rate:.2}");
        let table = vec![
            ("ranks", Some(self.size.to_string())),
            ("over", Some(self.engine.clone())),
            ("machines", Some(self.hosts.join(", "))),
            ("link", self.link_gbps.map(link)),
            ("the slowest", self.slowest.clone()),
            (
                "memory of the engine, a GPU",
                self.engine_bytes.map(format_bytes),
            ),
        ];
        rows("ranks", table)
    }
}

/// Seconds of the fastest exchange, in which this rank sends equally much to each other rank; none if it is alone.
fn exchanges(job: &Job, kernels: &Kernels, memory: &Memory) -> Result<Option<f64>> {
    let Some(rank) = job.rank().filter(|rank| rank.of > 1) else {
        return Ok(None);
    };
    let others = || (0..rank.of).filter(|other| *other != rank.number);
    let bytes = BYTES / (rank.of - 1);
    let lease = |name| memory.lease_persistent(Category::Temporary, name, [bytes], DType::U8);
    let outgoing = lease("outgoing")?;
    let incoming = others().map(|rank| Ok((rank, lease("incoming")?)));
    let mut incoming = incoming.collect::<Result<Vec<_>>>()?;
    let mut least = Duration::MAX;
    // The first exchange makes connections, so it does not count.
    for repetition in 0..=REPETITIONS {
        job.word_of_first("ready")?;
        let start = Instant::now();
        exchange(kernels, &outgoing, &mut incoming)?;
        if repetition > 0 {
            least = least.min(start.elapsed());
        }
    }
    Ok(Some(least.as_secs_f64()))
}

/// Sends the same to all others, and waits.
fn exchange(
    kernels: &Kernels,
    outgoing: &Buffer,
    incoming: &mut [(usize, Buffer)],
) -> Result<(), KernelError> {
    let sends = incoming.iter().map(|(rank, _)| (*rank, outgoing.view()));
    let sends = sends.collect();
    let receives = incoming
        .iter_mut()
        .map(|(rank, buffer)| (*rank, buffer.view_mut()));
    let exchange = Exchange {
        sends,
        receives: receives.collect(),
    };
    // SAFETY: the buffers stay borrowed until the exchange is over, and are different ones.
    unsafe { kernels.start_exchange(exchange) }?;
    kernels.finish(kernels.record(Queue::Collective)?)
}
