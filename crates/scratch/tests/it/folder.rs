//! Locks on folders, files left in them, and disks that are too small.

use kernels::BlockFile;
use scratch::{ScratchError, ScratchFolder};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::{env, fs, io::Read};

/// In the environment of a child: the folder that it holds until it is killed.
const HOLDS: &str = "SCRATCH_TEST_HOLDS";

/// In the environment of a child: the folder in which it makes a file that is larger than it may be.
const IS_LIMITED: &str = "SCRATCH_TEST_IS_LIMITED";

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let name = |entry: fs::DirEntry| entry.file_name().into_string().unwrap();
    let mut names: Vec<_> = entries.map(|entry| name(entry.unwrap())).collect();
    names.sort();
    names
}

/// This program again, for one of the tests below.
fn child(test: &str, variable: &str, folder: &Path) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args([&format!("folder::{test}"), "--exact", "--nocapture"])
        .env(variable, folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

#[test]
fn a_folder_says_what_is_in_it_and_is_empty_at_the_end() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("made/for this");
    let folder = ScratchFolder::open(&path).unwrap();
    let file = folder.create("moments", 5000).unwrap();
    assert_eq!(
        names(&path),
        ["moments.trainer-scratch", "trainer-scratch.txt"]
    );
    assert_eq!(fs::metadata(file.path()).unwrap().len(), 8192);
    let note = fs::read_to_string(path.join("trainer-scratch.txt")).unwrap();
    assert!(note.contains("scratch") && note.contains(&std::process::id().to_string()));
    // Open files keep the folder locked.
    drop(folder);
    assert!(matches!(
        ScratchFolder::open(&path),
        Err(ScratchError::Held { .. })
    ));
    drop(file);
    assert!(!path.exists());
    assert!(path.parent().unwrap().exists());
}

#[test]
fn what_others_have_in_the_folder_stays() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    let scratch = ScratchFolder::open(folder.path()).unwrap();
    let file = scratch.create("moments", 1).unwrap();
    assert_eq!(names(folder.path()).len(), 3);
    drop((scratch, file));
    assert_eq!(names(folder.path()), ["notes.txt"]);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("file"), "").unwrap();
    let refused = ScratchFolder::open(folder.path().join("file/states")).unwrap_err();
    let text = refused.to_string();
    assert!(
        text.contains("cannot use") && text.contains("file/states"),
        "{text}"
    );
}

/// The child's side of the next test.
fn hold(folder: &Path) -> ! {
    let folder = ScratchFolder::open(folder).unwrap();
    let _file = folder.create("moments", 1 << 20).unwrap();
    println!("held");
    loop {
        std::thread::park();
    }
}

fn wait_until_it_holds(child: &mut Child) {
    let mut stdout = child.stdout.take().unwrap();
    let mut text = String::new();
    while !text.contains("held") {
        let mut byte = [0];
        assert_eq!(stdout.read(&mut byte).unwrap(), 1, "{text}");
        text.push(byte[0] as char);
    }
}

#[test]
fn a_second_run_is_refused_and_a_killed_one_is_not_in_the_way() {
    if let Some(folder) = env::var_os(HOLDS) {
        hold(Path::new(&folder));
    }
    let folder = tempfile::tempdir().unwrap();
    let test = "a_second_run_is_refused_and_a_killed_one_is_not_in_the_way";
    let mut other = child(test, HOLDS, folder.path()).spawn().unwrap();
    wait_until_it_holds(&mut other);
    let refused = ScratchFolder::open(folder.path()).unwrap_err().to_string();
    let holder = format!("another run (process {}) keeps its states", other.id());
    assert!(refused.contains(&holder), "{refused}");
    assert_eq!(names(folder.path()).len(), 2, "nothing of it is removed");

    other.kill().unwrap();
    other.wait().unwrap();
    assert_eq!(names(folder.path()).len(), 2, "it could not clean up");
    let scratch = ScratchFolder::open(folder.path()).unwrap();
    assert_eq!(names(folder.path()), ["trainer-scratch.txt"]);
    let file = scratch.create("moments", 4096).unwrap();
    let mut bytes = [1; 4096];
    file.read_at(0, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4096], "a new file reads as 0");
}

/// A folder of a killed run goes with the next one, if the killed run made it.
#[test]
fn folders_of_a_killed_run_go_too() {
    if let Some(folder) = env::var_os(HOLDS) {
        hold(Path::new(&folder));
    }
    let parent = tempfile::tempdir().unwrap();
    let [made, own] = ["made", "own"].map(|name| parent.path().join(name));
    fs::create_dir(&own).unwrap();
    type GoesOn = fn(&Path);
    let opens: GoesOn = |folder| drop(ScratchFolder::open(folder).unwrap());
    for goes_on in [opens, ScratchFolder::sweep] {
        for folder in [&made, &own] {
            let mut killed = child("folders_of_a_killed_run_go_too", HOLDS, folder)
                .spawn()
                .unwrap();
            wait_until_it_holds(&mut killed);
            ScratchFolder::sweep(folder);
            assert_eq!(names(folder).len(), 2, "it is held");
            killed.kill().unwrap();
            killed.wait().unwrap();
            goes_on(folder);
        }
        assert_eq!(names(parent.path()), ["own"]);
        assert!(names(&own).is_empty());
    }
    fs::write(own.join("moments.trainer-scratch"), "").unwrap();
    ScratchFolder::sweep(&own);
    assert_eq!(names(&own).len(), 1, "no run had it");
}

#[test]
fn a_file_larger_than_the_disk_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let scratch = ScratchFolder::open(folder.path()).unwrap();
    let refused = scratch.create("moments", 1 << 60).unwrap_err();
    let ScratchError::Full { needed, free, .. } = &refused else {
        panic!("{refused}");
    };
    assert_eq!(*needed, 1 << 60);
    assert!(*free > 0 && *free < 1 << 60);
    let text = refused.to_string();
    for part in ["moments", &needed.to_string(), &free.to_string()] {
        assert!(text.contains(part), "{text}");
    }
    assert_eq!(names(folder.path()), ["trainer-scratch.txt"]);
}

/// A limit of the process stands for a disk that has less space than it reports: the system refuses to reserve it.
#[test]
fn room_that_the_system_refuses_is_told() {
    let test = "room_that_the_system_refuses_is_told";
    if let Some(folder) = env::var_os(IS_LIMITED) {
        let limit = libc::rlimit {
            rlim_cur: 1 << 20,
            rlim_max: 1 << 20,
        };
        // SAFETY: sets a limit and ignores a signal, in a process of its own.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &limit), 0);
        }
        let scratch = ScratchFolder::open(Path::new(&folder)).unwrap();
        drop(scratch.create("fits", 1 << 20).unwrap());
        let refused = scratch.create("moments", 2 << 20).unwrap_err();
        assert!(matches!(refused, ScratchError::File { .. }), "{refused}");
        let text = refused.to_string();
        assert!(
            text.contains("moments.trainer-scratch`: File too large"),
            "{text}"
        );
        assert_eq!(names(Path::new(&folder)), ["trainer-scratch.txt"]);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = child(test, IS_LIMITED, folder.path()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}
