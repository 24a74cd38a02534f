//! What Python sees of real devices: `_core.Store`. The interpreter's lock is not held while anything is waited for.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::thread::{self, ThreadId};
use std::time::Duration;

use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::storage::{self, Done, Op, StoreConfig};

/// (id, write, queued_s, began_s, ended_s, bytes, error)
type Ended = (u64, bool, f64, f64, f64, u64, Option<String>);
/// (slot_bytes, io, buffered_because, path)
type About = (u64, String, Option<String>, Option<PathBuf>);
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
    let row = |d: Done| (d.id, d.write, d.queued_s, d.began_s, d.ended_s, d.bytes, d.error);
    done.into_iter().map(row).collect()
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
        let because = store.buffered_because().map(str::to_string);
        Ok((store.slot_bytes(), store.io().to_string(), because, store.path().map(PathBuf::from)))
    }

    #[getter]
    fn pending(&self) -> PyResult<usize> {
        Ok(self.held()?.as_ref().ok_or_else(closed)?.pending())
    }

    /// Each: (id, write, slot, key).
    fn submit(&self, ops: Vec<(u64, bool, u64, u64)>) -> PyResult<()> {
        let ops = ops.into_iter().map(|(id, write, slot, key)| Op { id, write, slot, key }).collect();
        self.held()?.as_mut().ok_or_else(closed)?.submit(ops).map_err(PyValueError::new_err)
    }

    fn poll(&self, py: Python<'_>, least: usize, timeout_s: f64) -> PyResult<Vec<Ended>> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|_| PyValueError::new_err(format!("timeout_s must be a time, not {timeout_s}")))?;
        let mut held = self.held()?;
        let store = held.as_mut().ok_or_else(closed)?;
        py.detach(|| store.poll(least, timeout)).map(ended).map_err(PyOSError::new_err)
    }

    /// All of the operations, as fast as they go. Signals are heard.
    fn run(&self, py: Python<'_>, ops: Vec<(u64, bool, u64, u64)>) -> PyResult<Vec<Ended>> {
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
