//! `_core.Engine`.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::convert::{
    CompletionColumns, CompletionRow, Completions, Journals, Queues, RequestColumns, Totals, moment, sent_at,
    tier_names,
};
use crate::engine::config::EngineConfig;
use crate::engine::request::Submission;
use crate::keys::Segment;
use crate::probing::{Probe, Probed, probe};
use crate::tiers::outbox;
use crate::time;

#[pyclass]
pub struct Engine {
    engine: crate::engine::Engine,
    tiers: Vec<String>,
}

/// A chunk of a transfer: its key, and its slot on the device.
#[pyclass(frozen, get_all)]
struct IssuedChunk {
    key: u64,
    slot: u64,
}

/// A transfer that the caller makes; `simulator.simulate.Issued` documents it.
#[pyclass(frozen, get_all)]
struct Issued {
    id: u64,
    owner: i64,
    write: bool,
    chunks: Vec<Py<IssuedChunk>>,
}

impl Issued {
    fn new(py: Python<'_>, issued: outbox::Issued) -> PyResult<Self> {
        let chunks = issued.chunks.into_iter().map(|(key, slot)| Py::new(py, IssuedChunk { key, slot }));
        let chunks = chunks.collect::<PyResult<_>>()?;
        Ok(Self { id: issued.id, owner: issued.owner, write: issued.write, chunks })
    }
}

/// `Probed`, in seconds.
type ProbedRow = (f64, f64, Vec<(f64, f64)>);
/// A request of a probe: its id, prompt, output tokens and reply's stream.
type Asked = (String, Vec<Segment>, u64, i64);

/// Asks an engine of its own for each seed.
#[pyfunction]
pub fn probed(
    py: Python<'_>,
    config: EngineConfig,
    first: Vec<Asked>,
    emptied: Vec<String>,
    together: Vec<Asked>,
    seeds: Vec<u64>,
) -> PyResult<Vec<ProbedRow>> {
    let asked = |(id, prompt, output_tokens, reply_id): Asked| Submission {
        id,
        prompt: prompt.into(),
        output_tokens,
        reply_id,
    };
    let asks = Probe {
        first: first.into_iter().map(asked).collect(),
        emptied,
        together: together.into_iter().map(asked).collect(),
    };
    let found: Result<Vec<Probed>, String> = py.detach(|| {
        let of = |&seed: &u64| {
            let mut config = config.clone();
            config.cost.seed = seed;
            probe(config, &asks)
        };
        seeds.iter().map(of).collect()
    });
    let row = |found: Probed| {
        let tokens = found.tokens.iter().map(|&(first, last)| (time::to_s(first), time::to_s(last)));
        (time::to_s(found.sent), time::to_s(found.ended), tokens.collect())
    };
    Ok(found.map_err(PyValueError::new_err)?.into_iter().map(row).collect())
}

#[pymethods]
impl Engine {
    #[new]
    fn new(config: EngineConfig) -> PyResult<Self> {
        let tiers = tier_names(&config);
        let engine = crate::engine::Engine::new(config).map_err(PyValueError::new_err)?;
        Ok(Self { engine, tiers })
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
        instance: Option<i64>,
    ) -> PyResult<()> {
        if let Some(other) = instance.filter(|&instance| instance != 0) {
            let says = format!("request {id}: is pinned to instance {other}; there is one engine");
            return Err(PyValueError::new_err(says));
        }
        let at = sent_at(self.engine.now(), at_s)?;
        let submission = Submission { id, prompt: prompt.into(), output_tokens, reply_id };
        self.engine.submit(submission, at).map_err(PyValueError::new_err)
    }

    fn refusal(&self, prompt: Vec<Segment>, output_tokens: u64) -> Option<String> {
        let submission = Submission { id: String::new(), prompt: prompt.into(), output_tokens, reply_id: 0 };
        self.engine.refusal(&submission)
    }

    fn submit_many(&mut self, py: Python<'_>, requests: RequestColumns) -> PyResult<()> {
        requests.for_each(py, |submission, at_s| {
            let at = sent_at(self.engine.now(), at_s)?;
            self.engine.submit(submission, at).map_err(PyValueError::new_err)
        })
    }

    fn advance_many(&mut self, py: Python<'_>, until_s: f64) -> PyResult<CompletionColumns> {
        let until = moment("until_s", until_s)?;
        let mut completions = Completions::new(self.tiers.len());
        loop {
            let some = self.engine.advance(until).map_err(PyRuntimeError::new_err)?;
            if some.is_empty() {
                return completions.columns(py, &self.tiers);
            }
            some.into_iter().for_each(|done| completions.add(0, done));
        }
    }

    fn advance(&mut self, py: Python<'_>, until_s: f64) -> PyResult<Vec<CompletionRow>> {
        let until = moment("until_s", until_s)?;
        let completions = self.engine.advance(until).map_err(PyRuntimeError::new_err)?;
        completions.into_iter().map(|done| CompletionRow::new(py, &self.tiers, 0, done)).collect()
    }

    fn take_issued(&mut self, py: Python<'_>) -> PyResult<Vec<Issued>> {
        self.engine.take_issued().into_iter().map(|one| Issued::new(py, one)).collect()
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

    /// Tokens by request id, in the order of the requests.
    fn take_tokens<'py>(&mut self, py: Python<'py>, first: bool) -> PyResult<Bound<'py, PyDict>> {
        let tokens = PyDict::new(py);
        for (id, count) in self.engine.take_tokens(first) {
            tokens.set_item(id, count)?;
        }
        Ok(tokens)
    }

    #[getter]
    fn queues(&self) -> Queues {
        self.engine.queues().into()
    }

    fn reset(&mut self, tiers: Vec<String>) -> PyResult<()> {
        let names: Vec<&str> = tiers.iter().map(String::as_str).collect();
        self.engine.reset(&names).map_err(PyValueError::new_err)
    }

    fn take_journal(&mut self, py: Python<'_>) -> PyResult<Journals> {
        Journals::new(py, self.engine.take_journal())
    }

    fn totals(&self, py: Python<'_>) -> PyResult<Totals> {
        Totals::new(py, &self.tiers, self.engine.counters())
    }
}
