//! A disk whose power fails at a chosen operation.

use files::{FileSystem, FolderEntry, OutFile};
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Component, Path};
use std::sync::{Arc, Mutex, MutexGuard};

/// What a disk holds after a power cut, of that which was not made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// Nothing: names are those of the last sync of their folder, bytes those of the last sync of their file.
    Durable,
    /// All names, but of files only what was synced: the rest is empty.
    Names,
    /// All names; half of the bytes that were not synced, and zeros for the other half.
    Torn,
    /// Everything.
    All,
    /// For every folder and file one or the other, by this seed.
    Some(u64),
}

/// A file system in memory that knows what is durable. Clones are handles of the same one.
///
/// It carries out a set number of operations, writes among them, and refuses every later one. [`Self::materialise`]
/// writes into a real folder what a disk could hold at that moment.
#[derive(Clone)]
pub struct PowerCut(Arc<Mutex<State>>);

struct State {
    left: usize,
    done: usize,
    lies: bool,
    nodes: Vec<Node>,
}

#[derive(Clone)]
enum Node {
    Folder { names: Names, durable: Names },
    File { bytes: Vec<u8>, durable: Vec<u8> },
}

/// Names in a folder, and which nodes they are.
type Names = BTreeMap<String, usize>;

impl PowerCut {
    /// An empty disk that carries out `operations`.
    pub fn after(operations: usize) -> Self {
        let root = Node::Folder {
            names: Names::new(),
            durable: Names::new(),
        };
        Self(Arc::new(Mutex::new(State {
            left: operations,
            done: 0,
            lies: false,
            nodes: vec![root],
        })))
    }

    /// A disk of its own with the same content, all of it durable, that carries out `operations`.
    pub fn restarted(&self, operations: usize) -> Self {
        let mut nodes = self.state().nodes.clone();
        for node in &mut nodes {
            match node {
                Node::Folder { names, durable } => *durable = names.clone(),
                Node::File { bytes, durable } => *durable = bytes.clone(),
            }
        }
        Self(Arc::new(Mutex::new(State {
            left: operations,
            done: 0,
            lies: false,
            nodes,
        })))
    }

    /// From now on makes nothing durable, and says that it did: what a save that forgets to sync would leave.
    pub fn lie(&self) {
        self.state().lies = true;
    }

    /// How many operations were carried out.
    pub fn operations(&self) -> usize {
        self.state().done
    }

    /// Whether it had to refuse one.
    pub fn is_off(&self) -> bool {
        self.state().left == 0
    }

    /// Writes what a disk could hold now into an empty folder of the real one.
    ///
    /// # Errors
    /// The system's error.
    pub fn materialise(&self, kept: Kept, into: &Path) -> io::Result<()> {
        self.state().materialise(0, kept, into)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no holder panics")
    }
}

