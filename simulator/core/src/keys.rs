//! Block identity without tokens: a block's key is a chain hash over the pieces of streams in the block.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;

pub type Key = u64;

/// The first `tokens` tokens of the endless token stream that `hash_id` names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Segment {
    pub hash_id: i64,
    pub tokens: u64,
}

/// Keys are hashes already: maps use them directly. Nothing depends on a map's order.
#[derive(Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = mix(self.0 ^ u64::from(*byte));
        }
    }
    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

pub type KeyMap<V> = HashMap<Key, V, BuildHasherDefault<AsIs>>;

/// The key of something with a number of its own. Maps rely on keys being spread: numbers in a row would fill
/// neighbouring places, and each look-up would pass all that were ever removed there.
pub fn numbered(number: u64) -> Key {
    mix(number)
}

/// The finalizer of splitmix64: every input bit reaches every output bit, and no two inputs give the same output.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Hashes a recipe piece by piece into blocks of `size` tokens.
///
/// Every segment starts its stream at 0, and no piece spans two segments; empty segments add nothing. So there is one
/// way to write a sequence of tokens, and equal tokens give equal pieces.
struct HashChain {
    size: u64,
    key: Key,
    /// Tokens that the current block still lacks.
    room: u64,
    /// The hash of a whole block's length, as most pieces have it.
    whole: u64,
}

impl HashChain {
    fn new(size: u64) -> Self {
        Self { size, key: mix(size), room: size, whole: mix(size) }
    }

    /// Hashes the next piece of a stream, of `left` tokens at most. Returns its length, and whether it ends a block.
    fn piece(&mut self, stream: u64, offset: u64, left: u64) -> (u64, bool) {
        let piece = self.room.min(left);
        self.key = mix(self.key ^ stream);
        let length = if piece == self.size { self.whole } else { mix(piece) };
        self.key = mix(self.key ^ mix(offset).rotate_left(17) ^ length.rotate_left(43));
        self.room -= piece;
        let ends = self.room == 0;
        self.room = if ends { self.size } else { self.room };
        (piece, ends)
    }

    /// Adds the key of each block that ends in a segment.
    fn keys(&mut self, stream: u64, tokens: u64, keys: &mut Vec<Key>) {
        let mut offset = 0;
        while offset < tokens {
            let (piece, ends) = self.piece(stream, offset, tokens - offset);
            offset += piece;
            if ends {
                keys.push(self.key);
            }
        }
    }

    /// Adds the runs of the blocks that end in a segment.
    fn runs(&mut self, stream: u64, tokens: u64, runs: &mut Vec<BlockRun>) {
        let mut offset = 0;
        while offset < tokens {
            let left = tokens - offset;
            let (piece, ends) = self.piece(stream, offset, left);
            offset += piece;
            if ends {
                let blocks = if piece == self.size { left / self.size } else { 1 };
                runs.push(BlockRun { key: self.key, blocks: blocks as u32 });
                self.key = mix(self.key ^ blocks.rotate_left(29));
                offset += (blocks - 1) * self.size;
            }
        }
    }
}

fn stream(segment: &Segment) -> u64 {
    mix(segment.hash_id as u64)
}

/// The keys of the whole blocks of `size` tokens in a recipe. Equal keys: the recipes agree on all tokens up to there.
pub fn block_keys(recipe: &[Segment], size: u64) -> Vec<Key> {
    let tokens: u64 = recipe.iter().map(|segment| segment.tokens).sum();
    let (mut chain, mut keys) = (HashChain::new(size), Vec::with_capacity((tokens / size) as usize));
    recipe.iter().for_each(|segment| chain.keys(stream(segment), segment.tokens, &mut keys));
    keys
}

/// Whole blocks in a row of one segment, or one block that spans several. The i-th of them is (key, i).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRun {
    pub key: Key,
    pub blocks: u32,
}

