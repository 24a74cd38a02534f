//! Opens a store's device: a file, a folder of files, memory, or nothing, and the queue in front of it.

use std::sync::Arc;

use super::StoreConfig;
use super::buffer::Buffer;
use super::file::{self, Place, Slab};
use super::files::{Adapter, Folder};
use super::queue::{Perform, Queue, Ring, Threads, perform};

pub enum Device {
    File { queue: Queue, slab: Slab },
    Files { queue: Queue, folder: Folder },
    Ram(Arc<Buffer>),
    Null,
}

/// The device, and how operations reach it. Errors: one line with what, where and the cure.
pub fn open_device(config: &StoreConfig, total: u64) -> Result<(Device, String), String> {
    match config.device.as_str() {
        "null" => Ok((Device::Null, "nothing".to_string())),
        "ram" => {
            let memory = Buffer::new(total as usize, true)
                .map_err(|error| format!("{total} bytes of memory: {error}; lower the capacity"))?;
            Ok((Device::Ram(Arc::new(memory)), "memory".to_string()))
        }
        "file" => open_file(config, total),
        other => Err(format!("device {other:?} is not known; use file, ram or null")),
    }
}

fn open_file(config: &StoreConfig, total: u64) -> Result<(Device, String), String> {
    let place = Place {
        folder: config.folder.clone(),
        bytes: total,
        reserve: config.reserve_bytes,
        direct: config.direct,
        preallocate: config.preallocate,
        keep: config.keep_files,
    };
    match config.layout.as_str() {
        "slab" => {
            let slab = file::open(&place)?;
            let (queue, io) = open_queue(config, &slab)?;
            Ok((Device::File { queue, slab }, io))
        }
        "files" if config.fsync => {
            Err("files are not synced: LMCache's adapters do not; use fsync: false".to_string())
        }
        "files" => {
            let folder = Folder::make(&place, Adapter::named(&config.adapter)?, config)?;
            let queue = Queue::Threads(threads(folder.adapter.workers(), folder.performer())?);
            let io = format!("threads, as LMCache's {}", config.adapter);
            Ok((Device::Files { queue, folder }, io))
        }
        other => Err(format!("layout {other:?} is not known; use slab or files")),
    }
}

fn threads(count: usize, perform: Perform) -> Result<Threads, String> {
    Threads::new(count, perform).map_err(|error| format!("{count} threads cannot be started: {error}"))
}

fn open_queue(config: &StoreConfig, slab: &Slab) -> Result<(Queue, String), String> {
    let threads = |because: &str| {
        let file = slab.file.try_clone().map_err(|error| format!("the file cannot be shared: {error}"))?;
        let queue = threads(config.depth as usize, Arc::new(move |call| perform(&file, call)))?;
        Ok((Queue::Threads(queue), format!("threads{because}")))
    };
    match (config.io.as_str(), Ring::new(config.depth, &slab.file)) {
        ("threads", _) => threads(""),
        ("io_uring" | "auto", Ok(ring)) => Ok((Queue::Ring(Box::new(ring)), "io_uring".to_string())),
        ("auto", Err(error)) => threads(&format!(" (io_uring is refused: {error})")),
        ("io_uring", Err(error)) => Err(format!("io_uring is refused ({error}); use io: auto or threads")),
        (other, _) => Err(format!("io {other:?} is not known; use auto, io_uring or threads")),
    }
}
