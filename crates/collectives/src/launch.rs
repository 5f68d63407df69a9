//! Which rank this process is, from what its launcher says.

use crate::GroupError;
use crate::Result;
use std::fmt;

/// Who started the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// Open MPI's `mpirun`.
    OpenMpi,
    /// `mpiexec` of MPICH and its relatives, or `srun --mpi=pmi2`.
    Mpich,
    /// `srun`, with an MPI library that only `srun` knows.
    Slurm,
    /// `torchrun`, or whoever else sets `RANK` and `WORLD_SIZE`.
    Torchrun,
}

impl Launcher {
    /// Whether MPI can start from the variables that it sets.
    pub(crate) fn has_mpi(self) -> bool {
        self != Launcher::Torchrun
    }
}

impl fmt::Display for Launcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Launcher::OpenMpi => "Open MPI's mpirun",
            Launcher::Mpich => "mpiexec",
            Launcher::Slurm => "srun",
            Launcher::Torchrun => "torchrun",
        })
    }
}

/// This process among those that were started together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Its number, from 0.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
    /// Its number on this machine, from 0.
    pub local_rank: usize,
    /// Who started it.
    pub launcher: Launcher,
    /// Where ranks meet, `host:port`, if the launcher says it.
    pub(crate) meeting: Option<String>,
}

/// Variables of a launcher: the rank, the number of ranks, the rank's number on this machine. Of several names the
/// first that is set counts.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static [&'static str],
    local_rank: &'static [&'static str],
}

const OPEN_MPI: Names = Names {
    launcher: Launcher::OpenMpi,
    rank: "OMPI_COMM_WORLD_RANK",
    size: &["OMPI_COMM_WORLD_SIZE"],
    local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
};

const MPICH: Names = Names {
    launcher: Launcher::Mpich,
    rank: "PMI_RANK",
    size: &["PMI_SIZE"],
    local_rank: &["MPI_LOCALRANKID", "SLURM_LOCALID"],
};

const SLURM: Names = Names {
    launcher: Launcher::Slurm,
    rank: "SLURM_PROCID",
    size: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
    local_rank: &["SLURM_LOCALID"],
};

const TORCHRUN: Names = Names {
    launcher: Launcher::Torchrun,
    rank: "RANK",
    size: &["WORLD_SIZE"],
    local_rank: &["LOCAL_RANK"],
};

impl Launch {
    /// Reads the environment; none without a launcher. Loads no library and contacts no other rank.
    ///
    /// # Errors
    /// [`GroupError::Launch`] if it contradicts itself or lacks something.
    pub fn from_environment() -> Result<Option<Launch>> {
        Launch::read(|name| std::env::var(name).ok())
    }

    /// The same from any variables.
    ///
    /// # Errors
    /// As for [`Launch::from_environment`].
    pub fn read(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Launch>> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let has = |name: &str| set(name).is_some();
        let by_torchrun = has(TORCHRUN.rank) || has(TORCHRUN.size[0]);
        let torchrun = || {
            let launch = TORCHRUN.read(&set)?;
            Ok(Launch {
                meeting: meeting(&set)?,
                ..launch
            })
        };
        // `srun torchrun` starts one task a node, whose children see the variables of both.
        if by_torchrun && has("TORCHELASTIC_RUN_ID") {
            return torchrun().map(Some);
        }
        let names = if has(OPEN_MPI.rank) || has(OPEN_MPI.size[0]) {
            OPEN_MPI
        } else if has(MPICH.rank) || has(MPICH.size[0]) {
            MPICH
        } else if is_slurm_task(&set) {
            SLURM
        } else if by_torchrun {
            return torchrun().map(Some);
        } else {
            return Ok(None);
        };
        let launch = names.read(&set)?;
        for (name, ours) in [
            (TORCHRUN.rank, launch.rank),
            (TORCHRUN.size[0], launch.size),
        ] {
            if set(name).is_some_and(|theirs| theirs != ours.to_string()) {
                return Err(GroupError::Launch(format!(
                    "{name} is {}, but {} started this process as rank {} of {}: unset {name}",
                    set(name).unwrap_or_default(),
                    names.launcher,
                    launch.rank,
                    launch.size
                )));
            }
        }
        Ok(Some(launch))
    }
}

/// Whether `srun` started this process. The script of `sbatch` sees most of its variables too, but is no rank: the
/// variables of a step and of a process manager are missing.
fn is_slurm_task(set: &impl Fn(&str) -> Option<String>) -> bool {
    let managed = ["PMIX_RANK", "PMI_FD", "PMI2_RANK"]
        .iter()
        .any(|name| set(name).is_some());
    let several = set("SLURM_STEP_ID").is_some()
        && SLURM
            .size
            .iter()
            .find_map(|name| set(name))
            .is_some_and(|size| size != "1");
    set(SLURM.rank).is_some() && (managed || several)
}

