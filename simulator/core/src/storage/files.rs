//! A file a chunk in the store's own folder, with LMCache 0.5.6's file names and its system calls in their order
//! (`fs_l2_adapter.py`; for the native adapter as strace shows them).
//!
//! - write: stat KEY.data, open KEY.tmp, write, close, rename it to KEY.data
//! - read: open KEY.data, read, close
//! - forget: stat KEY.data, unlink
//!
//! `fs` does the files of a transfer one after another, and several transfers at once on Python's default thread pool.
//! `fs_native` divides a transfer among its threads. Neither syncs. One difference: LMCache's look-up asks the file
//! system for each chunk of a prompt, where the simulator knows the answer.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::buffer::BLOCK;
use super::file::{self, Place};
use super::queue::{Kind, Perform};
use super::{Op, StoreConfig};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adapter {
    Fs,
    FsNative,
}

impl Adapter {
    pub fn named(name: &str) -> Result<Self, String> {
        match name {
            "fs" => Ok(Self::Fs),
            "fs_native" => Ok(Self::FsNative),
            other => Err(format!("adapter {other:?} is not known; use fs or fs_native")),
        }
    }

    /// How many files the adapter writes or reads at once: asyncio's default executor, and `num_workers`.
    pub fn workers(self) -> usize {
        // SAFETY: sysconf has no side effects.
        let cores = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        match self {
            Self::Fs => (usize::try_from(cores).unwrap_or(1) + 4).min(32),
            Self::FsNative => 4,
        }
    }

    /// Divides a transfer's operations into parts that run at once; each part runs one operation after another.
    pub fn parts(self, ops: Vec<Op>) -> Vec<VecDeque<Op>> {
        let count = if self == Self::Fs { 1 } else { self.workers().min(ops.len()).max(1) };
        let (total, mut ops) = (ops.len(), ops.into_iter());
        let part = |index: usize| total / count + usize::from(index < total % count);
        (0..count).map(|index| ops.by_ref().take(part(index)).collect()).collect()
    }
}

/// The path of each chunk's file. The length of the names matters: a directory's listing order depends on it.
#[derive(Clone)]
struct Names {
    folder: PathBuf,
    model: String,
}

impl Names {
    /// The name says: written by one process (of one), in the first group of layers.
    fn data(&self, key: u64) -> PathBuf {
        self.folder.join(format!("{}@0x01000100@0@{key:064x}.data", self.model))
    }
}

pub struct Folder {
    names: Names,
    pub adapter: Adapter,
    /// A chunk's bytes, with the adapter's padding for direct I/O.
    pub file_bytes: u64,
    pub buffered_because: Option<String>,
    keep: bool,
}

impl Folder {
    /// Makes `place.folder`, which must not exist, in a folder that exists. Errors: one line with the folder and the
    /// cure.
    pub fn make(place: &Place, adapter: Adapter, config: &StoreConfig) -> Result<Self, String> {
        let chunk_bytes = config.chunk_bytes;
        let path = place.folder.clone();
        let at = path.display();
        let above = path.parent().filter(|above| above.is_dir());
        let above = above.ok_or_else(|| format!("{at}: is in no folder; make it, or name another"))?;
        file::check_space(&Place { folder: above.to_path_buf(), ..place.clone() })?;
        fs::create_dir(&path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => {
                format!("{at}: exists already; delete it, or name another folder")
            }
            _ => format!("{at}: cannot be made ({error}); name a folder that is writable"),
        })?;
        let whole = chunk_bytes.is_multiple_of(BLOCK as u64);
        let padded = place.direct && adapter == Adapter::FsNative;
        let buffered_because = match (place.direct, whole || padded) {
            (false, _) => Some("direct I/O was not asked for".to_string()),
            (true, false) => {
                Some(format!("chunks of {chunk_bytes} bytes are no whole blocks, and fs pads none"))
            }
            (true, true) => None,
        };
        let file_bytes = if padded { chunk_bytes.div_ceil(BLOCK as u64) * BLOCK as u64 } else { chunk_bytes };
        let names = Names { folder: path.clone(), model: config.model_name.replace('/', "-SEP-") };
        let folder = Self { names, adapter, file_bytes, buffered_because, keep: place.keep };
        folder.try_out().map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => format!("{}: has no O_DIRECT; set odirect: false", path.display()),
            _ => {
                format!("{}: no chunk file can be made there ({error}); name another folder", path.display())
            }
        })?;
        Ok(folder)
    }

    fn try_out(&self) -> io::Result<()> {
        let path = self.names.data(0);
        let made = OpenOptions::new().write(true).create_new(true).custom_flags(self.flags()).open(&path);
        let removed = fs::remove_file(&path);
        made.and(removed)
    }

    fn flags(&self) -> i32 {
        if self.buffered_because.is_none() { libc::O_DIRECT } else { 0 }
    }

    pub fn kept(&self) -> Option<&Path> {
        self.keep.then_some(self.names.folder.as_path())
    }

    /// The work of a thread of the queue.
    pub fn performer(&self) -> Perform {
        let (names, flags) = (self.names.clone(), self.flags());
        Arc::new(move |mut call| {
            let (name, offset, kind) = (names.data(call.file), call.offset, call.kind);
            let done = match kind {
                Kind::Read => read(&name, flags, call.bytes(), offset),
                Kind::Write => write(&name, flags, call.bytes()),
                Kind::Sync => Ok(0),
            };
            done.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
        })
    }

    /// Deletes the chunk's file, if it exists.
    pub fn delete(&self, key: u64) {
        let path = self.names.data(key);
        if path.exists() {
            let _ = fs::remove_file(path);
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.keep {
            let _ = fs::remove_dir_all(&self.names.folder);
        }
    }
}

/// One call, or more where the kernel moves less at once. offset: bytes that earlier calls have moved.
fn read(path: &Path, flags: i32, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if offset > 0 {
        file.seek(SeekFrom::Start(offset))?;
    }
    let mut moved = 0;
    while moved < bytes.len() {
        match file.read(&mut bytes[moved..])? {
            0 => break,
            some => moved += some,
        }
    }
    Ok(moved)
}

fn write(path: &Path, flags: i32, bytes: &[u8]) -> io::Result<usize> {
    if path.exists() {
        return Err(io::Error::from_raw_os_error(libc::EEXIST));
    }
    let unfinished = path.with_extension("tmp");
    let done = write_whole(&unfinished, flags, bytes).and_then(|()| fs::rename(&unfinished, path));
    if done.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    done.map(|()| bytes.len())
}

/// Returns once the file is closed.
fn write_whole(path: &Path, flags: i32, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(flags == 0).custom_flags(flags);
    let mut file: File = options.open(path)?;
    file.write_all(bytes)
}
