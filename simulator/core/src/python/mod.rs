//! What Python sees: `simulator._core`. Seconds outside, ticks inside; every refusal is a ValueError of one line.

mod cluster;
mod convert;
mod engine;
mod policies;
mod storage;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(policies::cache_hits, module)?)?;
    module.add_function(wrap_pyfunction!(policies::most_hits, module)?)?;
    module.add_function(wrap_pyfunction!(engine::probed, module)?)?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<cluster::Cluster>()?;
    module.add_class::<storage::Store>()
}
