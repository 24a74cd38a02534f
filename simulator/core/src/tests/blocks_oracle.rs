//! The GPU's block pool block by block, as in vLLM's block_pool.py: one free queue in eviction order, blocks that stay
//! findable by key until they are handed out again, and no merging of equal blocks. `blocks.rs` is tested against it.

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
    /// The next block of the same key, in the order in which the blocks got the key.
    twin: u32,
}

#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// The first block of each key; a look-up answers with that one.
    first: KeyMap<BlockId>,
    head: u32,
    tail: u32,
    free: u64,
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

    /// How many of these blocks have no user: `take` takes those out of the free queue.
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

    /// Hands out the block at the head of the free queue, and drops its contents. None: no block is free.
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

impl BlockPool {
    /// The contents of the blocks in the free queue, in the order in which the pool hands them out.
    pub fn contents(&self) -> Vec<Option<Key>> {
        self.queue().into_iter().map(|id| self.blocks[id as usize].key).collect()
    }

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

mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::engine::blocks::{self, Adds, Held};
    use crate::journal::Journal;
    use crate::keys::{BlockRun, Segment, block_keys, block_runs};

    const SIZE: u64 = 4;

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

    /// A request on both pools: what it asks for, and what it holds.
    struct Pair {
        keys: Vec<Key>,
        runs: Vec<BlockRun>,
        ids: Vec<BlockId>,
        registered: usize,
        held: Held,
    }

    /// Requests of a few shared streams, in segments that often end within a block.
    fn recipe(chance: &mut impl FnMut(u64) -> u64) -> Vec<Segment> {
        (0..1 + chance(4)).map(|_| Segment { hash_id: chance(3) as i64, tokens: 1 + chance(40) }).collect()
    }

    fn begin(pools: &mut (BlockPool, blocks::BlockPool), recipe: &[Segment], most: u64) -> Pair {
        let (keys, runs) = (block_keys(recipe, SIZE), block_runs(recipe, SIZE));
        let ids = pools.0.find(&keys[..keys.len().min(most as usize)]);
        let cached = pools.1.find(&runs, most);
        assert_eq!((cached.end.blocks, cached.unused), (ids.len() as u64, pools.0.unused(&ids)));
        let mut pair = Pair { keys, runs, registered: ids.len(), ids, held: Held::default() };
        pools.0.take(&pair.ids);
        pools.1.take(&cached, &mut pair.held);
        pair
    }

    fn grow(pools: &mut (BlockPool, blocks::BlockPool), pair: &mut Pair, count: u64) {
        let ids: Vec<BlockId> = (0..count).map_while(|_| pools.0.allocate()).collect();
        let dropped: Vec<_> = pools.1.queue().into_iter().take(ids.len()).flatten().collect();
        assert_eq!(pools.1.allocate(count, &mut pair.held), ids.len() as u64);
        let notes = pools.1.journal.take().into_iter().map(|note| (note.numbers[0], note.numbers[1] as u32));
        assert_eq!(notes.collect::<Vec<_>>(), dropped);
        pair.ids.extend(ids);
    }

    fn register(pools: &mut (BlockPool, blocks::BlockPool), pair: &mut Pair, count: u64) {
        let end = pair.keys.len().min(pair.ids.len()).min(pair.registered + count as usize);
        (pair.registered..end).for_each(|i| pools.0.register(pair.ids[i], pair.keys[i]));
        pair.registered = pair.registered.max(end);
        pools.1.register(&pair.runs, end as u64, &mut pair.held, Adds::Computed);
    }

    #[test]
    fn extents_give_what_single_blocks_give() {
        let mut seed = 0u64;
        let mut chance = |bound: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % bound
        };
        let (mut hits, mut twins) = (0, 0);
        for round in 0..300 {
            let count = 5 + chance(60) as u32;
            let mut pools = (BlockPool::new(count), blocks::BlockPool::new(count, Journal::new(true)));
            let mut names: HashMap<Key, (Key, u32)> = HashMap::new();
            let mut pairs: Vec<Pair> = Vec::new();
            for _ in 0..150 {
                let some = chance(pairs.len().max(1) as u64) as usize;
                match chance(6) {
                    0 | 1 => {
                        let most = if chance(3) == 0 { chance(12) } else { 100 };
                        let pair = begin(&mut pools, &recipe(&mut chance), most);
                        let numbers = pair.runs.iter().flat_map(|run| (0..run.blocks).map(|i| (run.key, i)));
                        names.extend(pair.keys.iter().copied().zip(numbers));
                        hits += pair.ids.len();
                        pairs.push(pair);
                    }
                    2 | 3 if !pairs.is_empty() => grow(&mut pools, &mut pairs[some], chance(9)),
                    4 if !pairs.is_empty() => register(&mut pools, &mut pairs[some], chance(9)),
                    5 if !pairs.is_empty() => {
                        let mut pair = pairs.swap_remove(some);
                        pools.0.release(&pair.ids);
                        pools.1.release(&mut pair.held);
                    }
                    _ => {}
                }
                let contents = pools.0.contents().into_iter().map(|key| key.map(|key| names[&key]));
                assert_eq!(pools.1.queue(), contents.collect::<Vec<_>>(), "round {round}");
                pools.1.check(pairs.iter().map(|pair| &pair.held));
            }
            twins += pools.0.blocks.iter().filter(|block| block.twin != NONE).count();
        }
        assert!(
            hits > 1000 && twins > 100,
            "{hits} hits, {twins} equal blocks: the loads are meant to have many"
        );
    }
}