/// The whole blocks of `size` tokens in a recipe, as runs: the work grows with the segments, not with the blocks.
///
/// Equal (key, i): the recipes agree on all tokens up to there. The tokens alone decide where runs begin, and a run's
/// end is part of the next run's key. So equal tokens give equal pairs.
pub fn block_runs(recipe: &[Segment], size: u64) -> Vec<BlockRun> {
    let (mut chain, mut runs) = (HashChain::new(size), Vec::with_capacity(recipe.len() + 2));
    recipe.iter().for_each(|segment| chain.runs(stream(segment), segment.tokens, &mut runs));
    runs
}

/// A position in a list of runs: behind its first `blocks` blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCursor {
    pub blocks: u64,
    pub run: usize,
    pub offset: u32,
}

impl BlockCursor {
    /// The next block: its run's key and its number in the run.
    pub fn next(&self, runs: &[BlockRun]) -> Option<(Key, u32)> {
        runs.get(self.run).map(|run| (run.key, self.offset))
    }

    /// How many blocks there are between here and that block; None: it is not ahead.
    pub fn distance(&self, runs: &[BlockRun], (key, number): (Key, u32)) -> Option<u64> {
        let (mut passed, mut offset) = (0, self.offset);
        for run in runs.get(self.run..)? {
            if run.key == key && (offset..run.blocks).contains(&number) {
                return Some(passed + u64::from(number - offset));
            }
            passed += u64::from(run.blocks - offset);
            offset = 0;
        }
        None
    }

    pub fn advance(&mut self, runs: &[BlockRun], blocks: u32) {
        self.blocks += u64::from(blocks);
        self.offset += blocks;
        if self.offset == runs[self.run].blocks {
            (self.run, self.offset) = (self.run + 1, 0);
        }
    }
}

/// Adds the keys of the prompt's chunks, if those have a size, and the runs of the prompt's and the reply's blocks.
/// `stores_replies`: the keys of the reply's chunks, too. Returns how many chunks are the prompt's own. Each hash waits
/// for the one before it: the processor computes both chains in the time of one.
pub fn keys_and_runs(
    (prompt, reply): (&[Segment], Segment),
    (chunk, keys): (Option<u64>, &mut Vec<Key>),
    (block, runs): (u64, &mut Vec<BlockRun>),
    stores_replies: bool,
) -> usize {
    let (mut chunks, mut blocks) = (chunk.map(HashChain::new), HashChain::new(block));
    for segment in prompt {
        let stream = stream(segment);
        if let Some(chunks) = &mut chunks {
            chunks.keys(stream, segment.tokens, keys);
        }
        blocks.runs(stream, segment.tokens, runs);
    }
    let prompts = keys.len();
    if let Some(chunks) = chunks.as_mut().filter(|_| stores_replies) {
        chunks.keys(stream(&reply), reply.tokens, keys);
    }
    blocks.runs(stream(&reply), reply.tokens, runs);
    prompts
}

/// Chunks in a row of a prompt, with the keys of the chunks before them.
#[derive(Clone, Debug, Default)]
pub struct ChunkRange {
    prompt: Option<Arc<[Key]>>,
    first: usize,
    end: usize,
}

impl ChunkRange {
    /// All chunks of a prompt.
    pub fn of(keys: impl Into<Arc<[Key]>>) -> Self {
        let prompt: Arc<[Key]> = keys.into();
        Self { first: 0, end: prompt.len(), prompt: Some(prompt) }
    }

    /// The chunks of these numbers, counted from this range's first one; they may lie beyond its end.
    pub fn slice(&self, range: Range<usize>) -> Self {
        Self { prompt: self.prompt.clone(), first: self.first + range.start, end: self.first + range.end }
    }

    /// Drops the first `count` chunks.
    pub fn skip(&mut self, count: usize) {
        self.first += count;
    }

    /// Takes out the chunks from `at` on.
    pub fn split_off(&mut self, at: usize) -> Self {
        let beyond = self.slice(at..self.len());
        self.end = beyond.first;
        beyond
    }

