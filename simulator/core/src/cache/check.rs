//! What must hold of a level at any moment, and what tests look at.

use super::Cache;
use crate::chunks::{Extent, PASSED, RESIDENT, STORING, TEMPORARY};
use crate::keys::Key;

impl Cache {
    fn extent(&self, key: Key) -> Option<&Extent> {
        self.chunks.iter().find(|extent| extent.keys().contains(&key))
    }

    pub fn readers(&self, key: Key) -> u32 {
        self.extent(key).map_or(0, |extent| extent.readers)
    }

    pub fn contains(&self, key: Key) -> bool {
        self.extent(key).is_some_and(|extent| extent.is(RESIDENT))
    }

    /// Resident or being written.
    pub fn all_keys(&self) -> Vec<Key> {
        self.chunks.iter().flat_map(|extent| extent.keys().iter().copied()).collect()
    }

    /// Panics unless the books agree, as they must at any moment.
    pub fn check(&self) {
        let count = |which: fn(&Extent) -> bool| -> u64 {
            self.chunks.iter().filter(|extent| which(extent)).map(Extent::chunks).sum()
        };
        let staged: u64 = self.chunks.iter().map(|extent| u64::from(extent.staged) * extent.chunks()).sum();
        assert!(self.used <= self.capacity, "{} of {} chunks", self.used, self.capacity);
        assert_eq!((self.resident(), self.staged), (count(|extent| extent.is(RESIDENT)), staged));
        assert_eq!(self.tracked, count(Extent::queued));
        assert_eq!(self.evictable, count(Extent::settled));
        let mut keys = self.all_keys();
        keys.sort_unstable();
        assert!(keys.windows(2).all(|pair| pair[0] < pair[1]), "a chunk that is there twice");
        for extent in self.chunks.iter() {
            assert!(extent.chunks() > 0 && extent.keys()[0] == extent.key, "an extent under another's key");
            assert!(extent.is(RESIDENT) || extent.staged > 0, "a chunk that is nowhere");
            assert!(extent.is(RESIDENT) || extent.readers == 0, "a chunk is read and not there");
            assert!(extent.queued() || !extent.is(RESIDENT), "a chunk that can never go");
            assert!(!extent.is(STORING) || extent.staged > 0);
            assert!(!extent.is(TEMPORARY) || extent.readers > 0, "a temporary chunk without a reader");
            assert!(!extent.is(PASSED));
        }
    }

    /// As `check`, once no read or write is in flight.
    pub fn check_idle(&self) {
        self.check();
        assert!(self.chunks.iter().all(|extent| extent.staged == 0 && extent.readers == 0));
    }
}
