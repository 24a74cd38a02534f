//! What Python sees of a cluster: `_core.Cluster`, as `_core.Engine` but with several instances.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::cluster::{self, Routing, Sharing};
use crate::engine::config::EngineConfig;
use crate::engine::request::Submission;
use crate::keys::Segment;
use crate::python::{self, Columns, Completions, Row, Segments, Totals, each_submission, moment, sent_at};
use crate::time;

#[pyclass]
pub struct Cluster {
    cluster: cluster::Cluster,
}

#[pymethods]
impl Cluster {
    #[new]
    fn new(
        config: EngineConfig,
        instances: usize,
        routing: &str,
        share_cpu: bool,
        share_disk: bool,
    ) -> PyResult<Self> {
        let routing = match routing {
            "round-robin" => Routing::RoundRobin,
            "least-loaded" => Routing::LeastLoaded,
            "prefix-aware" => Routing::PrefixAware,
            other => return Err(PyValueError::new_err(format!("no routing {other:?}"))),
        };
        let sharing = match (share_cpu, share_disk) {
            (true, _) => Sharing::CpuAndDisk,
            (false, true) => Sharing::Disk,
            (false, false) => Sharing::Nothing,
        };
        let cluster =
            cluster::Cluster::new(config, instances, routing, sharing).map_err(PyValueError::new_err)?;
        Ok(Self { cluster })
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
    fn queues(&self) -> Vec<(usize, usize)> {
        self.cluster.queues()
    }

    fn submit(
        &mut self,
        id: String,
        prompt: Vec<Segment>,
        output_tokens: u64,
        reply_id: i64,
        at_s: f64,
    ) -> PyResult<()> {
        let at = sent_at(self.cluster.now(), at_s)?;
        let submission = Submission { id, prompt: prompt.into(), output_tokens, reply_id };
        self.cluster.submit(submission, at).map_err(PyValueError::new_err)
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
            let at = sent_at(self.cluster.now(), at_s)?;
            self.cluster.submit(submission, at).map_err(PyValueError::new_err)
        })
    }

    fn advance_many<'py>(&mut self, py: Python<'py>, until_s: f64) -> PyResult<Columns<'py>> {
        let until = moment("until_s", until_s)?;
        let mut completions = Completions::default();
        let add = |instance, done| completions.add(instance, done);
        self.cluster.advance_all(until, add).map_err(PyRuntimeError::new_err)?;
        Ok(completions.columns(py))
    }

    fn advance<'py>(&mut self, py: Python<'py>, until_s: f64) -> PyResult<Vec<Row<'py>>> {
        let until = moment("until_s", until_s)?;
        let completions = self.cluster.advance(until).map_err(PyRuntimeError::new_err)?;
        completions.into_iter().map(|(instance, done)| python::row(py, instance, done)).collect()
    }

    fn reset(&mut self, gpu: bool, cpu: bool, disk: bool, page_cache: bool) -> PyResult<()> {
        self.cluster.reset(gpu, cpu, disk, page_cache).map_err(PyValueError::new_err)
    }

    fn counters(&mut self) -> Totals {
        python::totals(self.cluster.counters())
    }
}
