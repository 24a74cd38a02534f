//! What Python sees of the eviction policies: their names, and a cache on its own.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cache;
use crate::eviction::kind::EvictionKind;
use crate::keys::Key;
use crate::tiers::config::{Placement, TickShare};

/// A word of Python's for one of `known`. ValueError names them.
fn named<T: Copy>(what: &str, known: &[(&str, T)], word: Borrowed<'_, '_, PyAny>) -> PyResult<T> {
    let word: String = word.extract()?;
    let found = known.iter().find(|(name, _)| *name == word);
    found.map(|(_, one)| *one).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        PyValueError::new_err(format!("no {what} {word:?}: use one of {}", names.join(", ")))
    })
}

impl<'a, 'py> FromPyObject<'a, 'py> for EvictionKind {
    type Error = PyErr;
    fn extract(word: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        named("eviction policy", &Self::ALL, word)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for Placement {
    type Error = PyErr;
    fn extract(word: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        named("placement", &Self::ALL, word)
    }
}

impl<'a, 'py> FromPyObject<'a, 'py> for TickShare {
    type Error = PyErr;
    fn extract(word: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        named("tick share", &Self::ALL, word)
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