/// Whether a node keeps what is not durable, under [`Kept::Some`].
fn spared(seed: u64, node: usize) -> bool {
    let mixed = (seed ^ ((node as u64) << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed
        .wrapping_add(node as u64)
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
        >> 63
        == 1
}

impl State {
    fn operate(&mut self) -> io::Result<()> {
        if self.left == 0 {
            return Err(io::Error::other("the power is off"));
        }
        self.left -= 1;
        self.done += 1;
        Ok(())
    }

    fn materialise(&self, node: usize, kept: Kept, path: &Path) -> io::Result<()> {
        let kept_here = match kept {
            Kept::Some(seed) if spared(seed, node) => Kept::All,
            Kept::Some(seed) if seed.is_multiple_of(2) => Kept::Torn,
            Kept::Some(_) => Kept::Durable,
            kept => kept,
        };
        match &self.nodes[node] {
            Node::Folder { names, durable } => {
                fs::create_dir_all(path)?;
                let durable_only = match kept {
                    Kept::Some(seed) => !spared(seed, node),
                    kept => kept == Kept::Durable,
                };
                for (name, &child) in if durable_only { durable } else { names } {
                    self.materialise(child, kept, &path.join(name))?;
                }
                Ok(())
            }
            Node::File { bytes, durable } => fs::write(path, left_of(bytes, durable, kept_here)),
        }
    }

    /// The node at a path.
    fn find(&self, path: &Path) -> io::Result<usize> {
        let mut at = 0;
        for part in path.components() {
            if let Component::Normal(part) = part {
                let name = part.to_str().expect("tests use plain names");
                at = *self.names(at)?.get(name).ok_or(ErrorKind::NotFound)?;
            }
        }
        Ok(at)
    }

    fn names(&self, node: usize) -> io::Result<&Names> {
        match &self.nodes[node] {
            Node::Folder { names, .. } => Ok(names),
            Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
        }
    }

    /// The names of the folder that a path is in, and its own name.
    fn place(&mut self, path: &Path) -> io::Result<(&mut Names, String)> {
        let folder = self.find(path.parent().ok_or(ErrorKind::InvalidInput)?)?;
        let name = path.file_name().ok_or(ErrorKind::InvalidInput)?;
        let name = name.to_str().expect("tests use plain names").to_owned();
        match &mut self.nodes[folder] {
            Node::Folder { names, .. } => Ok((names, name)),
            Node::File { .. } => Err(ErrorKind::NotADirectory.into()),
        }
    }

    fn is_empty_or_file(&self, node: usize) -> bool {
        self.names(node).is_ok_and(Names::is_empty) || self.names(node).is_err()
    }

    fn add(&mut self, path: &Path, node: Node) -> io::Result<usize> {
        let index = self.nodes.len();
        let (names, name) = self.place(path)?;
        names.insert(name, index);
        self.nodes.push(node);
        Ok(index)
    }

    fn remove(&mut self, path: &Path) -> io::Result<()> {
        if !self.is_empty_or_file(self.find(path)?) {
            return Err(ErrorKind::DirectoryNotEmpty.into());
        }
        let (names, name) = self.place(path)?;
        names.remove(&name);
        Ok(())
    }
}

/// What is left of a file whose `durable` part was synced.
fn left_of(bytes: &[u8], durable: &[u8], kept: Kept) -> Vec<u8> {
    match kept {
        Kept::All => bytes.to_vec(),
        Kept::Torn if bytes != durable => {
            let whole = durable.len().max(bytes.len() / 2);
            let mut torn = bytes.to_vec();
            torn[whole..].fill(0);
            torn
        }
        _ => durable.to_vec(),
    }
}

impl FileSystem for PowerCut {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        if state.find(path).is_ok() {
            return Err(ErrorKind::AlreadyExists.into());
        }
        let (names, durable) = (Names::new(), Names::new());
        state.add(path, Node::Folder { names, durable }).map(|_| ())
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn OutFile>> {
        let mut state = self.state();
        state.operate()?;
        let (bytes, durable) = (Vec::new(), Vec::new());
        let node = state.add(path, Node::File { bytes, durable })?;
        let disk = self.clone();
        Ok(Box::new(InMemory { disk, node }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        let node = state.find(from)?;
        if state
            .find(to)
            .is_ok_and(|taken| !state.is_empty_or_file(taken))
        {
            return Err(ErrorKind::DirectoryNotEmpty.into());
        }
        let (names, name) = state.place(from)?;
        names.remove(&name);
        let (names, name) = state.place(to)?;
        names.insert(name, node);
        Ok(())
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        state.remove(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.remove_file(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state();
        state.operate()?;
        let (node, lies) = (state.find(path)?, state.lies);
        if let Node::Folder { names, durable } = &mut state.nodes[node]
            && !lies
        {
            durable.clone_from(names);
        }
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<FolderEntry>> {
        let mut state = self.state();
        state.operate()?;
        let names = state.names(state.find(path)?)?;
        let entries = names.iter().map(|(name, &node)| FolderEntry {
            name: name.clone(),
            is_folder: state.names(node).is_ok(),
        });
        Ok(entries.collect())
    }
}

struct InMemory {
    disk: PowerCut,
    node: usize,
}

impl Write for InMemory {
    fn write(&mut self, more: &[u8]) -> io::Result<usize> {
        let mut state = self.disk.state();
        state.operate()?;
        if let Node::File { bytes, .. } = &mut state.nodes[self.node] {
            bytes.extend_from_slice(more);
        }
        Ok(more.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl OutFile for InMemory {
    fn sync(&mut self) -> io::Result<()> {
        let mut state = self.disk.state();
        state.operate()?;
        let lies = state.lies;
        if let Node::File { bytes, durable } = &mut state.nodes[self.node]
            && !lies
        {
            durable.clone_from(bytes);
        }
        Ok(())
    }
}
