//! What Python sees: `_core.Engine`. Seconds outside, ticks inside; every refusal is a ValueError of one line.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::engine::{self, EngineConfig};
use crate::journal::Note;
use crate::keys::Segment;
use crate::request::{Completion, Submission};
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
type Totals = ((u64, u64, u64), (u64, u64, u64), (u64, u64, u64));
/// What was done, to which request, and the numbers that belong to it.
type Noted = (&'static str, String, Vec<u64>);
type Row<'py> = (String, Times<'py>, Counts, Option<String>);

fn moment(name: &str, seconds: f64) -> PyResult<Ticks> {
    if seconds >= 0.0 {
        return Ok(time::from_s(seconds));
    }
    Err(PyValueError::new_err(format!("{name} must be a time of 0 or more, not {seconds}")))
}

fn row<'py>(py: Python<'py>, done: Completion) -> PyResult<Row<'py>> {
    let token_s = PyTuple::new(py, done.tokens.iter().map(|&at| time::to_s(at)))?;
    let times = (done.first_token.map(time::to_s), done.last_token.map(time::to_s), token_s);
    let from = done.sources;
    let tokens = (done.prompt_tokens, done.output_tokens);
    let counts = (tokens.0, tokens.1, from.computed, from.gpu, from.cpu, from.disk, done.preemptions);
    Ok((done.id, times, counts, done.error))
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
        // now_s is a rounding of the engine's time; a request for that moment is one for now.
        let now = self.engine.now();
        let at = moment("at_s", at_s)?;
        let at = if at_s >= time::to_s(now) { at.max(now) } else { at };
        let submission = Submission { id, prompt, output_tokens, reply_id };
        self.engine.submit(submission, at).map_err(PyValueError::new_err)
    }

    fn advance<'py>(&mut self, py: Python<'py>, until_s: f64) -> PyResult<Vec<Row<'py>>> {
        let until = moment("until_s", until_s)?;
        let completions = self.engine.advance(until).map_err(PyRuntimeError::new_err)?;
        completions.into_iter().map(|done| row(py, done)).collect()
    }

    #[getter]
    fn next_event_s(&self) -> Option<f64> {
        self.engine.next_event().map(time::to_s)
    }

    fn take_tokens(&mut self) -> Vec<(String, usize)> {
        self.engine.take_tokens()
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
        let all = self.engine.counters();
        let tiers = all.tiers;
        (
            (all.computed_tokens, all.gpu_hit_tokens, all.external_tokens),
            (tiers.cpu_hit_chunks, tiers.disk_hit_chunks, tiers.disk_loaded_chunks),
            (tiers.stores_begun, tiers.stores_ended, tiers.storage_read_bytes),
        )
    }
}

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()
}
