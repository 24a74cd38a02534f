//! What Python sees of real devices: `_core.Store`. It releases the interpreter's lock while it waits.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::storage::{self, Done, Op, StoreConfig};

/// What came of an operation; `simulator.storage.Ended` documents it.
#[pyclass(frozen, get_all)]
struct Ended {
    id: u64,
    write: bool,
    queued_s: f64,
    began_s: f64,
    ended_s: f64,
    bytes: u64,
    error: Option<String>,
}

impl From<Done> for Ended {
    fn from(done: Done) -> Self {
        let Done { id, write, queued_s, began_s, ended_s, bytes, error } = done;
        Self { id, write, queued_s, began_s, ended_s, bytes, error }
    }
}

/// How the store works. buffered_because: why reads do not bypass the page cache, although they should.
#[pyclass(frozen, get_all)]
struct About {
    slot_bytes: u64,
    io: String,
    buffered_because: Option<String>,
    path: Option<PathBuf>,
}

const SLICE: Duration = Duration::from_millis(200);

#[pyclass]
pub struct Store {
    store: Mutex<Option<storage::Store>>,
    /// The kernel takes calls from the thread that made the ring only.
    owner: ThreadId,
}

impl Store {
    fn held(&self) -> PyResult<MutexGuard<'_, Option<storage::Store>>> {
        if thread::current().id() != self.owner {
            return Err(PyRuntimeError::new_err("a store belongs to the thread that made it: use it there"));
        }
        self.store.try_lock().map_err(|_| PyRuntimeError::new_err("the store is in use by another thread"))
    }
}

fn closed() -> PyErr {
    PyValueError::new_err("the store is closed")
}

fn ended(done: Vec<Done>) -> Vec<Ended> {
    done.into_iter().map(Ended::from).collect()
}

#[pymethods]
impl Store {
    #[new]
    fn new(py: Python<'_>, config: StoreConfig) -> PyResult<Self> {
        let store = py.detach(|| storage::Store::new(config)).map_err(PyOSError::new_err)?;
        Ok(Self { store: Mutex::new(Some(store)), owner: thread::current().id() })
    }

    #[getter]
    fn about(&self) -> PyResult<About> {
        let held = self.held()?;
        let store = held.as_ref().ok_or_else(closed)?;
        Ok(About {
            slot_bytes: store.slot_bytes(),
            io: store.io().to_string(),
            buffered_because: store.buffered_because().map(str::to_string),
            path: store.path().map(PathBuf::from),
        })
    }

    #[getter]
    fn pending(&self) -> PyResult<usize> {
        Ok(self.held()?.as_ref().ok_or_else(closed)?.pending())
    }

    fn submit(&self, ops: Vec<Op>) -> PyResult<()> {
        self.held()?.as_mut().ok_or_else(closed)?.submit(ops).map_err(PyValueError::new_err)
    }

    /// The number by which writes here name `other`'s slots as their source; None: those are not in memory.
    fn take_from(&self, other: PyRef<'_, Store>) -> PyResult<Option<usize>> {
        let Some(slots) = other.held()?.as_ref().ok_or_else(closed)?.slots() else { return Ok(None) };
        self.held()?.as_mut().ok_or_else(closed)?.take_from(slots).map(Some).map_err(PyValueError::new_err)
    }

    fn poll(&self, py: Python<'_>, least: usize, timeout_s: f64) -> PyResult<Vec<Ended>> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|_| PyValueError::new_err(format!("timeout_s must be a time, not {timeout_s}")))?;
        let mut held = self.held()?;
        let store = held.as_mut().ok_or_else(closed)?;
        py.detach(|| store.poll(least, timeout)).map(ended).map_err(PyOSError::new_err)
    }

    /// Runs all operations, as fast as they go. It handles signals meanwhile.
    fn run(&self, py: Python<'_>, ops: Vec<Op>) -> PyResult<Vec<Ended>> {
        self.submit(ops)?;
        let mut held = self.held()?;
        let store = held.as_mut().ok_or_else(closed)?;
        let mut all = Vec::with_capacity(store.pending());
        while store.pending() > 0 {
            let done = py.detach(|| store.poll(usize::MAX, SLICE)).map_err(PyOSError::new_err)?;
            all.extend(ended(done));
            py.check_signals()?;
        }
        Ok(all)
    }

    fn forget(&self, keys: Vec<u64>) -> PyResult<()> {
        self.held()?.as_mut().ok_or_else(closed)?.forget(&keys);
        Ok(())
    }

    /// Waits for what the device has begun, forgets the rest, and lets go of file and memory. Safe to call twice.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let store = self.held()?.take();
        py.detach(|| drop(store));
        Ok(())
    }
}
