//! Requests from Python, and completions, totals and notes for it, all with named fields.

use std::sync::Arc;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};

use crate::engine::Counters;
use crate::engine::config::EngineConfig;
use crate::engine::request::{Completion, Prompt, Submission};
use crate::journal;
use crate::keys::Segment;
use crate::time::{self, Ticks};

pub fn moment(name: &str, seconds: f64) -> PyResult<Ticks> {
    if seconds >= 0.0 {
        return Ok(time::from_s(seconds));
    }
    Err(PyValueError::new_err(format!("{name} must be a time of 0 or more, not {seconds}")))
}

/// The moment at which a request is sent. now_s is a rounding of the engine's time; a request sent at now_s is sent
/// now.
pub fn sent_at(now: Ticks, at_s: f64) -> PyResult<Ticks> {
    let at = moment("at_s", at_s)?;
    Ok(if at_s >= time::to_s(now) { at.max(now) } else { at })
}

/// The names of the tiers that prompts can hit: the GPU and the levels below it.
pub fn tier_names(config: &EngineConfig) -> Vec<String> {
    let levels = config.tiers.iter().flat_map(|tiers| tiers.levels.iter().map(|level| level.name.clone()));
    std::iter::once("gpu".to_string()).chain(levels).collect()
}

/// What came of a request; `simulator.simulate.Completion` documents the fields.
#[pyclass(frozen, get_all, name = "Completion")]
pub struct CompletionRow {
    id: String,
    first_token_s: Option<f64>,
    last_token_s: Option<f64>,
    token_s: Py<PyTuple>,
    prompt_tokens: u64,
    output_tokens: u64,
    computed: u64,
    /// By tier.
    hit_tokens: Py<PyDict>,
    preemptions: u64,
    error: Option<String>,
    instance: usize,
}

impl CompletionRow {
    pub fn new(py: Python<'_>, tiers: &[String], instance: usize, done: Completion) -> PyResult<Self> {
        let hit_tokens = PyDict::new(py);
        for (tier, tokens) in tiers.iter().zip(hits(&done)) {
            hit_tokens.set_item(tier, tokens)?;
        }
        Ok(Self {
            id: done.id,
            first_token_s: done.first_token.map(time::to_s),
            last_token_s: done.last_token.map(time::to_s),
            token_s: PyTuple::new(py, done.tokens.iter().map(|&at| time::to_s(at)))?.unbind(),
            prompt_tokens: done.prompt_tokens,
            output_tokens: done.output_tokens,
            computed: done.sources.computed,
            hit_tokens: hit_tokens.unbind(),
            preemptions: done.preemptions,
            error: done.error,
            instance,
        })
    }
}

/// Prompt tokens by the tier that they came from.
fn hits(done: &Completion) -> impl Iterator<Item = u64> {
    std::iter::once(done.sources.gpu).chain(done.sources.levels)
}

/// Requests as columns; `simulator.columns.RequestColumns` documents them.
#[derive(FromPyObject)]
pub struct RequestColumns {
    ids: Vec<String>,
    hash_ids: PyBuffer<i64>,
    segment_tokens: PyBuffer<i64>,
    segment_ends: PyBuffer<i64>,
    output_tokens: PyBuffer<i64>,
    reply_ids: PyBuffer<i64>,
    at_s: PyBuffer<f64>,
}

/// A column's numbers, of which there must be `length`.
fn column<T: Element>(name: &str, buffer: &PyBuffer<T>, py: Python<'_>, length: usize) -> PyResult<Vec<T>> {
    let values = buffer.to_vec(py)?;
    if values.len() == length {
        return Ok(values);
    }
    Err(PyValueError::new_err(format!("{name} must have {length} entries, not {}", values.len())))
}

fn counts(name: &str, buffer: &PyBuffer<i64>, py: Python<'_>, length: usize) -> PyResult<Vec<u64>> {
    let values = column(name, buffer, py, length)?;
    match values.iter().find(|value| **value < 0) {
        Some(value) => Err(PyValueError::new_err(format!("{name}: {value} is not a usable value"))),
        None => Ok(values.into_iter().map(|value| value as u64).collect()),
    }
}