    pub fn len(&self) -> usize {
        self.end - self.first
    }

    pub fn is_empty(&self) -> bool {
        self.first == self.end
    }

    /// The first chunk's number in the prompt.
    pub fn first(&self) -> usize {
        self.first
    }

    /// The whole prompt's keys, and maybe more. None: the range is empty.
    pub fn shared(&self) -> Option<Arc<[Key]>> {
        self.prompt.clone()
    }

    pub fn keys(&self) -> &[Key] {
        &self.prompt()[self.first..]
    }

    /// The prompt's keys up to this range's end.
    pub fn prompt(&self) -> &[Key] {
        self.prompt.as_deref().map_or(&[], |keys| &keys[..self.end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// (key, i) of each block.
    fn pairs(recipe: &[Segment]) -> Vec<(Key, u32)> {
        block_runs(recipe, 16).iter().flat_map(|run| (0..run.blocks).map(|i| (run.key, i))).collect()
    }

    #[test]
    fn runs_tell_blocks_apart_where_their_keys_do() {
        let parts: [&[(i64, u64)]; 10] = [
            &[(1, 40), (2, 100)],
            &[(1, 40), (3, 100)],
            &[(1, 40), (2, 70), (9, 40)],
            &[(1, 90)],
            &[(1, 48), (2, 100)],
            &[(1, 16), (1, 32), (2, 5)],
            &[(1, 32), (1, 32)],
            &[(9, 0), (1, 40), (2, 7), (2, 93)],
            &[(1, 5), (2, 5), (3, 5), (4, 200), (5, 1)],
            &[(1, 5), (2, 5), (3, 5), (4, 33), (5, 100)],
        ];
        let all: Vec<Vec<Segment>> = parts.iter().map(|part| recipe(part)).collect();
        for (a, b) in all.iter().flat_map(|a| all.iter().map(move |b| (a, b))) {
            let (keys_a, keys_b) = (block_keys(a, 16), block_keys(b, 16));
            let (pairs_a, pairs_b) = (pairs(a), pairs(b));
            assert_eq!((pairs_a.len(), pairs_b.len()), (keys_a.len(), keys_b.len()));
            for (i, j) in (0..keys_a.len()).flat_map(|i| (0..keys_b.len()).map(move |j| (i, j))) {
                assert_eq!(keys_a[i] == keys_b[j], pairs_a[i] == pairs_b[j], "{a:?} {i} {b:?} {j}");
            }
        }
    }

    fn recipe(parts: &[(i64, u64)]) -> Vec<Segment> {
        let segment = |&(hash_id, tokens)| Segment { hash_id, tokens };
        parts.iter().map(segment).collect()
    }

    #[test]
    fn prompts_share_a_block_only_up_to_where_they_agree() {
        let a = block_keys(&recipe(&[(1, 40), (2, 100)]), 16);
        let b = block_keys(&recipe(&[(1, 40), (3, 100)]), 16);
        assert_eq!(a.len(), 8);
        assert_eq!(a[..2], b[..2]);
        assert!((2..8).all(|i| a[i] != b[i]));
    }

    #[test]
    fn a_longer_look_at_a_stream_keeps_the_shorter_ones_keys() {
        let short = block_keys(&recipe(&[(7, 50)]), 16);
        let long = block_keys(&recipe(&[(7, 90)]), 16);
        assert_eq!(short[..], long[..3]);
        assert_eq!(block_keys(&recipe(&[(9, 0), (7, 50)]), 16), short);
    }

    #[test]
    fn a_stream_that_restarts_is_not_one_that_goes_on() {
        let once = block_keys(&recipe(&[(7, 32)]), 16);
        let twice = block_keys(&recipe(&[(7, 16), (7, 16)]), 16);
        assert_eq!(once[0], twice[0]);
        assert_ne!(once[1], twice[1]);
    }
}
