//! What the tiers have under way: answers, and transfers by their ids.

use std::collections::VecDeque;
use std::ops::Range;

use crate::chunks::NONE;
use crate::chunks::spans::Span;
use crate::keys::{ChunkRange, Key};
use crate::time::Ticks;

pub type IoId = u64;
/// The engine's name for a request, handed back in `Ended`.
pub type Slot = usize;

/// A prefix of a request's chunks that the tiers hold, locked until `release`.
#[derive(Clone, Debug, Default)]
pub struct Hit {
    pub range: ChunkRange,
    /// Span by span: found in the CPU tier (else read from disk).
    pub(super) in_cpu: Vec<bool>,
    /// Where they lie in the CPU tier; until they have been read, those on disk there. NONE: read past the CPU tier.
    pub(super) spans: Vec<Span>,
}

impl Hit {
    pub fn chunks(&self) -> u64 {
        self.range.len() as u64
    }

    pub(super) fn push(&mut self, span: Span, in_cpu: bool) {
        self.spans.push(span);
        self.in_cpu.push(in_cpu);
    }

    /// Takes its first spans off it.
    pub(super) fn skip(&mut self, spans: usize) {
        self.range.skip(chunks(&self.spans[..spans]));
        self.in_cpu.drain(..spans);
        self.spans.drain(..spans);
    }

    /// Takes the spans from that one on out of it.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let range = self.range.split_off(chunks(&self.spans[..at]));
        Self { range, in_cpu: self.in_cpu.split_off(at), spans: self.spans.split_off(at) }
    }

    /// Where in the prompt the disk's chunk of that number lies; behind all chunks, if there are not so many.
    pub(super) fn position_of_disk_chunk(&self, number: u64) -> usize {
        let mut left = number as usize;
        for (chunks, in_cpu) in self.ranges() {
            if !in_cpu && left < chunks.len() {
                return chunks.start + left;
            }
            left -= if in_cpu { 0 } else { chunks.len() };
        }
        self.range.len()
    }

    pub(super) fn disk_chunks(&self) -> u64 {
        self.spans_where(false).map(|span| u64::from(span.len)).sum()
    }

    pub(super) fn spans_where(&self, in_cpu: bool) -> impl Iterator<Item = Span> {
        let of = self.spans.iter().zip(&self.in_cpu).filter(move |(_, held)| **held == in_cpu);
        of.map(|(span, _)| *span)
    }

    /// What was on disk is in the CPU tier now: there, of spans of all of its chunks.
    pub(super) fn moved_to(&mut self, room: &[Span]) {
        let mut moved = Self { range: std::mem::take(&mut self.range), ..Self::default() };
        let mut in_cpu = self.spans_where(true);
        for span in room {
            if span.at != NONE {
                moved.push(*span, false);
                continue;
            }
            let mut left = span.len;
            while left > 0
                && let Some(own) = in_cpu.next()
            {
                moved.push(own, true);
                left -= own.len;
            }
        }
        drop(in_cpu);
        *self = moved;
    }

    /// Which of its chunks each span has, and whether it was found in the CPU tier.
    pub fn ranges(&self) -> impl Iterator<Item = (Range<usize>, bool)> {
        let mut end = 0;
        self.spans.iter().zip(&self.in_cpu).map(move |(span, in_cpu)| {
            let start = end;
            end += span.len as usize;
            (start..end, *in_cpu)
        })
    }

    /// Chunk by chunk: found in the CPU tier.
    pub fn flags(&self) -> impl Iterator<Item = bool> {
        self.ranges().flat_map(|(chunks, in_cpu)| chunks.map(move |_| in_cpu))
    }

    pub(super) fn disk_keys(&self) -> impl Iterator<Item = Key> {
        let on_disk = self.ranges().filter(|(_, in_cpu)| !in_cpu);
        on_disk.flat_map(move |(chunks, _)| self.range.keys()[chunks].iter().copied())
    }
}

/// How many chunks spans have.
fn chunks(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.len as usize).sum()
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
pub(super) enum Read {
    Disk(u64),
    PageCache(u64),
    /// Somebody else's.
    External,
}

/// A hit that is being read from disk: `chunks` by the transfer under way since `began`, `warm` after it from the page
/// cache. ExtentId the deadline it is answered with what is there.
#[derive(Debug)]
pub(super) struct Prefetch {
    pub slot: Slot,
    pub hit: Hit,
    /// The places in the CPU tier for the disk's chunks, unless they are read past it.
    pub room: Vec<Span>,
    pub began: Ticks,
    pub chunks: u64,
    pub warm: u64,
    pub deadline: Ticks,
}

#[derive(Debug)]
pub(super) enum Op {
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
    /// GPU to CPU: the marked chunks of a range; the `spilled` ones go to disk after that.
    Store {
        slot: Slot,
        range: ChunkRange,
        marks: Vec<Span>,
        spilled: Vec<Span>,
    },
    /// GPU to disk.
    Spill {
        slot: Slot,
        marks: Vec<Span>,
    },
    /// CPU to disk: chunks marked in `cpu` are read, those in `disk` are new there. With them a store ends, or else
    /// chunks that the CPU tier has dropped move down.
    DiskWrite {
        cpu: Vec<Span>,
        disk: Vec<Span>,
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
pub(super) struct Transfers {
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
