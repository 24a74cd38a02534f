//! What Python sees: `_core.Engine`. Seconds outside, ticks inside; every refusal is a ValueError of one line.

mod cluster;
mod policies;
mod storage;

use std::collections::BTreeMap;
use std::sync::Arc;

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::engine::live_tokens::Tokens;
use crate::engine::request::{Completion, Prompt, Submission};
use crate::engine::{self, config::EngineConfig};
use crate::journal::Note;
use crate::keys::Segment;
use crate::time::{self, Ticks};

#[pyclass]
struct Engine {
    engine: engine::Engine,
}

/// (first_token_s, last_token_s, token_s) and (prompt, output, computed, gpu, cpu, disk tokens, preemptions).
type Times<'py> = (Option<f64>, Option<f64>, Bound<'py, PyTuple>);
type Counts = (u64, u64, u64, u64, u64, u64, u64);
/// Tokens computed, hit on the GPU, external; chunks hit in CPU memory, hit on disk, loaded from disk; chunks whose
/// store began, ended, and bytes read from storage.
pub type Totals = ((u64, u64, u64), (u64, u64, u64), (u64, u64, u64));
/// What was done, to which request, and the numbers that belong to it.
type Noted = (&'static str, String, Vec<u64>);
/// Id, owner, write, (key, slot) of every chunk.
type Transfer = (u64, i64, bool, Vec<(u64, u64)>);
pub type Columns<'py> =
    (Vec<String>, Vec<Bound<'py, PyBytes>>, Vec<Bound<'py, PyBytes>>, BTreeMap<usize, String>);
/// Hash ids and tokens of all prompts' segments, and where each request's segments end in those.
pub type Segments = (PyBuffer<i64>, PyBuffer<i64>, PyBuffer<i64>);
pub type Row<'py> = (String, Times<'py>, Counts, Option<String>, usize);

pub fn moment(name: &str, seconds: f64) -> PyResult<Ticks> {
    if seconds >= 0.0 {
        return Ok(time::from_s(seconds));
    }
    Err(PyValueError::new_err(format!("{name} must be a time of 0 or more, not {seconds}")))
}

pub fn row<'py>(py: Python<'py>, instance: usize, done: Completion) -> PyResult<Row<'py>> {
    let token_s = PyTuple::new(py, done.tokens.iter().map(|&at| time::to_s(at)))?;
    let times = (done.first_token.map(time::to_s), done.last_token.map(time::to_s), token_s);
    let counts = done.counts().into();
    Ok((done.id, times, counts, done.error, instance))
}

/// A column's numbers, which must be so many.
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

/// The moment at which a request is sent. now_s is a rounding of the engine's time; a request for it is one for now.
pub fn sent_at(now: Ticks, at_s: f64) -> PyResult<Ticks> {
    let at = moment("at_s", at_s)?;
    Ok(if at_s >= time::to_s(now) { at.max(now) } else { at })
}

/// Each request of columns of requests, and its moment.
pub fn each_submission(
    py: Python<'_>,
    ids: Vec<String>,
    segments: &Segments,
    (output_tokens, reply_ids, at_s): (&PyBuffer<i64>, &PyBuffer<i64>, &PyBuffer<f64>),
    mut submit: impl FnMut(Submission, f64) -> PyResult<()>,
) -> PyResult<()> {
    let hash_ids = segments.0.to_vec(py)?;
    let tokens = counts("segment_tokens", &segments.1, py, hash_ids.len())?;
    let ends = counts("segment_ends", &segments.2, py, ids.len())?;
    let outputs = counts("output_tokens", output_tokens, py, ids.len())?;
    let replies = column("reply_ids", reply_ids, py, ids.len())?;
    let next_events = column("at_s", at_s, py, ids.len())?;
    let row: Arc<[Segment]> =
        hash_ids.iter().zip(&tokens).map(|(&hash_id, &tokens)| Segment { hash_id, tokens }).collect();
    let mut start = 0;
    for (index, id) in ids.into_iter().enumerate() {
        let range = start..ends[index] as usize;
        start = range.end;
        let Some(prompt) = Prompt::new(&row, range) else {
            let text =
                format!("segment_ends of request {id:?} must lie from the one before to the last segment");
            return Err(PyValueError::new_err(text));
        };
        let submission = Submission { id, prompt, output_tokens: outputs[index], reply_id: replies[index] };
        submit(submission, next_events[index])?;
    }
    Ok(())
}

/// Completions as columns.
#[derive(Default)]
pub struct Completions {
    ids: Vec<String>,
    times: [Vec<u8>; 2],
    counts: [Vec<u8>; 8],
    errors: BTreeMap<usize, String>,
}

impl Completions {
    pub fn add(&mut self, instance: usize, done: Completion) {
        for (column, at) in self.times.iter_mut().zip([done.first_token, done.last_token]) {
            column.extend_from_slice(&at.map_or(f64::NAN, time::to_s).to_ne_bytes());
        }
        for (column, count) in self.counts.iter_mut().zip(done.counts().into_iter().chain([instance as u64]))
        {
            column.extend_from_slice(&count.to_ne_bytes());
        }
        self.errors.extend(done.error.map(|error| (self.ids.len(), error)));
        self.ids.push(done.id);
    }