impl Names {
    fn read(&self, set: &impl Fn(&str) -> Option<String>) -> Result<Launch> {
        let number = |names: &[&str]| {
            let Some((name, value)) = names.iter().find_map(|name| Some((name, set(name)?))) else {
                return Ok(None);
            };
            let parsed = value.parse::<usize>().map(Some);
            parsed.map_err(|_| self.error(format!("{name} is `{value}`, which is no number")))
        };
        let required = |names: &[&str]| {
            number(names)?.ok_or_else(|| self.error(format!("{} is not set", names[0])))
        };
        let (rank, size) = (required(&[self.rank])?, required(self.size)?);
        if rank >= size {
            return Err(self.error(format!(
                "{} is {rank} where {} is {size}: ranks count from 0",
                self.rank, self.size[0]
            )));
        }
        Ok(Launch {
            rank,
            size,
            local_rank: number(self.local_rank)?.unwrap_or(0),
            launcher: self.launcher,
            meeting: None,
        })
    }

    fn error(&self, problem: String) -> GroupError {
        GroupError::Launch(format!(
            "this looks like a rank of {} ({}, {}), but {problem}; start all ranks by one launcher, or unset these",
            self.launcher, self.rank, self.size[0]
        ))
    }
}

/// Where ranks meet without MPI: where `NCCL_COMM_ID` says, or at the port after `MASTER_PORT`, on which torchrun listens.
fn meeting(set: &impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
    if let Some(id) = set("NCCL_COMM_ID") {
        return Ok(Some(id));
    }
    let (Some(host), Some(port)) = (set("MASTER_ADDR"), set("MASTER_PORT")) else {
        return Ok(None);
    };
    let next = port
        .parse::<u16>()
        .ok()
        .and_then(|port| port.checked_add(1));
    match next {
        // An IPv6 address needs brackets, or its colons would be taken for the one before the port.
        Some(next) if host.contains(':') && !host.starts_with('[') => {
            Ok(Some(format!("[{host}]:{next}")))
        }
        Some(next) => Ok(Some(format!("{host}:{next}"))),
        None => Err(TORCHRUN.error(format!(
            "MASTER_PORT is `{port}`: it must be a port below 65535, since ranks meet on the one after it"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Launch>> {
        Launch::read(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| value.to_string())
        })
    }

    fn launch(variables: &[(&str, &str)]) -> Launch {
        read(variables).unwrap().unwrap()
    }

    fn sentence(variables: &[(&str, &str)]) -> String {
        match read(variables) {
            Err(GroupError::Launch(sentence)) => sentence,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn without_a_launcher_there_is_no_group() {
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("LOCAL_RANK", "3"), ("RANK", "")]), Ok(None));
    }

    #[test]
    fn launchers_are_known_by_their_variables() {
        let open_mpi = launch(&[
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ]);
        let expected = Launch {
            rank: 3,
            size: 4,
            local_rank: 1,
            launcher: Launcher::OpenMpi,
            meeting: None,
        };
        assert_eq!(open_mpi, expected);
        let mpich = launch(&[
            ("PMI_RANK", "1"),
            ("PMI_SIZE", "2"),
            ("MPI_LOCALRANKID", "1"),
        ]);
        assert_eq!((mpich.launcher, mpich.local_rank), (Launcher::Mpich, 1));
        let torchrun = launch(&[
            ("RANK", "9"),
            ("WORLD_SIZE", "16"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "node0"),
            ("MASTER_PORT", "29500"),
        ]);
        assert_eq!(torchrun.meeting.as_deref(), Some("node0:29501"));
        assert_eq!(torchrun.launcher, Launcher::Torchrun);
        let by_address = launch(&[
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "fd00::7"),
            ("MASTER_PORT", "29500"),
        ]);
        assert_eq!(by_address.meeting.as_deref(), Some("[fd00::7]:29501"));
    }

    #[test]
    fn a_batch_script_is_no_rank_and_its_tasks_are() {
        let script = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_LOCALID", "0"),
        ];
        assert_eq!(read(&script), Ok(None));
        let task = [
            ("SLURM_PROCID", "2"),
            ("SLURM_NTASKS", "4"),
            ("SLURM_STEP_ID", "0"),
        ];
        assert_eq!(launch(&task).rank, 2);
        assert_eq!(launch(&task).launcher, Launcher::Slurm);
        let managed = [
            ("SLURM_PROCID", "0"),
            ("SLURM_NTASKS", "1"),
            ("PMIX_RANK", "0"),
        ];
        assert_eq!(launch(&managed).size, 1);
    }

    #[test]
    fn torchrun_under_srun_counts_its_own_ranks() {
        let both = [
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_ID", "0"),
            ("TORCHELASTIC_RUN_ID", "x"),
            ("RANK", "12"),
            ("WORLD_SIZE", "16"),
        ];
        assert_eq!((launch(&both).rank, launch(&both).size), (12, 16));
    }

    #[test]
    fn contradictions_are_sentences() {
        assert!(sentence(&[("RANK", "1")]).contains("WORLD_SIZE is not set"));
        assert!(sentence(&[("WORLD_SIZE", "2")]).contains("RANK is not set"));
        assert!(sentence(&[("RANK", "2"), ("WORLD_SIZE", "2")]).contains("RANK is 2 where"));
        assert!(sentence(&[("RANK", "one"), ("WORLD_SIZE", "2")]).contains("`one`"));
        let both = [
            ("OMPI_COMM_WORLD_RANK", "1"),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("RANK", "0"),
        ];
        assert!(sentence(&both).contains("unset RANK"));
        let port = [
            ("RANK", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "a"),
            ("MASTER_PORT", "65535"),
        ];
        assert!(sentence(&port).contains("MASTER_PORT"));
    }
}
