//! Real devices: chunks in equal slots of a file, of memory or of nothing, or each in its own file. Many operations are
//! in flight at once.
//!
//! `submit` queues operations. `poll` keeps up to `depth` of them in flight and returns those that ended, in the order
//! of their ends. A failed operation is a `Done` with an error; no device makes this code panic.

mod buffer;
mod config;
mod file;
mod files;
mod memory;
mod open;
mod queue;
#[cfg(test)]
#[path = "../tests/storage.rs"]
mod tests;

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use buffer::{BLOCK, Places};
pub use config::{Done, Op, StoreConfig};
pub use memory::Slots;
use open::{Device, open_device};
use queue::{Answer, Call, Kind, TICK};

/// An operation that waits, and the operations that wait for its end.
struct Queued {
    op: Op,
    queued_s: f64,
    then: VecDeque<Op>,
}

struct Frame {
    op: Op,
    queued_s: f64,
    then: VecDeque<Op>,
    began_s: f64,
    moved: usize,
    syncing: bool,
}

pub struct Store {
    config: StoreConfig,
    slot_bytes: usize,
    /// Bytes that each operation moves.
    op_bytes: usize,
    pending: usize,
    waiting: VecDeque<Queued>,
    frames: Vec<Option<Frame>>,
    free: Vec<usize>,
    /// Memory to read into and to write from, one place a frame, allocated on first use.
    reads: Option<Places>,
    writes: Option<Places>,
    sources: Vec<Slots>,
    done: Vec<Done>,
    io: String,
    device: Device,
}

impl Store {
    /// Errors: one line with what and where and the cure.
    pub fn new(config: StoreConfig) -> Result<Self, String> {
        let slot_bytes = config.chunk_bytes.div_ceil(BLOCK as u64) * BLOCK as u64;
        if config.chunk_bytes == 0 || config.slots == 0 || !(1..=4096).contains(&config.depth) {
            return Err(
                "a store needs chunk_bytes and slots of at least 1, and a depth from 1 to 4096".to_string()
            );
        }
        let total = slot_bytes.checked_mul(config.slots).filter(|&bytes| bytes <= i64::MAX as u64);
        let (Some(total), Ok(_)) = (total, i32::try_from(slot_bytes)) else {
            let text = format!("{} slots of {slot_bytes} bytes are too large; shrink them", config.slots);
            return Err(text);
        };
        let (device, io) = open_device(&config, total)?;
        let (op_bytes, places) = match &device {
            Device::Files { folder, .. } => (folder.file_bytes as usize, folder.adapter.workers()),
            _ => (slot_bytes as usize, config.depth as usize),
        };
        Ok(Self {
            slot_bytes: slot_bytes as usize,
            op_bytes,
            pending: 0,
            waiting: VecDeque::new(),
            frames: (0..places).map(|_| None).collect(),
            free: (0..places).rev().collect(),
            reads: None,
            writes: None,
            sources: Vec::new(),
            done: Vec::new(),
            io,
            device,
            config,
        })
    }

    /// Bytes that each operation moves.
    pub fn slot_bytes(&self) -> u64 {
        self.op_bytes as u64
    }

    /// How operations reach the device: "io_uring", "threads (…)", "memory" or "nothing".
    pub fn io(&self) -> &str {
        &self.io
    }

    /// Why operations do not bypass the page cache; None: they do, or there is none.
    pub fn buffered_because(&self) -> Option<&str> {
        match &self.device {
            Device::File { slab, .. } => slab.buffered_because.as_deref(),
            Device::Files { folder, .. } => folder.buffered_because.as_deref(),
            _ => None,
        }
    }

    /// The file, or the folder of files, if it stays.
    pub fn path(&self) -> Option<&Path> {
        match &self.device {
            Device::File { slab, .. } => slab.path.as_deref(),
            Device::Files { folder, .. } => folder.kept(),
            _ => None,
        }
    }

    /// Operations that have not ended.
    pub fn pending(&self) -> usize {
        self.pending
    }

    /// Forgets chunks: deletes their files. All operations on them have ended.
    pub fn forget(&mut self, keys: &[u64]) {
        if let Device::Files { folder, .. } = &self.device {
            keys.iter().for_each(|&key| folder.delete(key));
        }
    }

    /// The slots that other stores may take bytes from; None: they are not in memory.
    pub fn slots(&self) -> Option<Slots> {
        let Device::Ram(memory) = &self.device else { return None };
        Some(Slots { memory: Arc::clone(memory), each: self.slot_bytes, count: self.config.slots })
    }

    /// The number by which writes name these slots as their source. Error: their size is another one.
    pub fn take_from(&mut self, slots: Slots) -> Result<usize, String> {
        if slots.each != self.slot_bytes {
            return Err(format!("slots of {} bytes do not fit those of {}", slots.each, self.slot_bytes));
        }
        self.sources.push(slots);
        Ok(self.sources.len() - 1)
    }

