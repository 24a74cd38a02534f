//! The core of the simulator: an engine and its cache tiers in virtual time, and real devices for its chunks.

mod cache;
mod ceiling;
mod chunks;
mod cluster;
mod engine;
mod eviction;
mod journal;
mod keys;
mod memory;
mod probing;
#[cfg(feature = "python")]
mod python;
pub mod storage;
#[cfg(test)]
mod tests;
mod tiers;
mod time;

pub use cache::replay;
pub use ceiling::most_hits;
pub use cluster::{Cluster, Routing, Sharing};
pub use engine::config::EngineConfig;
pub use engine::request::{Completion, Prompt, Sources, Submission};
pub use engine::{Counters, Engine};
pub use eviction::kind::EvictionKind;
pub use journal::Note;
pub use keys::Segment;
pub use probing::{Probe, Probed, probe};
pub use time::{FOREVER, Ticks, from_s, to_s};

/// A request is a few dozen small vectors that live as long as it does: a fast allocator pays.
#[cfg(feature = "python")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;
