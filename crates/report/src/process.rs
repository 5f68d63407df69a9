//! Records that explain the death of a killed process: its identity, and counts of the kernel.

use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The process of a run, and the kernel's counts when it began.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since the system started, because process numbers are used again.
    pub start_ticks: Option<u64>,
    /// The boot and the namespace of process numbers. In others, the number and the counts mean nothing.
    pub system: Option<String>,
    /// Out-of-memory kills so far: of its control group, of the groups above, and of the machine.
    pub oom_kills: Vec<OomKills>,
}

/// A count of processes that the kernel killed because memory was short.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OomKills {
    /// The file of the count: `memory.events`, in version 1 `memory.oom_control`, and `/proc/vmstat` for the machine.
    pub file: PathBuf,
    /// The count.
    pub count: u64,
}

/// What happened to a process, as far as this system can tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is alive.
    Lives {
        /// Its resident set now.
        resident_bytes: Option<u64>,
    },
    /// It has ended.
    Gone {
        /// By how much the count has risen, of the nearest group that still exists.
        oom_kills: Option<OomKills>,
    },
    /// It ran on another machine, in another container, or before this machine started.
    Elsewhere,
}

impl ProcessRecord {
    /// This process.
    pub fn current() -> ProcessRecord {
        let root = Path::new("/");
        let pid = std::process::id();
        ProcessRecord {
            pid,
            start_ticks: start_ticks(root, pid),
            system: system(root),
            oom_kills: counts(root),
        }
    }

    /// What happened to it.
    pub fn fate(&self) -> Fate {
        self.fate_under(Path::new("/"))
    }

    fn fate_under(&self, root: &Path) -> Fate {
        let here = system(root);
        if here.is_none() || here != self.system {
            return Fate::Elsewhere;
        }
        if self.start_ticks.is_some() && start_ticks(root, self.pid) == self.start_ticks {
            return Fate::Lives {
                resident_bytes: status_bytes(root, &self.pid.to_string(), "VmRSS:"),
            };
        }
        let risen = |before: &OomKills| {
            Some(OomKills {
                file: before.file.clone(),
                count: count(&before.file)?.saturating_sub(before.count),
            })
        };
        Fate::Gone {
            // A group's count includes the groups below it, so the nearest group is the most precise.
            oom_kills: self.oom_kills.iter().find_map(risen),
        }
    }
}

fn system(root: &Path) -> Option<String> {
    let boot = std::fs::read_to_string(root.join("proc/sys/kernel/random/boot_id")).ok()?;
    let namespace = std::fs::read_link(root.join("proc/self/ns/pid")).ok()?;
    Some(format!("{} {}", boot.trim(), namespace.display()))
}

/// None also for a process that has ended but was not yet waited for.
fn start_ticks(root: &Path, pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(root.join(format!("proc/{pid}/stat"))).ok()?;
    // The name before may have any characters. The state follows; the start time is field 22 of all.
    let (_, fields) = stat.rsplit_once(") ")?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let is_over = matches!(*fields.first()?, "Z" | "X");
    (!is_over).then(|| fields.get(19)?.parse().ok())?
}

/// A figure of a process's memory from its `status` file.
pub(crate) fn status_bytes(root: &Path, pid: &str, name: &str) -> Option<u64> {
    let status = std::fs::read_to_string(root.join(format!("proc/{pid}/status"))).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

/// The counts that would include the death of this process, nearest first.
fn counts(root: &Path) -> Vec<OomKills> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let files = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, group) = (fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
        let is_first_version = controllers.split(',').any(|name| name == "memory");
        match (is_first_version, controllers) {
            (true, _) => up_from(
                &root.join("sys/fs/cgroup/memory"),
                group,
                "memory.oom_control",
            ),
            (false, "") => up_from(&root.join("sys/fs/cgroup"), group, "memory.events"),
            _ => Vec::new(),
        }
    });
    let files = files.chain([root.join("proc/vmstat")]);
    files
        .filter_map(|file| count(&file).map(|count| OomKills { file, count }))
        .collect()
}

/// The files of a group and of those above it.
fn up_from(mount: &Path, group: &str, file: &str) -> Vec<PathBuf> {
    let group = mount.join(group.trim_start_matches('/'));
    let folders = group.ancestors();
    let folders = folders.take_while(|folder| folder.starts_with(mount));
    folders.map(|folder| folder.join(file)).collect()
}

/// All three kinds of files have a line `oom_kill N`.
fn count(file: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A system with a process 7 named `a) b`, in a group below another one.
    fn system_of_one(namespace: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let fields = vec!["1"; 18].join(" ");
        put(
            root,
            "proc/7/stat",
            &format!("7 (a) b) R {fields} 4711 0\n"),
        );
        put(root, "proc/7/status", "VmHWM: 9 kB\nVmRSS:\t   3 kB\n");
        put(root, "proc/sys/kernel/random/boot_id", "boot\n");
        put(root, "proc/self/cgroup", "4:cpu:/x\n0::/pod/a\n");
        put(root, "proc/vmstat", "oom_kill 9\n");
        put(
            root,
            "sys/fs/cgroup/pod/memory.events",
            "oom 5\noom_kill 4\n",
        );
        put(root, "sys/fs/cgroup/pod/a/memory.events", "oom_kill 1\n");
        std::fs::create_dir_all(root.join("proc/self/ns")).unwrap();
        std::os::unix::fs::symlink(namespace, root.join("proc/self/ns/pid")).unwrap();
        folder
    }

    fn record(root: &Path) -> ProcessRecord {
        ProcessRecord {
            pid: 7,
            start_ticks: start_ticks(root, 7),
            system: system(root),
            oom_kills: counts(root),
        }
    }

    #[test]
    fn a_process_is_known_by_its_number_and_its_start() {
        let system = system_of_one("pid:[1]");
        let root = system.path();
        let record = record(root);
        assert_eq!(record.start_ticks, Some(4711));
        let resident_bytes = Some(3 * 1024);
        assert_eq!(record.fate_under(root), Fate::Lives { resident_bytes });
        let other = ProcessRecord {
            start_ticks: Some(4712),
            ..record.clone()
        };
        assert!(matches!(other.fate_under(root), Fate::Gone { .. }));
        let elsewhere = system_of_one("pid:[2]");
        assert_eq!(record.fate_under(elsewhere.path()), Fate::Elsewhere);
    }

    #[test]
    fn the_nearest_group_that_is_still_there_tells() {
        let system = system_of_one("pid:[1]");
        let root = system.path();
        let record = record(root);
        let counts: Vec<u64> = record.oom_kills.iter().map(|kills| kills.count).collect();
        assert_eq!(counts, [1, 4, 9]);
        let risen = || match record.fate_under(root) {
            Fate::Gone { oom_kills } => oom_kills.unwrap(),
            other => panic!("{other:?}"),
        };
        std::fs::remove_dir_all(root.join("proc/7")).unwrap();
        put(root, "sys/fs/cgroup/pod/memory.events", "oom_kill 6\n");
        assert_eq!(risen().count, 0, "another group's");
        std::fs::remove_dir_all(root.join("sys/fs/cgroup/pod/a")).unwrap();
        assert_eq!(risen().count, 2);
        assert!(risen().file.ends_with("pod/memory.events"));
    }

    #[test]
    fn this_process_lives() {
        assert!(matches!(
            ProcessRecord::current().fate(),
            Fate::Lives { .. }
        ));
    }
}