    /// Queues the operations as one transfer. Error: a slot does not exist (nothing is queued then).
    pub fn submit(&mut self, ops: Vec<Op>) -> Result<(), String> {
        if let Some(op) = ops.iter().find(|op| op.slot >= self.config.slots) {
            return Err(format!("slot {} is not one of the store's {}", op.slot, self.config.slots));
        }
        let absent =
            |&(number, slot): &(usize, u64)| self.sources.get(number).is_none_or(|slots| slot >= slots.count);
        if let Some((number, slot)) = ops.iter().filter_map(|op| op.source).find(absent) {
            return Err(format!("slot {slot} is not one of source {number}"));
        }
        let queued_s = monotonic_s();
        self.pending += ops.len();
        let Device::Files { folder, .. } = &self.device else {
            self.waiting.extend(ops.into_iter().map(|op| Queued { op, queued_s, then: VecDeque::new() }));
            return Ok(());
        };
        for mut then in folder.adapter.parts(ops) {
            let first = then.pop_front();
            self.waiting.extend(first.map(|op| Queued { op, queued_s, then }));
        }
        Ok(())
    }

    /// Returns ended operations: at least `least`, or those that ended once `timeout` is over or nothing is pending.
    /// Error: the queue itself broke.
    pub fn poll(&mut self, least: usize, timeout: Duration) -> Result<Vec<Done>, String> {
        let until = Instant::now() + timeout;
        let mut answers = Vec::new();
        self.fill();
        while self.in_flight() > 0 {
            let enough = self.done.len() >= least;
            let left = if enough { Duration::ZERO } else { until.saturating_duration_since(Instant::now()) };
            self.wait(left, timeout > TICK, &mut answers)?;
            let quiet = answers.is_empty();
            // Each ended operation frees its place for the next one at once: the device stays busy.
            for answer in answers.drain(..) {
                self.answered(answer);
                self.fill();
            }
            if (quiet && left.is_zero()) || self.done.len() >= least {
                break;
            }
        }
        self.flush()?;
        Ok(std::mem::take(&mut self.done))
    }

    /// Hands the device the operations that have begun, without a wait.
    fn flush(&mut self) -> Result<(), String> {
        match &mut self.device {
            Device::File { queue, .. } => {
                queue.flush().map_err(|error| format!("the device's queue takes no more: {error}"))
            }
            _ => Ok(()),
        }
    }

    fn in_flight(&self) -> usize {
        self.frames.len() - self.free.len()
    }

    fn wait(&mut self, timeout: Duration, rough: bool, answers: &mut Vec<Answer>) -> Result<(), String> {
        match &mut self.device {
            Device::File { queue, .. } | Device::Files { queue, .. } => queue
                .wait(timeout, rough, answers)
                .map_err(|error| format!("waiting for the device failed: {error}")),
            _ => Ok(()),
        }
    }

    /// Begins waiting operations, up to the depth. Memory and the null device answer at once.
    fn fill(&mut self) {
        while let Some(index) = self.free.pop() {
            let Some(Queued { op, queued_s, then }) = self.waiting.pop_front() else {
                self.free.push(index);
                return;
            };
            self.frames[index] =
                Some(Frame { op, queued_s, then, began_s: monotonic_s(), moved: 0, syncing: false });
            let begun = self.begin(index);
            match (begun, &self.device) {
                (Err(error), _) => self.end(index, Some(error)),
                (Ok(()), Device::File { .. } | Device::Files { .. }) => {}
                (Ok(()), _) => self.ended(index),
            }
        }
    }

    fn begin(&mut self, index: usize) -> Result<(), String> {
        let Some(Frame { op, .. }) = &self.frames[index] else { return Ok(()) };
        let Op { write, slot, key, source, .. } = *op;
        if matches!(self.device, Device::Null) {
            self.moved(index, self.slot_bytes);
            return Ok(());
        }
        if !write || source.is_none() {
            let memory = self.places(write)?;
            if write {
                buffer::stamp(memory.bytes_mut(index), key);
            }
        }
        let Device::Ram(held) = &self.device else { return self.call(index) };
        let (held, other) = (held.at(slot as usize * self.slot_bytes), self.memory_of(index));
        // SAFETY: a slot of ours, and a place or another store's slot: slot_bytes each, aligned to blocks.
        unsafe {
            match write {
                true => memory::copy(other, held, self.slot_bytes),
                false => std::ptr::copy_nonoverlapping(held, other, self.slot_bytes),
            }
        }
        self.moved(index, self.slot_bytes);
        Ok(())
    }

    /// Memory to write from or to read into, made on first use.
    fn places(&mut self, write: bool) -> Result<&mut Places, String> {
        let (count, huge) = (self.frames.len(), !matches!(self.device, Device::Files { .. }));
        let places = if write { &mut self.writes } else { &mut self.reads };
        if places.is_none() {
            let made = Places::new(count, self.slot_bytes, huge, write);
            *places = Some(made.map_err(|error| format!("no memory for transfers: {error}"))?);
        }
        places.as_mut().ok_or_else(String::new)
    }

