//! The GPU's block pool with prefix caching, as in vLLM's block_pool.py: one free queue in eviction order, blocks
//! that stay findable by key until they are handed out again, and no merging of equal blocks.

use crate::journal::Journal;
use crate::keys::{Key, KeyMap};

pub type BlockId = u32;

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    users: u32,
    key: Option<Key>,
    /// Neighbours in the free queue; meaningful while users == 0.
    before: u32,
    after: u32,
    /// The next block that holds the same key, in the order in which they came to hold it.
    twin: u32,
}

#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// The first block of each key; a look-up answers with that one.
    first: KeyMap<BlockId>,
    head: u32,
    tail: u32,
    free: u64,
    /// "evicted": block and key.
    pub journal: Journal,
}

impl BlockPool {
    pub fn new(count: u32) -> Self {
        let empty = Block { users: 0, key: None, before: NONE, after: NONE, twin: NONE };
        let mut pool = Self {
            blocks: vec![empty; count as usize],
            first: KeyMap::default(),
            head: NONE,
            tail: NONE,
            free: 0,
            journal: Journal::default(),
        };
        (0..count).for_each(|id| pool.append(id));
        pool
    }

    pub fn free(&self) -> u64 {
        self.free
    }

    pub fn len(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// The blocks that hold the longest prefix of `keys`.
    pub fn find(&self, keys: &[Key]) -> Vec<BlockId> {
        keys.iter().map_while(|key| self.first.get(key).copied()).collect()
    }

    /// How many of these blocks nobody uses: taking them takes them out of the free queue.
    pub fn unused(&self, ids: &[BlockId]) -> u64 {
        ids.iter().filter(|&&id| self.blocks[id as usize].users == 0).count() as u64
    }

    /// One more user for each of these cached blocks.
    pub fn take(&mut self, ids: &[BlockId]) {
        for &id in ids {
            if self.blocks[id as usize].users == 0 {
                self.unlink(id);
            }
            self.blocks[id as usize].users += 1;
        }
    }

    /// Hands out the block at the head of the free queue; what it held is gone. None: no block is free.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let id = self.head;
        if id == NONE {
            return None;
        }
        self.unlink(id);
        self.forget(id);
        self.blocks[id as usize].users = 1;
        Some(id)
    }

    /// Makes a block findable by `key`.
    pub fn register(&mut self, id: BlockId, key: Key) {
        self.blocks[id as usize].key = Some(key);
        self.blocks[id as usize].twin = NONE;
        let Some(&first) = self.first.get(&key) else {
            self.first.insert(key, id);
            return;
        };
        let mut last = first;
        while self.blocks[last as usize].twin != NONE {
            last = self.blocks[last as usize].twin;
        }
        self.blocks[last as usize].twin = id;
    }

    /// One user less for each block of a request, given in the request's order. The request's tail comes first in the
    /// free queue; blocks without a key go to its front, in that order too.
    pub fn release(&mut self, ids: &[BlockId]) {
        let mut front = Vec::new();
        for &id in ids.iter().rev() {
            let block = &mut self.blocks[id as usize];
            block.users -= 1;
            if block.users == 0 {
                match block.key {
                    Some(_) => self.append(id),
                    None => front.push(id),
                }
            }
        }
        front.into_iter().rev().for_each(|id| self.prepend(id));
    }

    /// Forgets all contents; the order of the free queue stays.
    pub fn reset(&mut self) {
        self.first.clear();
        for block in &mut self.blocks {
            (block.key, block.twin) = (None, NONE);
        }
    }

    fn forget(&mut self, id: BlockId) {
        let Block { key, twin, .. } = self.blocks[id as usize];
        let Some(key) = key else { return };
        self.journal.note("evicted", || vec![u64::from(id), key]);
        (self.blocks[id as usize].key, self.blocks[id as usize].twin) = (None, NONE);
        let Some(&first) = self.first.get(&key) else { return };
        if first == id {
            match twin {
                NONE => self.first.remove(&key),
                other => self.first.insert(key, other),
            };
            return;
        }
        let mut at = first;
        while at != NONE && self.blocks[at as usize].twin != id {
            at = self.blocks[at as usize].twin;
        }
        if at != NONE {
            self.blocks[at as usize].twin = twin;
        }
    }

    fn append(&mut self, id: BlockId) {
        let tail = self.tail;
        (self.blocks[id as usize].before, self.blocks[id as usize].after) = (tail, NONE);
        match tail {
            NONE => self.head = id,
            other => self.blocks[other as usize].after = id,
        }
        self.tail = id;
        self.free += 1;
    }

    fn prepend(&mut self, id: BlockId) {
        let head = self.head;
        (self.blocks[id as usize].before, self.blocks[id as usize].after) = (NONE, head);
        match head {
            NONE => self.tail = id,
            other => self.blocks[other as usize].before = id,
        }
        self.head = id;
        self.free += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let Block { before, after, .. } = self.blocks[id as usize];
        match before {
            NONE => self.head = after,
            other => self.blocks[other as usize].after = after,
        }
        match after {
            NONE => self.tail = before,
            other => self.blocks[other as usize].before = before,
        }
        self.free -= 1;
    }
}

#[cfg(test)]
impl BlockPool {
    /// Ids in the free queue, next to be handed out first.
    pub fn queue(&self) -> Vec<BlockId> {
        let mut ids = Vec::new();
        let mut at = self.head;
        while at != NONE {
            ids.push(at);
            at = self.blocks[at as usize].after;
        }
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocate(pool: &mut BlockPool, count: usize) -> Vec<BlockId> {
        (0..count).map(|_| pool.allocate().expect("a free block")).collect()
    }

    #[test]
    fn a_request_is_freed_tail_first_and_blocks_without_key_go_to_the_front() {
        let mut pool = BlockPool::new(6);
        let ids = allocate(&mut pool, 4);
        (0..2).for_each(|i| pool.register(ids[i], 100 + i as u64));
        pool.release(&ids);
        assert_eq!(pool.queue(), [3, 2, 4, 5, 1, 0]);
        assert_eq!(pool.find(&[100, 101, 102]), [0, 1]);
    }

    #[test]
    fn a_hit_leaves_the_queue_and_a_block_handed_out_is_forgotten() {
        let mut pool = BlockPool::new(3);
        let ids = allocate(&mut pool, 2);
        pool.register(ids[0], 7);
        pool.register(ids[1], 8);
        pool.release(&ids);
        let hit = pool.find(&[7, 8]);
        assert_eq!(pool.unused(&hit), 2);
        pool.take(&hit[..1]);
        assert_eq!(pool.queue(), [2, 1]);
        allocate(&mut pool, 2);
        assert_eq!((pool.find(&[7, 8]), pool.allocate()), (vec![0], None));
    }

    #[test]
    fn equal_blocks_stay_apart_and_the_first_answers() {
        let mut pool = BlockPool::new(3);
        let ids = allocate(&mut pool, 3);
        ids.iter().for_each(|&id| pool.register(id, 7));
        pool.release(&ids[1..2]);
        assert_eq!(pool.allocate(), Some(1));
        assert_eq!(pool.find(&[7]), [0]);
        pool.release(&ids[..1]);
        assert_eq!((pool.allocate(), pool.find(&[7])), (Some(0), vec![2]));
    }

    #[test]
    fn reset_forgets_contents_and_keeps_blocks() {
        let mut pool = BlockPool::new(2);
        let ids = allocate(&mut pool, 1);
        pool.register(ids[0], 7);
        pool.release(&ids);
        pool.reset();
        assert_eq!((pool.find(&[7]).len(), pool.free(), pool.len()), (0, 2, 2));
    }
}
