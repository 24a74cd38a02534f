//! How many chunks a level holds and has room for, and when that changes.

use super::Cache;
use crate::eviction::Eviction;
use crate::time::Ticks;

impl Cache {
    /// Held and reserved chunks, as a share of the capacity.
    pub fn usage(&self) -> f64 {
        if self.capacity == 0 { 0.0 } else { self.used as f64 / self.capacity as f64 }
    }

    pub fn used(&self) -> u64 {
        self.used
    }

    /// Keys in the order of eviction.
    pub fn tracked(&self) -> u64 {
        self.tracked
    }

    /// Chunks that are there: `used` without the room of writes in flight.
    pub fn resident(&self) -> u64 {
        self.used - self.staged
    }

    /// How many chunks a write could bring; `evicts`: also in the place of others.
    pub fn room(&self, evicts: bool) -> u64 {
        let ready = || self.eviction.ready(&self.chunks).unwrap_or(self.evictable);
        self.capacity.saturating_sub(self.used) + if evicts { ready() } else { 0 }
    }

    /// When time alone next makes a chunk evictable.
    pub fn next_change(&self) -> Option<Ticks> {
        self.eviction.next_change()
    }
}
