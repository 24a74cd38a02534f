//! Chunks of a prompt, as the tiers hand them around: a chain of keys, and which of it.

use std::ops::Range;
use std::sync::Arc;

use crate::keys::Key;
use crate::lru::Lru;

/// The keys of a prompt's whole chunks, from its first on.
pub type Chain = Arc<[Key]>;

/// Some chunks of a chain.
#[derive(Debug)]
pub struct Chunks {
    pub chain: Chain,
    pub ranges: Vec<Range<usize>>,
}

impl Chunks {
    pub fn count(&self) -> u64 {
        self.ranges.iter().map(|range| range.len() as u64).sum()
    }

    pub fn push(&mut self, at: usize) {
        match self.ranges.last_mut() {
            Some(range) if range.end == at => range.end += 1,
            _ => self.ranges.push(at..at + 1),
        }
    }

    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.ranges.iter().cloned().flatten()
    }

    pub fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.positions().map(|at| self.chain[at])
    }
}

/// A prefix of a request's chunks that the tiers hold, locked until `release`. The first `in_cpu.len()` chunks.
#[derive(Clone, Debug, Default)]
pub struct Hit {
    pub chain: Chain,
    /// Chunk by chunk: found in the CPU tier (else read from disk).
    pub in_cpu: Vec<bool>,
}

impl Hit {
    pub fn chunks(&self) -> u64 {
        self.in_cpu.len() as u64
    }

    pub fn disk_chunks(&self) -> u64 {
        self.in_cpu.iter().filter(|in_cpu| !**in_cpu).count() as u64
    }

    pub fn chunks_where(&self, in_cpu: bool) -> Chunks {
        let mut chunks = Chunks { chain: self.chain.clone(), ranges: Vec::new() };
        let held = self.in_cpu.iter().enumerate().filter(|(_, held)| **held == in_cpu);
        held.for_each(|(at, _)| chunks.push(at));
        chunks
    }
}

/// Makes chunks the most recently used ones and locks them so many times. The tail of a prefix is the first to go, so
/// it is the first to be touched.
pub fn touch(tier: &mut Lru, chunks: &Chunks, locks: u32) {
    chunks.ranges.iter().rev().for_each(|range| tier.touch(&chunks.chain, range.clone(), locks));
}

pub fn unlock(tier: &mut Lru, chunks: &Chunks) {
    chunks.ranges.iter().for_each(|range| tier.unlock(&chunks.chain, range.clone()));
}
