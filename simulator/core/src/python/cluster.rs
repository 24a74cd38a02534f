//! `_core.Cluster`: as `_core.Engine`, with several instances.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use super::convert::{
    CompletionColumns, CompletionRow, Completions, Queues, RequestColumns, Totals, moment, sent_at,
    tier_names,
};
use crate::cluster::{self, Routing, Sharing};
use crate::engine::config::EngineConfig;
use crate::engine::request::Submission;
use crate::keys::Segment;
use crate::time;

#[pyclass]
pub struct Cluster {
    cluster: cluster::Cluster,
    tiers: Vec<String>,
}

#[pymethods]
impl Cluster {
    #[new]
    fn new(config: EngineConfig, instances: usize, routing: Routing, sharing: Sharing) -> PyResult<Self> {
        let tiers = tier_names(&config);
        let cluster =
            cluster::Cluster::new(config, instances, routing, sharing).map_err(PyValueError::new_err)?;
        Ok(Self { cluster, tiers })
    }

    #[getter]
    fn now_s(&self) -> f64 {
        time::to_s(self.cluster.now())
    }

    #[getter]
    fn idle(&self) -> bool {
        self.cluster.idle()
    }

    #[getter]
    fn queues(&self) -> Vec<Queues> {
        self.cluster.queues().into_iter().map(Queues::from).collect()
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
        let at = sent_at(self.cluster.now(), at_s)?;
        let submission = Submission { id, prompt: prompt.into(), output_tokens, reply_id };
        match instance {
            None => self.cluster.submit(submission, at),
            Some(instance) => self.cluster.submit_to(instance, submission, at),
        }
        .map_err(PyValueError::new_err)
    }

    fn submit_many(&mut self, py: Python<'_>, requests: RequestColumns) -> PyResult<()> {
        requests.for_each(py, |submission, at_s| {
            let at = sent_at(self.cluster.now(), at_s)?;
            self.cluster.submit(submission, at).map_err(PyValueError::new_err)
        })
    }

    fn advance_many(&mut self, py: Python<'_>, until_s: f64) -> PyResult<CompletionColumns> {
        let until = moment("until_s", until_s)?;
        let mut completions = Completions::new(self.tiers.len());
        let add = |instance, done| completions.add(instance, done);
        self.cluster.advance_all(until, add).map_err(PyRuntimeError::new_err)?;
        completions.columns(py, &self.tiers)
    }

    fn advance(&mut self, py: Python<'_>, until_s: f64) -> PyResult<Vec<CompletionRow>> {
        let until = moment("until_s", until_s)?;
        let completions = self.cluster.advance(until).map_err(PyRuntimeError::new_err)?;
        let row = |(instance, done)| CompletionRow::new(py, &self.tiers, instance, done);
        completions.into_iter().map(row).collect()
    }

    fn reset(&mut self, tiers: Vec<String>) -> PyResult<()> {
        let names: Vec<&str> = tiers.iter().map(String::as_str).collect();
        self.cluster.reset(&names).map_err(PyValueError::new_err)
    }

    fn totals(&mut self, py: Python<'_>) -> PyResult<Totals> {
        Totals::new(py, &self.tiers, self.cluster.counters())
    }

    fn totals_of(&mut self, py: Python<'_>, instance: usize) -> PyResult<Totals> {
        let found = self.cluster.counters_of(instance);
        let counters =
            found.ok_or_else(|| PyValueError::new_err(format!("there is no instance {instance}")))?;
        Totals::new(py, &self.tiers, counters)
    }
}