impl RequestColumns {
    /// Calls `submit` with each request and the moment at which it is sent.
    pub fn for_each(
        self,
        py: Python<'_>,
        mut submit: impl FnMut(Submission, f64) -> PyResult<()>,
    ) -> PyResult<()> {
        let count = self.ids.len();
        let hash_ids = self.hash_ids.to_vec(py)?;
        let tokens = counts("segment_tokens", &self.segment_tokens, py, hash_ids.len())?;
        let ends = counts("segment_ends", &self.segment_ends, py, count)?;
        let outputs = counts("output_tokens", &self.output_tokens, py, count)?;
        let replies = column("reply_ids", &self.reply_ids, py, count)?;
        let moments = column("at_s", &self.at_s, py, count)?;
        let row: Arc<[Segment]> =
            hash_ids.iter().zip(&tokens).map(|(&hash_id, &tokens)| Segment { hash_id, tokens }).collect();
        let mut start = 0;
        for (index, id) in self.ids.into_iter().enumerate() {
            let range = start..ends[index] as usize;
            start = range.end;
            let Some(prompt) = Prompt::new(&row, range) else {
                let text = format!(
                    "segment_ends of request {id:?} must lie from the one before to the last segment"
                );
                return Err(PyValueError::new_err(text));
            };
            let submission =
                Submission { id, prompt, output_tokens: outputs[index], reply_id: replies[index] };
            submit(submission, moments[index])?;
        }
        Ok(())
    }
}

/// A column of 64-bit numbers as bytes.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn push(&mut self, bytes: [u8; 8]) {
        self.0.extend_from_slice(&bytes);
    }

    fn to_py(&self, py: Python<'_>) -> Py<PyBytes> {
        PyBytes::new(py, &self.0).unbind()
    }
}

/// Collects completions as columns.
pub struct Completions {
    ids: Vec<String>,
    first_token: Bytes,
    last_token: Bytes,
    prompt_tokens: Bytes,
    output_tokens: Bytes,
    computed: Bytes,
    hit_tokens: Vec<Bytes>,
    preemptions: Bytes,
    instances: Bytes,
    errors: Vec<(usize, String)>,
}

impl Completions {
    /// `tiers`: how many tiers prompts can hit.
    pub fn new(tiers: usize) -> Self {
        Self {
            ids: Vec::new(),
            first_token: Bytes::default(),
            last_token: Bytes::default(),
            prompt_tokens: Bytes::default(),
            output_tokens: Bytes::default(),
            computed: Bytes::default(),
            hit_tokens: (0..tiers).map(|_| Bytes::default()).collect(),
            preemptions: Bytes::default(),
            instances: Bytes::default(),
            errors: Vec::new(),
        }
    }

    pub fn add(&mut self, instance: usize, done: Completion) {
        let seconds = |at: Option<Ticks>| at.map_or(f64::NAN, time::to_s).to_ne_bytes();
        self.first_token.push(seconds(done.first_token));
        self.last_token.push(seconds(done.last_token));
        self.prompt_tokens.push(done.prompt_tokens.to_ne_bytes());
        self.output_tokens.push(done.output_tokens.to_ne_bytes());
        self.computed.push(done.sources.computed.to_ne_bytes());
        for (column, tokens) in self.hit_tokens.iter_mut().zip(hits(&done)) {
            column.push(tokens.to_ne_bytes());
        }
        self.preemptions.push(done.preemptions.to_ne_bytes());
        self.instances.push((instance as u64).to_ne_bytes());
        self.errors.extend(done.error.map(|error| (self.ids.len(), error)));
        self.ids.push(done.id);
    }

