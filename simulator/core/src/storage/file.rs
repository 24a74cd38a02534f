//! The file that holds the chunks: one slab of equal slots in a folder. It goes with the process.
//!
//! The file has no name from the beginning (O_TMPFILE) or loses it at once: nothing stays behind, not even after
//! SIGKILL. `keep` gives it a name. One file for all chunks measures the device's reads and writes; a file a chunk
//! (files.rs) also measures opening and renaming.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

pub const KEPT_NAME: &str = "kv-chunks.slab";

#[derive(Clone, Debug)]
pub struct Place {
    pub folder: PathBuf,
    pub bytes: u64,
    /// Free bytes that the file system must keep once the slab is full.
    pub reserve: u64,
    pub direct: bool,
    pub preallocate: bool,
    pub keep: bool,
}

pub struct Slab {
    pub file: File,
    /// Why reads and writes go through the page cache; None: they bypass it (O_DIRECT).
    pub buffered_because: Option<String>,
    /// The file's path, if it stays.
    pub path: Option<PathBuf>,
}

/// Errors: one line with the folder and the cure.
pub fn open(place: &Place) -> Result<Slab, String> {
    let at = place.folder.display();
    if !place.folder.is_dir() {
        return Err(format!("{at}: is no folder; make it, or name another"));
    }
    check_space(place)?;
    let (file, buffered_because) = open_past_cache(place)?;
    reserve(&file, place).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            format!(
                "{at}: has no room for {} bytes ({error}); lower the capacity, or name another folder",
                place.bytes
            )
        }
        Some(libc::EFBIG) => {
            format!("{at}: its file system takes no file of {} bytes; lower the capacity", place.bytes)
        }
        _ => format!("{at}: {} bytes cannot be set aside ({error}); name another folder", place.bytes),
    })?;
    Ok(Slab { file, buffered_because, path: place.keep.then(|| place.folder.join(KEPT_NAME)) })
}

pub fn check_space(place: &Place) -> Result<(), String> {
    let at = place.folder.display();
    let path = CString::new(place.folder.as_os_str().as_bytes()).map_err(|_| format!("{at}: not a path"))?;
    let mut found = MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a terminated path and room for the answer, which is all zeros if the call fails.
    let (failed, found) =
        unsafe { (libc::statvfs(path.as_ptr(), found.as_mut_ptr()) != 0, found.assume_init()) };
    if failed {
        return Err(format!(
            "{at}: free space is unknown ({}); name another folder",
            io::Error::last_os_error()
        ));
    }
    if found.f_flag & libc::ST_RDONLY != 0 {
        return Err(format!("{at}: is on a read-only file system; name a folder that is writable"));
    }
    if found.f_blocks == 0 {
        return Ok(()); // a file system without a size of its own
    }
    let free = found.f_bavail * found.f_frsize;
    if place.bytes.saturating_add(place.reserve) > free {
        return Err(format!(
            "{at}: {} bytes and a reserve of {} exceed the {free} free; lower the capacity or the reserve, or name \
             another folder",
            place.bytes, place.reserve
        ));
    }
    Ok(())
}

/// The open file, and why it does not bypass the page cache.
fn open_past_cache(place: &Place) -> Result<(File, Option<String>), String> {
    let said = |error: io::Error| match error.kind() {
        io::ErrorKind::AlreadyExists => {
            format!(
                "{}: exists already; delete it, or name another folder",
                place.folder.join(KEPT_NAME).display()
            )
        }
        _ => format!(
            "{}: no file can be made there ({error}); name a folder that is writable",
            place.folder.display()
        ),
    };
    if !place.direct {
        return Ok((make(place, 0).map_err(said)?, Some("direct I/O was not asked for".to_string())));
    }
    match make(place, libc::O_DIRECT) {
        Ok(file) => Ok((file, None)),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            Ok((make(place, 0).map_err(said)?, Some("the file system has no O_DIRECT".to_string())))
        }
        Err(error) => Err(said(error)),
    }
}

fn make(place: &Place, flags: i32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    if place.keep {
        return named(&mut options, &place.folder.join(KEPT_NAME), flags);
    }
    match options.custom_flags(flags | libc::O_TMPFILE).open(&place.folder) {
        Err(error)
            if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) =>
        {
            let path = place.folder.join(format!(".kv-chunks-{}", std::process::id()));
            let file = named(&mut options, &path, flags)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
        opened => opened,
    }
}

/// Makes a file. A file system refuses O_DIRECT only after it has made the file: the file is removed then.
fn named(options: &mut OpenOptions, path: &Path, flags: i32) -> io::Result<File> {
    if path.exists() {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let opened = options.create_new(true).custom_flags(flags).open(path);
    if opened.is_err() {
        let _ = fs::remove_file(path);
    }
    opened
}

/// Gives the file its length and, if asked and possible, its blocks.
fn reserve(file: &File, place: &Place) -> io::Result<()> {
    if place.preallocate {
        // SAFETY: an open file.
        let failed = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, place.bytes as libc::off_t) } != 0;
        let error = io::Error::last_os_error();
        match failed {
            false => return Ok(()),
            true if error.raw_os_error() != Some(libc::EOPNOTSUPP) => return Err(error),
            true => {}
        }
    }
    file.set_len(place.bytes)
}
