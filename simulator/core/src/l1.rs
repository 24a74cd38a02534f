//! The CPU tier with LMCache's bookkeeping (l1_manager.py, eviction_policy/lru.py): what is resident, being written or
//! being read, and in which order it would go.
//!
//! A key is in the order of eviction from the moment at which room for it is reserved. Counts of chunks stand for bytes.

use crate::keys::{Key, KeyMap};
use crate::lru::Lru;

#[derive(Clone, Copy, Debug, Default)]
struct State {
    resident: bool,
    /// Gone with its last reader.
    temporary: bool,
    readers: u32,
    /// Writes in flight, each with room of its own; at most one of them is a store.
    staged: u32,
    storing: bool,
}

#[derive(Debug)]
pub struct L1 {
    capacity: u64,
    used: u64,
    states: KeyMap<State>,
    order: Lru,
}

impl L1 {
    pub fn new(capacity: u64) -> Self {
        Self { capacity, used: 0, states: KeyMap::default(), order: Lru::default() }
    }

    pub fn contains(&self, key: Key) -> bool {
        self.states.get(&key).is_some_and(|state| state.resident)
    }

    /// Held or reserved, as a share of what there is room for.
    pub fn usage(&self) -> f64 {
        if self.capacity == 0 { 0.0 } else { self.used as f64 / self.capacity as f64 }
    }

    /// Keys in the order of eviction.
    pub fn tracked(&self) -> u64 {
        self.order.len()
    }

    /// Those of the keys that a store would write: neither resident nor being stored.
    pub fn storable(&self, keys: &[Key]) -> Vec<Key> {
        let new = |key: &&Key| !self.states.get(*key).is_some_and(|state| state.resident || state.storing);
        keys.iter().filter(new).copied().collect()
    }

    /// Chunks beyond the capacity if `count` more came.
    pub fn excess(&self, count: u64) -> u64 {
        (self.used + count).saturating_sub(self.capacity)
    }

    /// Room for all of the keys or for none of them.
    pub fn reserve(&mut self, keys: &[Key], storing: bool) -> bool {
        if self.excess(keys.len() as u64) > 0 {
            return false;
        }
        self.used += keys.len() as u64;
        for &key in keys {
            let state = self.states.entry(key).or_default();
            state.staged += 1;
            state.storing |= storing;
        }
        self.newest(keys);
        true
    }

    /// Ends a store. Returns the keys that became resident; the others were so already, and their room is given back.
    pub fn admit_stored(&mut self, keys: &[Key]) -> Vec<Key> {
        let mut admitted = Vec::with_capacity(keys.len());
        for &key in keys {
            let state = self.states.entry(key).or_default();
            (state.staged, state.storing) = (state.staged - 1, false);
            if state.resident {
                self.used -= 1;
            } else {
                (state.resident, state.temporary) = (true, false);
                admitted.push(key);
            }
        }
        self.newest(&admitted);
        admitted
    }

    /// Ends a read from below; each of the keys has one more reader.
    pub fn admit_loaded(&mut self, keys: &[Key], temporary: bool) {
        let mut admitted = Vec::with_capacity(keys.len());
        for &key in keys {
            let state = self.states.entry(key).or_default();
            state.staged -= 1;
            state.readers += 1;
            if state.resident {
                self.used -= 1;
            } else {
                (state.resident, state.temporary) = (true, temporary);
                admitted.push(key);
            }
        }
        self.newest(&admitted);
    }

    /// One more reader for each of these resident keys.
    pub fn lock(&mut self, keys: &[Key]) {
        for key in keys {
            if let Some(state) = self.states.get_mut(key) {
                state.readers += 1;
            }
        }
    }

    pub fn unlock(&mut self, keys: &[Key]) {
        for &key in keys {
            let Some(state) = self.states.get_mut(&key) else { continue };
            state.readers = state.readers.saturating_sub(1);
            if state.temporary && state.resident && state.readers == 0 {
                self.remove(key);
            }
        }
    }

    /// Makes those of the keys that are known the most recently used ones, the first most of all.
    pub fn touch(&mut self, keys: &[Key]) {
        keys.iter().rev().for_each(|&key| self.order.touch(key));
    }

    /// Picks the `count` least recently used of the resident keys that nobody reads, and drops them. One that is being
    /// written once more is picked and stays.
    pub fn evict(&mut self, count: u64) -> Vec<Key> {
        let free = |key: &Key| self.states.get(key).is_some_and(|state| state.resident && state.readers == 0);
        let mut picked: Vec<Key> = self.order.iter().filter(free).take(count as usize).collect();
        picked.retain(|key| self.states.get(key).is_some_and(|state| state.staged == 0));
        picked.iter().for_each(|&key| self.remove(key));
        picked
    }

    fn newest(&mut self, keys: &[Key]) {
        keys.iter().rev().for_each(|&key| self.order.use_key(key));
    }

    /// Takes the resident copy away, and the key out of the order even if a write to it is in flight.
    fn remove(&mut self, key: Key) {
        self.used -= 1;
        self.order.remove(key);
        match self.states.get_mut(&key) {
            Some(state) if state.staged > 0 => (state.resident, state.temporary) = (false, false),
            _ => drop(self.states.remove(&key)),
        }
    }
}

#[cfg(test)]
impl L1 {
    pub fn used(&self) -> u64 {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(l1: &mut L1, keys: &[Key]) {
        assert!(l1.reserve(keys, true));
        l1.admit_stored(keys);
    }

    #[test]
    fn a_prompts_tail_goes_first_and_what_is_read_stays() {
        let mut l1 = L1::new(6);
        stored(&mut l1, &[1, 2, 3]);
        stored(&mut l1, &[4, 5]);
        l1.lock(&[2]);
        l1.touch(&[3]);
        assert_eq!(l1.evict(3), [1, 5, 4]);
        assert_eq!(l1.evict(3), [3]);
        assert_eq!((l1.used(), l1.usage(), l1.tracked()), (1, 1.0 / 6.0, 1));
    }

    #[test]
    fn writes_get_room_for_all_or_nothing_and_count_from_the_start() {
        let mut l1 = L1::new(3);
        assert!(l1.reserve(&[1, 2], true));
        assert_eq!((l1.tracked(), l1.contains(1)), (2, false));
        assert_eq!(l1.storable(&[1, 2, 3]), [3]);
        assert!(!l1.reserve(&[3, 4], true));
        assert_eq!(l1.evict(2), [0u64; 0]);
        assert_eq!(l1.admit_stored(&[1, 2]), [1, 2]);
    }

    #[test]
    fn a_temporary_key_serves_all_its_readers_and_takes_the_place_of_a_store() {
        let mut l1 = L1::new(4);
        assert!(l1.reserve(&[7], true) && l1.reserve(&[7], false) && l1.reserve(&[7], false));
        l1.admit_loaded(&[7], true);
        l1.admit_loaded(&[7], true);
        assert_eq!((l1.used(), l1.contains(7)), (2, true));
        assert_eq!(l1.admit_stored(&[7]), [0u64; 0]);
        l1.unlock(&[7]);
        assert_eq!((l1.used(), l1.contains(7)), (1, true));
        l1.unlock(&[7]);
        assert_eq!((l1.used(), l1.contains(7), l1.tracked()), (0, false, 0));
    }
}
