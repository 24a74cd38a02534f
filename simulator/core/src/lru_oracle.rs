//! Keys in order of use, some of them locked, key by key. `lru.rs` is tested against it.

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

mod tests {
    use super::*;
    use crate::lru;

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

    /// Prefixes of a few chains that part from each other here and there.
    fn chains() -> Vec<Vec<Key>> {
        let key =
            |chain: u64, at: u64| if at < chain % 4 * 5 { 1000 + at } else { 10_000 * (chain + 1) + at };
        (0..8).map(|chain| (0..30).map(|at| key(chain, at)).collect()).collect()
    }

    fn assert_equal(oracle: &Lru, lru: &lru::Lru, chains: &[Vec<Key>], step: u32) {
        assert_eq!(oracle.len(), lru.len(), "step {step}");
        for chain in chains {
            let contained: Vec<bool> = chain.iter().map(|&key| oracle.contains(key)).collect();
            assert_eq!(lru.walk(chain, 0..30).collect::<Vec<_>>(), contained, "step {step}");
            assert_eq!(lru.walk(chain, 13..30).collect::<Vec<_>>(), contained[13..], "step {step}");
        }
    }

    #[test]
    fn pieces_of_chains_give_what_single_keys_give() {
        let mut seed = 1u64;
        let mut chance = |bound: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((seed >> 33) % bound) as usize
        };
        let (chains, mut dropped) = (chains(), 0);
        let (mut oracle, mut lru) = (Lru::default(), lru::Lru::default());
        for step in 0..6000 {
            let chain = &chains[chance(8)];
            let start = chance(30);
            let range = start..start + 1 + chance(30 - start as u64);
            match chance(8) {
                0 | 1 => {
                    chain[range.clone()].iter().rev().for_each(|&key| oracle.use_key(key));
                    lru.touch(chain, range, 0);
                }
                2 => {
                    for &key in chain[range.clone()].iter().rev() {
                        oracle.use_key(key);
                        oracle.lock(key);
                    }
                    lru.touch(chain, range, 1);
                }
                3 => {
                    chain[range.clone()].iter().for_each(|&key| oracle.lock(key));
                    lru.lock(chain, range);
                }
                4..7 => {
                    chain[range.clone()].iter().for_each(|&key| oracle.unlock(key));
                    lru.unlock(chain, range);
                }
                _ => {
                    let (count, mut gone) = (chance(40) as u64, Vec::new());
                    assert_eq!(lru.drop_oldest(count, |key| gone.push(key)), gone.len() as u64);
                    assert_eq!(gone, oracle.drop_oldest(count), "step {step}");
                    dropped += gone.len();
                }
            }
            assert_equal(&oracle, &lru, &chains, step);
        }
        assert!(dropped > 3000, "{dropped} dropped: the loads are meant to drop many");
    }
}
