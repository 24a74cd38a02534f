//! How a store works, what it is asked to do, and what came of it.

use std::path::PathBuf;

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct StoreConfig {
    /// "file" (in `folder`), "ram", or "null", which moves nothing.
    pub device: String,
    /// "slab": slots of one file; "files": a file a chunk, which the store writes and reads as LMCache's `adapter` does
    /// (files.rs). The adapter decides what runs at once: `depth` and `io` have no effect, and `fsync` is refused.
    pub layout: String,
    pub adapter: String,
    pub model_name: String,
    pub folder: PathBuf,
    /// Bytes of a chunk. A slot has as many, rounded up to the 4 KiB that direct I/O moves.
    pub chunk_bytes: u64,
    pub slots: u64,
    pub depth: u32,
    /// "io_uring", "threads", or "auto": io_uring where the kernel lets us.
    pub io: String,
    pub direct: bool,
    /// A write ends once its data is durable (fdatasync).
    pub fsync: bool,
    /// The store compares each read with what it wrote.
    pub verify: bool,
    pub preallocate: bool,
    pub reserve_bytes: u64,
    pub keep_files: bool,
}

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Op {
    pub id: u64,
    pub write: bool,
    pub slot: u64,
    /// The chunk's name; its content carries it.
    pub key: u64,
    /// A write of what another store has: a number from `take_from` and that store's slot. No operation writes that
    /// slot before this one has ended. None: the store makes the content.
    pub source: Option<(usize, u64)>,
}

/// Times are CLOCK_MONOTONIC in seconds: when the operation was queued, given to the device, and ended (durable, if
/// asked).
#[derive(Clone, Debug)]
pub struct Done {
    pub id: u64,
    pub write: bool,
    pub queued_s: f64,
    pub began_s: f64,
    pub ended_s: f64,
    pub bytes: u64,
    pub error: Option<String>,
}