    pub fn columns(self, py: Python<'_>, tiers: &[String]) -> PyResult<CompletionColumns> {
        let (hit_tokens, errors) = (PyDict::new(py), PyDict::new(py));
        for (tier, column) in tiers.iter().zip(&self.hit_tokens) {
            hit_tokens.set_item(tier, column.to_py(py))?;
        }
        for (index, error) in self.errors {
            errors.set_item(index, error)?;
        }
        Ok(CompletionColumns {
            ids: PyList::new(py, self.ids)?.unbind(),
            first_token_s: self.first_token.to_py(py),
            last_token_s: self.last_token.to_py(py),
            prompt_tokens: self.prompt_tokens.to_py(py),
            output_tokens: self.output_tokens.to_py(py),
            computed: self.computed.to_py(py),
            hit_tokens: hit_tokens.unbind(),
            preemptions: self.preemptions.to_py(py),
            instances: self.instances.to_py(py),
            errors: errors.unbind(),
        })
    }
}

/// Completions as columns of float64 (times) and int64; `simulator.columns.CompletionColumns` documents them.
#[pyclass(frozen, get_all)]
pub struct CompletionColumns {
    ids: Py<PyList>,
    first_token_s: Py<PyBytes>,
    last_token_s: Py<PyBytes>,
    prompt_tokens: Py<PyBytes>,
    output_tokens: Py<PyBytes>,
    computed: Py<PyBytes>,
    /// A column by tier.
    hit_tokens: Py<PyDict>,
    preemptions: Py<PyBytes>,
    instances: Py<PyBytes>,
    /// By position.
    errors: Py<PyDict>,
}

/// Totals of one level below the GPU; `simulator.simulate.LevelTotals` documents them.
#[pyclass(frozen, get_all)]
pub struct LevelTotals {
    hit_chunks: u64,
    taken_tokens: u64,
    loaded_chunks: u64,
    read_bytes: u64,
}

#[pyclass(frozen, get_all)]
pub struct Totals {
    computed_tokens: u64,
    gpu_hit_tokens: u64,
    external_tokens: u64,
    stores_begun: u64,
    stores_ended: u64,
    /// LevelTotals by tier.
    levels: Py<PyDict>,
}

impl Totals {
    pub fn new(py: Python<'_>, tiers: &[String], all: Counters) -> PyResult<Self> {
        let levels = PyDict::new(py);
        let counted = all.tiers.levels.into_iter().zip(all.level_tokens);
        for (tier, (level, taken_tokens)) in tiers.iter().skip(1).zip(counted) {
            let (hit_chunks, loaded_chunks) = (level.hit_chunks, level.loaded_chunks);
            let totals =
                LevelTotals { hit_chunks, taken_tokens, loaded_chunks, read_bytes: level.read_bytes };
            levels.set_item(tier, Bound::new(py, totals)?)?;
        }
        Ok(Self {
            computed_tokens: all.computed_tokens,
            gpu_hit_tokens: all.gpu_hit_tokens,
            external_tokens: all.level_tokens.iter().sum(),
            stores_begun: all.tiers.stores_begun,
            stores_ended: all.tiers.stores_ended,
            levels: levels.unbind(),
        })
    }
}

/// Requests that run, and that wait to run or for a transfer.
#[pyclass(frozen, get_all)]
pub struct Queues {
    running: usize,
    waiting: usize,
}

impl From<(usize, usize)> for Queues {
    fn from((running, waiting): (usize, usize)) -> Self {
        Self { running, waiting }
    }
}

/// What was done, to which request, and the numbers that belong to it.
#[pyclass(frozen, get_all)]
pub struct Note {
    what: &'static str,
    request: String,
    numbers: Vec<u64>,
}

impl From<journal::Note> for Note {
    fn from(note: journal::Note) -> Self {
        Self { what: note.what, request: note.name, numbers: note.numbers }
    }
}

#[pyclass(frozen, get_all)]
pub struct Journals {
    engine: Vec<Py<Note>>,
    tiers: Vec<Py<Note>>,
}

impl Journals {
    pub fn new(py: Python<'_>, (engine, tiers): (Vec<journal::Note>, Vec<journal::Note>)) -> PyResult<Self> {
        let notes = |notes: Vec<journal::Note>| -> PyResult<Vec<Py<Note>>> {
            notes.into_iter().map(|note| Py::new(py, Note::from(note))).collect()
        };
        Ok(Self { engine: notes(engine)?, tiers: notes(tiers)? })
    }
}
