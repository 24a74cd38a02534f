//! Ghosts: keys of evicted chunks that a policy remembers.

use std::collections::BTreeMap;

use crate::keys::{Key, KeyMap};

/// Keys of evicted chunks, the oldest first.
#[derive(Debug, Default)]
pub struct Ghosts {
    order: BTreeMap<u64, Key>,
    numbers: KeyMap<u64>,
    next: u64,
}

impl Ghosts {
    pub fn len(&self) -> u64 {
        self.numbers.len() as u64
    }

    pub fn push(&mut self, key: Key) {
        self.remove(key);
        self.order.insert(self.next, key);
        self.numbers.insert(key, self.next);
        self.next += 1;
    }

    pub fn remove(&mut self, key: Key) -> bool {
        let number = self.numbers.remove(&key);
        number.is_some_and(|number| self.order.remove(&number).is_some())
    }

    pub fn forget_oldest(&mut self) {
        if let Some((_, key)) = self.order.pop_first() {
            self.numbers.remove(&key);
        }
    }
}
