//! Keys in order of use, some of them locked: what both chunk tiers keep their contents in.

use crate::keys::{Key, KeyMap};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    key: Key,
    older: u32,
    newer: u32,
    locks: u32,
}

#[derive(Clone, Debug)]
pub struct Lru {
    index: KeyMap<u32>,
    nodes: Vec<Node>,
    spare: Vec<u32>,
    oldest: u32,
    newest: u32,
}

impl Default for Lru {
    fn default() -> Self {
        Self { index: KeyMap::default(), nodes: Vec::new(), spare: Vec::new(), oldest: NONE, newest: NONE }
    }
}

impl Lru {
    pub fn len(&self) -> u64 {
        self.index.len() as u64
    }

    pub fn contains(&self, key: Key) -> bool {
        self.index.contains_key(&key)
    }

    /// Makes the key the most recently used one, adding it if it is not there.
    pub fn use_key(&mut self, key: Key) {
        match self.index.get(&key) {
            Some(&at) => {
                self.unlink(at);
                self.link_newest(at);
            }
            None => {
                let node = Node { key, older: NONE, newer: NONE, locks: 0 };
                let at = match self.spare.pop() {
                    Some(at) => {
                        self.nodes[at as usize] = node;
                        at
                    }
                    None => {
                        self.nodes.push(node);
                        (self.nodes.len() - 1) as u32
                    }
                };
                self.index.insert(key, at);
                self.link_newest(at);
            }
        }
    }

    /// Makes the key the most recently used one if it is there.
    pub fn touch(&mut self, key: Key) {
        if let Some(&at) = self.index.get(&key) {
            self.unlink(at);
            self.link_newest(at);
        }
    }

    pub fn remove(&mut self, key: Key) {
        if let Some(at) = self.index.remove(&key) {
            self.unlink(at);
            self.spare.push(at);
        }
    }

    /// Keys, the least recently used first.
    pub fn iter(&self) -> impl Iterator<Item = Key> + '_ {
        let at = |at: u32| (at != NONE).then(|| &self.nodes[at as usize]);
        std::iter::successors(at(self.oldest), move |node| at(node.newer)).map(|node| node.key)
    }

    /// Keeps the key from being dropped until as many `unlock`s came. Unknown keys are let be.
    pub fn lock(&mut self, key: Key) {
        if let Some(&at) = self.index.get(&key) {
            self.nodes[at as usize].locks += 1;
        }
    }

    pub fn unlock(&mut self, key: Key) {
        if let Some(&at) = self.index.get(&key) {
            let locks = &mut self.nodes[at as usize].locks;
            *locks = locks.saturating_sub(1);
        }
    }

    /// Drops up to `count` unlocked keys, the least recently used first, and returns them.
    pub fn drop_oldest(&mut self, count: u64) -> Vec<Key> {
        let (mut dropped, mut at) = (Vec::new(), self.oldest);
        while at != NONE && (dropped.len() as u64) < count {
            let Node { key, newer, locks, .. } = self.nodes[at as usize];
            if locks == 0 {
                self.unlink(at);
                self.index.remove(&key);
                self.spare.push(at);
                dropped.push(key);
            }
            at = newer;
        }
        dropped
    }

    fn unlink(&mut self, at: u32) {
        let Node { older, newer, .. } = self.nodes[at as usize];
        match older {
            NONE => self.oldest = newer,
            other => self.nodes[other as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            other => self.nodes[other as usize].older = older,
        }
    }

    fn link_newest(&mut self, at: u32) {
        let previous = self.newest;
        let node = &mut self.nodes[at as usize];
        (node.older, node.newer) = (previous, NONE);
        match previous {
            NONE => self.oldest = at,
            other => self.nodes[other as usize].newer = at,
        }
        self.newest = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_in_order_of_use_and_skips_what_is_locked() {
        let mut lru = Lru::default();
        (1..=5).for_each(|key| lru.use_key(key));
        lru.use_key(1);
        lru.lock(3);
        assert_eq!(lru.drop_oldest(3), [2, 4, 5]);
        assert_eq!((lru.len(), lru.contains(3), lru.contains(4)), (2, true, false));
        lru.unlock(3);
        lru.use_key(9);
        assert_eq!(lru.drop_oldest(9), [3, 1, 9]);
        assert_eq!(lru.drop_oldest(1), [0u64; 0]);
    }
}
