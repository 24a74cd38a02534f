//! Choices that Python makes by name, and an eviction policy on its own.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cache;
use crate::cluster::{Routing, Sharing};
use crate::eviction::kind::EvictionKind;
use crate::keys::{Key, numbered};
use crate::tiers::config::{Placement, TickShare};

/// The value of a name in `known`. ValueError lists the known names.
fn named<T: Copy>(what: &str, known: &[(&str, T)], word: Borrowed<'_, '_, PyAny>) -> PyResult<T> {
    let word: String = word.extract()?;
    let found = known.iter().find(|(name, _)| *name == word);
    found.map(|(_, one)| *one).ok_or_else(|| {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        PyValueError::new_err(format!("no {what} {word:?}: use one of {}", names.join(", ")))
    })
}

/// Python gives the value by its name in `ALL`.
macro_rules! by_name {
    ($type:ty, $what:literal) => {
        impl<'a, 'py> FromPyObject<'a, 'py> for $type {
            type Error = PyErr;
            fn extract(word: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
                named($what, &Self::ALL, word)
            }
        }
    };
}

by_name!(EvictionKind, "eviction policy");
by_name!(Placement, "placement");
by_name!(TickShare, "tick share");
by_name!(Routing, "routing");
by_name!(Sharing, "sharing");

/// One byte for each key, in order: 1 where a cache of `capacity` chunks held it, else 0.
#[pyfunction]
pub fn cache_hits(
    py: Python<'_>,
    eviction: EvictionKind,
    capacity: u64,
    keys: PyBuffer<i64>,
) -> PyResult<Vec<u8>> {
    let keys: Vec<Key> = keys.to_vec(py)?.into_iter().map(|key| numbered(key as u64)).collect();
    Ok(cache::replay(eviction, capacity, &keys).into_iter().map(u8::from).collect())
}
