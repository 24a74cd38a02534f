//! What Python sees of the eviction policies: their names, and a cache on its own.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cache;
use crate::eviction::EvictionKind;
use crate::keys::Key;

impl<'a, 'py> FromPyObject<'a, 'py> for EvictionKind {
    type Error = PyErr;

    fn extract(name: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        Self::named(&name.extract::<String>()?).map_err(PyValueError::new_err)
    }
}

/// One byte for each of the keys, in order: 1 where a cache of `capacity` chunks held it, else 0.
#[pyfunction]
pub fn cache_hits(
    py: Python<'_>,
    eviction: EvictionKind,
    capacity: u64,
    keys: PyBuffer<i64>,
) -> PyResult<Vec<u8>> {
    let keys: Vec<Key> = keys.to_vec(py)?.into_iter().map(|key| key as Key).collect();
    Ok(cache::replay(eviction, capacity, &keys).into_iter().map(u8::from).collect())
}