    /// Ids, times (first and last token), counts (as in Counts, and the instance), and errors by position.
    pub fn columns(self, py: Python<'_>) -> Columns<'_> {
        let bytes = |columns: &[Vec<u8>]| columns.iter().map(|column| PyBytes::new(py, column)).collect();
        (self.ids, bytes(&self.times), bytes(&self.counts), self.errors)
    }
}

pub fn totals(all: engine::Counters) -> Totals {
    let tiers = all.tiers;
    (
        (all.computed_tokens, all.gpu_hit_tokens, all.external_tokens),
        (tiers.cpu_hit_chunks, tiers.disk_hit_chunks, tiers.disk_loaded_chunks),
        (tiers.stores_begun, tiers.stores_ended, tiers.storage_read_bytes),
    )
}

#[pymethods]
impl Engine {
    #[new]
    fn new(config: EngineConfig) -> PyResult<Self> {
        let engine = engine::Engine::new(config).map_err(PyValueError::new_err)?;
        Ok(Self { engine })
    }

    #[getter]
    fn now_s(&self) -> f64 {
        time::to_s(self.engine.now())
    }

    #[getter]
    fn idle(&self) -> bool {
        self.engine.idle()
    }

    fn submit(
        &mut self,
        id: String,
        prompt: Vec<Segment>,
        output_tokens: u64,
        reply_id: i64,
        at_s: f64,
    ) -> PyResult<()> {
        let at = sent_at(self.engine.now(), at_s)?;
        let submission = Submission { id, prompt: prompt.into(), output_tokens, reply_id };
        self.engine.submit(submission, at).map_err(PyValueError::new_err)
    }

    fn refusal(&self, prompt: Vec<Segment>, output_tokens: u64) -> Option<String> {
        let submission = Submission { id: String::new(), prompt: prompt.into(), output_tokens, reply_id: 0 };
        self.engine.refusal(&submission)
    }

    fn submit_many(
        &mut self,
        py: Python<'_>,
        ids: Vec<String>,
        segments: Segments,
        output_tokens: PyBuffer<i64>,
        reply_ids: PyBuffer<i64>,
        at_s: PyBuffer<f64>,
    ) -> PyResult<()> {
        each_submission(py, ids, &segments, (&output_tokens, &reply_ids, &at_s), |submission, at_s| {
            let at = sent_at(self.engine.now(), at_s)?;
            self.engine.submit(submission, at).map_err(PyValueError::new_err)
        })
    }

    fn advance_many<'py>(&mut self, py: Python<'py>, until_s: f64) -> PyResult<Columns<'py>> {
        let until = moment("until_s", until_s)?;
        let mut completions = Completions::default();
        loop {
            let some = self.engine.advance(until).map_err(PyRuntimeError::new_err)?;
            if some.is_empty() {
                return Ok(completions.columns(py));
            }
            some.into_iter().for_each(|done| completions.add(0, done));
        }
    }

    fn advance<'py>(&mut self, py: Python<'py>, until_s: f64) -> PyResult<Vec<Row<'py>>> {
        let until = moment("until_s", until_s)?;
        let completions = self.engine.advance(until).map_err(PyRuntimeError::new_err)?;
        completions.into_iter().map(|done| row(py, 0, done)).collect()
    }

    fn take_issued(&mut self) -> Vec<Transfer> {
        let issued = self.engine.take_issued();
        issued.into_iter().map(|one| (one.id, one.owner, one.write, one.chunks)).collect()
    }

    fn take_dropped(&mut self) -> Vec<u64> {
        self.engine.take_dropped()
    }

    fn complete_io(&mut self, id: u64, at_s: f64, failed: Vec<u64>) -> PyResult<()> {
        self.engine.complete_io(id, moment("at_s", at_s)?, failed);
        Ok(())
    }

    #[getter]
    fn next_event_s(&self) -> Option<f64> {
        self.engine.next_event().map(time::to_s)
    }

    fn take_tokens(&mut self, first: bool) -> Vec<Tokens> {
        self.engine.take_tokens(first)
    }

    #[getter]
    fn queues(&self) -> (usize, usize) {
        self.engine.queues()
    }

    fn reset(&mut self, gpu: bool, cpu: bool, disk: bool, page_cache: bool) -> PyResult<()> {
        self.engine.reset(gpu, cpu, disk, page_cache).map_err(PyValueError::new_err)
    }

    fn take_journal(&mut self) -> (Vec<Noted>, Vec<Noted>) {
        let noted =
            |notes: Vec<Note>| notes.into_iter().map(|note| (note.what, note.name, note.numbers)).collect();
        let (engine, tiers) = self.engine.take_journal();
        (noted(engine), noted(tiers))
    }

    fn counters(&self) -> Totals {
        totals(self.engine.counters())
    }
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(policies::cache_hits, module)?)?;
    module.add_class::<Engine>()?;
    module.add_class::<cluster::Cluster>()?;
    module.add_class::<storage::Store>()
}
