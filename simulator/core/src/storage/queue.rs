//! Two ways to have many reads and writes in flight: io_uring or, where the kernel refuses it, a thread a place.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use io_uring::{IoUring, opcode, types};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
    /// Makes arrived data durable.
    Sync,
}

/// `at`: memory that stays in place until the answer; only this call touches it meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub token: u64,
    pub kind: Kind,
    pub at: *mut u8,
    pub len: usize,
    /// The chunk whose file it is, if each chunk has one.
    pub file: u64,
    pub offset: u64,
}

// SAFETY: only `at` is not Send; its rule above makes it safe.
unsafe impl Send for Call {}

/// A token, and the bytes moved or the error number.
pub type Answer = (u64, Result<usize, i32>);

/// Performs a call: the bytes moved, or the error number.
pub type Perform = Arc<dyn Fn(Call) -> Result<usize, i32> + Send + Sync>;

/// By how much a rough wait may be too long.
pub const TICK: Duration = Duration::from_millis(100);
static TICK_TIME: types::Timespec = types::Timespec::new().nsec(TICK.subsec_nanos());
const TICK_TOKEN: u64 = u64::MAX;

pub enum Queue {
    Ring(Box<Ring>),
    Threads(Threads),
}

impl Queue {
    pub fn push(&mut self, call: Call) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.push(call),
            Self::Threads(threads) => threads.push(call),
        }
    }

    /// Submits the calls that `push` has kept back.
    pub fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Ring(ring) => ring.flush(),
            Self::Threads(_) => Ok(()),
        }
    }

    /// Appends answers: at least one, unless `timeout` ends first. rough: it may end a moment before or after.
    pub fn wait(&mut self, timeout: Duration, rough: bool, answers: &mut Vec<Answer>) -> io::Result<()> {
        match self {
            Self::Ring(ring) if rough && !timeout.is_zero() => ring.wait_roughly(answers),
            Self::Ring(ring) => ring.wait(timeout, answers),
            Self::Threads(threads) => threads.wait(timeout, answers),
        }
    }
}

pub struct Ring {
    ring: IoUring,
    /// How many calls `push` keeps back before it submits them; `wait` submits the rest. A call that follows an answer
    /// goes with the wait for the next answer; if all calls waited for that, a deep queue would run dry.
    batch: usize,
    file: File,
    /// The timer that ends a rough wait is in flight.
    ticking: bool,
}

impl Ring {
    /// Errors: the kernel has no io_uring, or refuses it to this process.
    pub fn new(depth: u32, file: &File) -> io::Result<Self> {
        // The thread that made the ring handles completions while it waits: nothing interrupts it, and a wait ends with
        // the first completion. Older kernels lack this mode.
        let mut builder = IoUring::builder();
        builder.setup_coop_taskrun().setup_single_issuer().setup_defer_taskrun();
        let entries = depth + 1; // one for the tick
        let ring = builder.build(entries).or_else(|_| IoUring::new(entries))?;
        if !ring.params().is_feature_ext_arg() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        Ok(Self { ring, batch: (depth as usize / 4).max(2), file: file.try_clone()?, ticking: false })
    }

    fn push(&mut self, call: Call) -> io::Result<()> {
        let file = types::Fd(self.file.as_raw_fd());
        let entry = match call.kind {
            Kind::Read => opcode::Read::new(file, call.at, call.len as u32).offset(call.offset).build(),
            Kind::Write => opcode::Write::new(file, call.at, call.len as u32).offset(call.offset).build(),
            Kind::Sync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        };
        // SAFETY: the memory outlives the call (see Call). The ring has an entry for every call in flight.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(call.token)) };
        pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))?;
        if self.ring.submission().len() < self.batch { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.ring.submission().is_empty() {
            return Ok(());
        }
        match self.ring.submit() {
            Err(error) if !passes(&error) => Err(error),
            _ => Ok(()),
        }
    }

    fn wait(&mut self, timeout: Duration, answers: &mut Vec<Answer>) -> io::Result<()> {
        let until = types::Timespec::new().sec(timeout.as_secs()).nsec(timeout.subsec_nanos());
        let arguments = types::SubmitArgs::new().timespec(&until);
        match self.ring.submitter().submit_with_args(1, &arguments) {
            Err(error) if !passes(&error) => return Err(error),
            _ => {}
        }
        self.take(answers);
        Ok(())
    }

    /// A timer for each wait would cost as much as waking up; this is one timer every TICK.
    fn wait_roughly(&mut self, answers: &mut Vec<Answer>) -> io::Result<()> {
        if !self.ticking {
            self.flush()?;
            let entry = opcode::Timeout::new(&TICK_TIME).build().user_data(TICK_TOKEN);
            // SAFETY: the time is static.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            self.ticking = pushed.is_ok();
        }
        match self.ring.submit_and_wait(1) {
            Err(error) if !passes(&error) => return Err(error),
            _ => {}
        }
        self.take(answers);
        Ok(())
    }

    fn take(&mut self, answers: &mut Vec<Answer>) {
        for entry in self.ring.completion() {
            let moved = entry.result();
            match entry.user_data() {
                TICK_TOKEN => self.ticking = false,
                token => answers.push((token, usize::try_from(moved).map_err(|_| -moved))),
            }
        }
    }
}

/// The time is over, a signal came, or the kernel lacks a resource for a moment.
fn passes(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

pub struct Threads {
    calls: Option<Sender<Call>>,
    answers: Receiver<Answer>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    pub fn new(count: usize, perform: Perform) -> io::Result<Self> {
        let (calls, taken) = channel::<Call>();
        let (given, answers) = channel();
        let taken = Arc::new(Mutex::new(taken));
        let mut threads = Vec::new();
        for _ in 0..count {
            let (taken, given, perform) = (Arc::clone(&taken), given.clone(), Arc::clone(&perform));
            threads.push(std::thread::Builder::new().name("kv-io".to_string()).spawn(move || {
                loop {
                    let next = taken.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(call) = next else { return };
                    if given.send((call.token, perform(call))).is_err() {
                        return;
                    }
                }
            })?);
        }
        Ok(Self { calls: Some(calls), answers, threads })
    }

    fn push(&mut self, call: Call) -> io::Result<()> {
        let sent = self.calls.as_ref().map(|calls| calls.send(call));
        sent.and_then(Result::ok).ok_or_else(|| io::Error::from_raw_os_error(libc::EPIPE))
    }

    fn wait(&mut self, timeout: Duration, answers: &mut Vec<Answer>) -> io::Result<()> {
        match self.answers.recv_timeout(timeout) {
            Ok(answer) => answers.push(answer),
            Err(RecvTimeoutError::Timeout) => return Ok(()),
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::from_raw_os_error(libc::EPIPE)),
        }
        answers.extend(self.answers.try_iter());
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.calls = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Call {
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the caller leaves this memory to the queue until the answer (see `at`).
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }
}

/// Performs a call on the slab's file.
pub fn perform(file: &File, mut call: Call) -> Result<usize, i32> {
    let (kind, offset) = (call.kind, call.offset);
    let done = match kind {
        Kind::Read => file.read_at(call.bytes(), offset),
        Kind::Write => file.write_at(call.bytes(), offset),
        Kind::Sync => file.sync_data().map(|()| 0),
    };
    done.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}