    /// Where a frame's operation has its bytes outside of the store's own device.
    fn memory_of(&self, index: usize) -> *mut u8 {
        let op = self.frames[index].as_ref().map(|frame| &frame.op);
        match op {
            Some(&Op { write: true, source: Some((number, slot)), .. }) => self.sources[number].at(slot),
            Some(&Op { write: true, .. }) => {
                self.writes.as_ref().map_or(std::ptr::null_mut(), |all| all.at(index, 0))
            }
            _ => self.reads.as_ref().map_or(std::ptr::null_mut(), |all| all.at(index, 0)),
        }
    }

    /// Hands the rest of a frame's data, or its sync, to the file.
    fn call(&mut self, index: usize) -> Result<(), String> {
        let Some(frame) = &self.frames[index] else { return Ok(()) };
        let memory = self.memory_of(index);
        let (queue, start) = match &mut self.device {
            Device::File { queue, .. } => (queue, frame.op.slot * self.slot_bytes as u64),
            Device::Files { queue, .. } => (queue, 0),
            _ => return Ok(()),
        };
        let kind = match (frame.syncing, frame.op.write) {
            (true, _) => Kind::Sync,
            (false, true) => Kind::Write,
            (false, false) => Kind::Read,
        };
        let call = Call {
            token: index as u64,
            kind,
            at: memory.wrapping_add(frame.moved),
            len: self.op_bytes - frame.moved,
            file: frame.op.key,
            offset: start + frame.moved as u64,
        };
        queue.push(call).map_err(|error| format!("the device's queue takes no more: {error}"))
    }

    fn moved(&mut self, index: usize, bytes: usize) {
        if let Some(frame) = &mut self.frames[index] {
            frame.moved += bytes;
        }
    }

    /// One call has ended: the frame continues with the rest or with its sync, or it has ended, too.
    fn answered(&mut self, (token, result): Answer) {
        let index = token as usize;
        let Some(frame) = &mut self.frames[index] else { return };
        let again = match result {
            Err(libc::EINTR | libc::EAGAIN) => true,
            Err(code) => {
                let text = failure(&frame.op, code);
                return self.end(index, Some(text));
            }
            Ok(_) if frame.syncing => false,
            Ok(0) => {
                let text =
                    format!("the file ends after {} bytes of the chunk: it was truncated", frame.moved);
                return self.end(index, Some(text));
            }
            Ok(bytes) => {
                frame.moved += bytes;
                frame.syncing = frame.moved >= self.op_bytes && frame.op.write && self.config.fsync;
                frame.syncing || frame.moved < self.op_bytes
            }
        };
        match again.then(|| self.call(index)) {
            Some(Err(error)) => self.end(index, Some(error)),
            Some(Ok(())) => {}
            None => self.ended(index),
        }
    }

    /// All of a frame's bytes have moved.
    fn ended(&mut self, index: usize) {
        let wrong = match (&self.frames[index], &mut self.reads) {
            (Some(frame), Some(memory)) if self.config.verify && !frame.op.write => {
                buffer::wrong(&memory.bytes_mut(index)[..self.op_bytes], frame.op.key)
            }
            _ => None,
        };
        self.end(index, wrong);
    }

    fn end(&mut self, index: usize, error: Option<String>) {
        let Some(mut frame) = self.frames[index].take() else { return };
        self.free.push(index);
        self.pending -= 1;
        if let Some(op) = frame.then.pop_front() {
            self.waiting.push_back(Queued { op, queued_s: frame.queued_s, then: frame.then });
        }
        self.done.push(Done {
            id: frame.op.id,
            write: frame.op.write,
            queued_s: frame.queued_s,
            began_s: frame.began_s,
            ended_s: monotonic_s(),
            bytes: frame.moved as u64,
            error,
        });
    }
}

impl Drop for Store {
    /// The kernel must be done with the buffers before their memory goes.
    fn drop(&mut self) {
        self.waiting.clear();
        let mut answers = Vec::new();
        while self.in_flight() > 0 && self.wait(Duration::from_secs(1), false, &mut answers).is_ok() {
            for (token, _) in answers.drain(..) {
                if self.frames[token as usize].take().is_some() {
                    self.free.push(token as usize);
                }
            }
        }
        if self.in_flight() > 0 {
            // The queue broke with transfers in flight: they may still write to this memory, so it leaks.
            std::mem::forget((self.reads.take(), self.writes.take(), std::mem::take(&mut self.sources)));
        }
    }
}

fn failure(op: &Op, code: i32) -> String {
    let what = if op.write { "write" } else { "read" };
    format!("{what} failed: {}", std::io::Error::from_raw_os_error(code))
}

/// The time by the clock of Python's time.monotonic().
pub fn monotonic_s() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` has room for the answer; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}
