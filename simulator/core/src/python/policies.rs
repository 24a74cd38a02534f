//! Choices that Python makes by name, and an eviction policy on its own.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cache;
use crate::ceiling;
use crate::cluster::{Routing, Sharing};
use crate::eviction::kind::EvictionKind;
use crate::keys::{Key, Segment, numbered};
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

/// For each prompt, how many of its first tokens the best cache of `capacity` tokens holds when the prompt comes.
/// hash_ids, tokens: the segments of all prompts, one prompt's after the other's; ends: where each prompt's end.
#[pyfunction]
pub fn most_hits(
    py: Python<'_>,
    hash_ids: PyBuffer<i64>,
    tokens: PyBuffer<i64>,
    ends: PyBuffer<i64>,
    capacity: u64,
) -> PyResult<Vec<u64>> {
    let (hash_ids, tokens, ends) = (hash_ids.to_vec(py)?, tokens.to_vec(py)?, ends.to_vec(py)?);
    let segments: Vec<Segment> = hash_ids
        .into_iter()
        .zip(tokens)
        .map(|(hash_id, tokens)| Segment { hash_id, tokens: tokens as u64 })
        .collect();
    let begins = std::iter::once(0).chain(ends.iter().copied());
    let prompts = begins.zip(&ends).map(|(begin, &end)| segments.get(begin as usize..end as usize));
    let prompts: Option<Vec<&[Segment]>> = prompts.collect();
    let prompts =
        prompts.ok_or_else(|| PyValueError::new_err("ends must ascend and lie within the segments"))?;
    Ok(py.detach(|| ceiling::most_hits(prompts.iter().copied(), capacity)))
}
