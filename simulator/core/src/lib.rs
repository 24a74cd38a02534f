//! The core of the simulator: an engine and its cache tiers in virtual time, and real devices for its chunks.

mod arc;
mod arrivals;
mod blocks;
#[cfg(test)]
mod blocks_oracle;
mod cache;
mod chunks;
mod cluster;
#[cfg(test)]
mod cluster_tests;
mod cost;
mod decode;
mod device;
mod disk;
mod engine;
mod eviction;
mod external;
mod fetch;
mod front_end;
mod journal;
mod keys;
mod lease;
mod lmcache_arc;
mod moments;
mod pieces;
mod placement;
mod prefetch;
mod queue;
mod request;
mod s3fifo;
mod schedule;
mod server;
pub mod storage;
mod stream;
mod tier_config;
mod tiers;
mod time;
mod transfers;

#[cfg(test)]
mod tests;

pub use cache::replay;
pub use cluster::{Cluster, Routing, Sharing};
pub use engine::{Counters, Engine, EngineConfig};
pub use eviction::EvictionKind;
pub use journal::Note;
pub use keys::Segment;
pub use request::{Completion, Prompt, Sources, Submission};
pub use time::{FOREVER, Ticks, from_s, to_s};

/// A request is a few dozen small vectors that live as long as it does.
#[cfg(feature = "python")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[cfg(feature = "python")]
mod python;
#[cfg(feature = "python")]
mod python_cluster;
#[cfg(feature = "python")]
mod python_policies;
