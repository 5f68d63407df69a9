//! The control group of this process, and the memory that it has left.
//!
//! Both versions of Linux's control groups are read. A limit holds for a group and all groups below it, so the group
//! with the least left decides.

use std::path::{Path, PathBuf};

/// A limit on memory of this process's group, or of one above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemoryLimit {
    /// The group's limit.
    pub(crate) limit_bytes: u64,
    /// What the group uses, without pages of files, which the kernel can drop at once.
    pub(crate) used_bytes: u64,
    /// The file that holds the limit.
    pub(crate) file: PathBuf,
}

impl MemoryLimit {
    /// How much may still be used.
    pub(crate) fn left_bytes(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.used_bytes)
    }
}

/// The file names of a version of control groups.
struct Version {
    mount: &'static str,
    limit: &'static str,
    used: &'static str,
    /// The entries of `memory.stat` for pages of files, which are dropped when memory is short.
    cache: [&'static str; 2],
}

const V1: Version = Version {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: ["total_active_file", "total_inactive_file"],
};

const V2: Version = Version {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    used: "memory.current",
    cache: ["active_file", "inactive_file"],
};

/// The limit with the least left; none if there is no limit. `root` is `/`, except in tests.
pub(crate) fn memory_limit(root: &Path) -> Option<MemoryLimit> {
    let groups = std::fs::read_to_string(root.join("proc/self/cgroup")).ok()?;
    let limits = groups.lines().flat_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next().unwrap_or(""), fields.next().unwrap_or("/"));
        if controllers
            .split(',')
            .any(|controller| controller == "memory")
        {
            limits(root, &V1, path)
        } else if controllers.is_empty() {
            limits(root, &V2, path)
        } else {
            Vec::new()
        }
    });
    limits.min_by_key(MemoryLimit::left_bytes)
}

/// The limits of a group and of those above it. Inside a container the group's path may not exist; then the mount
/// itself is the group.
fn limits(root: &Path, version: &Version, path: &str) -> Vec<MemoryLimit> {
    let mount = root.join(version.mount);
    let group = mount.join(path.trim_start_matches('/'));
    let above = group
        .ancestors()
        .take_while(|folder| folder.starts_with(&mount));
    above.filter_map(|folder| limit(folder, version)).collect()
}

fn limit(folder: &Path, version: &Version) -> Option<MemoryLimit> {
    let file = folder.join(version.limit);
    let number =
        |path: &Path| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    // For no limit, version 1 has a number near 2^63 and version 2 the word `max`.
    let limit_bytes = number(&file).filter(|bytes| *bytes < 1 << 60)?;
    let used = number(&folder.join(version.used)).unwrap_or(0);
    let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let cache = stat.lines().filter_map(|line| {
        let (name, bytes) = line.split_once(' ')?;
        version
            .cache
            .contains(&name)
            .then(|| bytes.parse::<u64>().ok())?
    });
    Some(MemoryLimit {
        limit_bytes,
        used_bytes: used.saturating_sub(cache.sum()),
        file,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        root
    }

    #[test]
    fn the_group_above_may_be_the_tighter_one() {
        let root = system(&[
            ("proc/self/cgroup", "0::/pods/a\n"),
            ("sys/fs/cgroup/pods/a/memory.max", "max\n"),
            ("sys/fs/cgroup/pods/memory.max", "1000\n"),
            ("sys/fs/cgroup/pods/memory.current", "700\n"),
            (
                "sys/fs/cgroup/pods/memory.stat",
                "anon 500\nactive_file 50\ninactive_file 100\n",
            ),
        ]);
        let limit = memory_limit(root.path()).unwrap();
        assert_eq!(
            (limit.limit_bytes, limit.used_bytes, limit.left_bytes()),
            (1000, 550, 450)
        );
        assert!(limit.file.ends_with("pods/memory.max"));
    }

    #[test]
    fn the_first_version_is_understood_and_no_limit_is_none() {
        let unlimited = "9223372036854771712\n";
        let files = |limit| {
            system(&[
                ("proc/self/cgroup", "5:cpu:/x\n4:memory:/gone\n0::/\n"),
                ("sys/fs/cgroup/memory/memory.limit_in_bytes", limit),
                ("sys/fs/cgroup/memory/memory.usage_in_bytes", "40\n"),
            ])
        };
        assert_eq!(memory_limit(files(unlimited).path()), None);
        let limited = memory_limit(files("100\n").path()).unwrap();
        assert_eq!(limited.left_bytes(), 60);
        assert_eq!(memory_limit(tempfile::tempdir().unwrap().path()), None);
    }
}
