//! What the tiers have under way: answers, and transfers by their ids.

use std::collections::VecDeque;

use crate::chunks::At;
use crate::keys::{Key, Part};
use crate::time::Ticks;

pub type IoId = u64;
/// The engine's name for a request, handed back in `Ended`.
pub type Slot = usize;

/// A prefix of a request's chunks that the tiers hold, locked until `release`.
#[derive(Clone, Debug, Default)]
pub struct Hit {
    pub part: Part,
    /// Chunk by chunk: found in the CPU tier (else read from disk).
    pub in_cpu: Vec<bool>,
    /// Where they lie in the CPU tier; until they have been read, those on disk there. NONE: read past the CPU tier.
    pub(crate) places: Vec<At>,
}

impl Hit {
    pub fn chunks(&self) -> u64 {
        self.in_cpu.len() as u64
    }

    /// Takes its first chunks off it.
    pub(crate) fn skip(&mut self, count: usize) {
        self.part.skip(count);
        self.in_cpu.drain(..count);
        self.places.drain(..count);
    }

    /// Takes the chunks from `at` on out of it.
    pub(crate) fn split_off(&mut self, at: usize) -> Self {
        let part = self.part.split_off(at);
        Self { part, in_cpu: self.in_cpu.split_off(at), places: self.places.split_off(at) }
    }

    /// Where in the prompt the disk's chunk of that number lies; behind all chunks, if there are not so many.
    pub(crate) fn position_of_disk_chunk(&self, number: u64) -> usize {
        let mut on_disk = (0..self.in_cpu.len()).filter(|&index| !self.in_cpu[index]);
        on_disk.nth(number as usize).unwrap_or(self.in_cpu.len())
    }

    pub(crate) fn disk_chunks(&self) -> u64 {
        self.in_cpu.iter().filter(|in_cpu| !**in_cpu).count() as u64
    }

    pub(crate) fn places_where(&self, in_cpu: bool) -> impl Iterator<Item = At> {
        let of = self.places.iter().zip(&self.in_cpu).filter(move |(_, held)| **held == in_cpu);
        of.map(|(place, _)| *place)
    }

    pub(crate) fn disk_keys(&self) -> impl Iterator<Item = Key> {
        self.part.keys().iter().zip(&self.in_cpu).filter(|(_, in_cpu)| !**in_cpu).map(|(key, _)| *key)
    }
}

/// What the engine has to know of a transfer that ended.
#[derive(Debug)]
pub enum Ended {
    Lookup(Slot, Hit),
    Load(Slot),
    Store(Slot),
    Nothing,
}

/// A transfer, and when it ends. Quiet: no request waits for it.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    pub end: Ticks,
    pub id: IoId,
    pub quiet: bool,
}

/// A transfer of one of the devices that read for the disk tier.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Read {
    Disk(u64),
    PageCache(u64),
    /// Somebody else's.
    External,
}

/// A hit that is being read from disk: `chunks` by the transfer under way since `began`, `warm` after it from the page
/// cache. At the deadline it is answered with what is there.
#[derive(Debug)]
pub(crate) struct Prefetch {
    pub slot: Slot,
    pub hit: Hit,
    /// The places in the CPU tier for the disk's chunks, unless they are read past it.
    pub room: Vec<At>,
    pub began: Ticks,
    pub chunks: u64,
    pub warm: u64,
    pub deadline: Ticks,
}

#[derive(Debug)]
pub(crate) enum Op {
    /// Disk to CPU.
    Prefetch(Box<Prefetch>, Read),
    /// What is left of a read that was not waited for.
    Rest(Read),
    Load {
        slot: Slot,
        hit: Hit,
    },
    /// An answer that needs no transfer, to a request that had to wait for others to be answered.
    Answer {
        slot: Slot,
        hit: Hit,
    },
    /// GPU to CPU: the marked chunks of a part; the `spilled` ones go to disk after that.
    Store {
        slot: Slot,
        part: Part,
        marks: Vec<At>,
        spilled: Vec<At>,
    },
    /// GPU to disk.
    Spill {
        slot: Slot,
        marks: Vec<At>,
    },
    /// CPU to disk: chunks marked in `cpu` are read, those in `disk` are new there. With them a store ends, or else
    /// chunks that the CPU tier has dropped move down.
    DiskWrite {
        cpu: Vec<At>,
        disk: Vec<At>,
        stores: bool,
    },
}

impl Op {
    /// No request waits for it.
    pub fn is_quiet(&self) -> bool {
        matches!(self, Op::Store { .. } | Op::Spill { .. } | Op::DiskWrite { .. } | Op::Rest(_))
    }
}

/// Transfers under way. Ids count up; one that has ended leaves a gap until those before it have ended.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    from: IoId,
    ops: VecDeque<Option<Op>>,
}

impl Transfers {
    /// The id of the one that begins next.
    pub fn next_id(&self) -> IoId {
        self.from + self.ops.len() as IoId
    }

    pub fn begin(&mut self, op: Op) {
        self.ops.push_back(Some(op));
    }

    pub fn get(&self, id: IoId) -> Option<&Op> {
        self.ops.get(id.checked_sub(self.from)? as usize)?.as_ref()
    }

    pub fn take(&mut self, id: IoId) -> Option<Op> {
        let op = self.ops.get_mut(id.checked_sub(self.from)? as usize)?.take();
        while let Some(None) = self.ops.front() {
            self.ops.pop_front();
            self.from += 1;
        }
        op
    }

    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &Op> {
        self.ops.iter().flatten()
    }
}
