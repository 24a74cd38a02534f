//! What the tiers have under way: answers, and transfers by their ids.

use std::collections::VecDeque;
use std::ops::Range;

use crate::chunks::NONE;
use crate::chunks::spans::Span;
use crate::keys::{ChunkRange, Key};
use crate::time::Ticks;

pub type IoId = u64;
/// The engine's name for a request; `Ended` hands it back.
pub type Slot = usize;
/// A level below the GPU; 0 is the one next to it.
pub type LevelId = u8;

/// A prefix of a request's chunks that the tiers hold, locked until `release`.
#[derive(Clone, Debug, Default)]
pub struct Hit {
    pub range: ChunkRange,
    /// The level that held each span's chunks at the look-up.
    levels: Vec<LevelId>,
    /// The spans in the first level. Until the tiers have read a lower level's spans, those lie in that level. NONE:
    /// read past the first level.
    pub(super) spans: Vec<Span>,
}

impl Hit {
    pub fn chunks(&self) -> u64 {
        self.range.len() as u64
    }

    pub(super) fn push(&mut self, span: Span, level: LevelId) {
        self.spans.push(span);
        self.levels.push(level);
    }

    pub(super) fn set_level(&mut self, index: usize, level: LevelId) {
        self.levels[index] = level;
    }

    /// The level of the span of that index.
    pub(super) fn level(&self, index: usize) -> LevelId {
        self.levels[index]
    }

    pub(super) fn last_level(&self) -> Option<LevelId> {
        self.levels.last().copied()
    }

    /// Inserts what was split off the span before `index`.
    pub(super) fn insert_rest(&mut self, index: usize, rest: Span) {
        self.spans.insert(index, rest);
        self.levels.insert(index, self.levels[index - 1]);
    }

    /// The index of the first span that only a lower level held; 0: there is none.
    pub(super) fn first_lower_span(&self) -> usize {
        self.levels.iter().position(|&level| level > 0).unwrap_or(0)
    }

    /// Takes out the first spans.
    pub(super) fn skip(&mut self, spans: usize) {
        self.range.skip(chunks(&self.spans[..spans]));
        self.levels.drain(..spans);
        self.spans.drain(..spans);
    }

    /// Takes out the spans from index `at` on.
    pub(super) fn split_off(&mut self, at: usize) -> Self {
        let range = self.range.split_off(chunks(&self.spans[..at]));
        Self { range, levels: self.levels.split_off(at), spans: self.spans.split_off(at) }
    }

    /// The position in the hit of the lower levels' chunk of that number; the hit's length, if there are fewer.
    pub(super) fn position_of_lower_chunk(&self, number: u64) -> usize {
        let mut left = number as usize;
        for (chunks, level) in self.ranges() {
            if level > 0 && left < chunks.len() {
                return chunks.start + left;
            }
            left -= if level > 0 { chunks.len() } else { 0 };
        }
        self.range.len()
    }

    /// How many chunks only lower levels held.
    pub(super) fn lower_chunks(&self) -> u64 {
        let lower = self.spans.iter().zip(&self.levels).filter(|(_, level)| **level > 0);
        lower.map(|(span, _)| u64::from(span.len)).sum()
    }

    pub(super) fn spans_in(&self, level: LevelId) -> impl Iterator<Item = Span> {
        let of = self.spans.iter().zip(&self.levels).filter(move |(_, held)| **held == level);
        of.map(|(span, _)| *span)
    }

    /// The tiers have read the lower levels' chunks into the first one: `room` has their spans there, and NONE for the
    /// others.
    pub(super) fn moved_to(&mut self, room: &[Span]) {
        let mut moved = Self { range: std::mem::take(&mut self.range), ..Self::default() };
        let mut first = self.spans_in(0);
        let mut lower = self.spans.iter().zip(&self.levels).filter(|(_, level)| **level > 0);
        // Chunks of the lower span under way that no span of `room` has yet, and its level.
        let (mut ahead, mut level) = (0, 0);
        for span in room {
            let mut left = span.len;
            while span.at == NONE
                && left > 0
                && let Some(own) = first.next()
            {
                moved.push(own, 0);
                left -= own.len;
            }
            if span.at != NONE {
                while ahead < span.len
                    && let Some((next, of)) = lower.next()
                {
                    (ahead, level) = (ahead + next.len, *of);
                }
                ahead -= span.len;
                moved.push(*span, level);
            }
        }
        drop(first);
        *self = moved;
    }

    /// The tiers have read the lower levels' chunks past the first level.
    pub(super) fn read_in_place(&mut self) {
        let lower = self.spans.iter_mut().zip(&self.levels).filter(|(_, level)| **level > 0);
        lower.for_each(|(span, _)| span.at = NONE);
    }

    /// Each span's chunks, counted from the hit's first one, and the level that held them.
    pub fn ranges(&self) -> impl Iterator<Item = (Range<usize>, LevelId)> {
        let mut end = 0;
        self.spans.iter().zip(&self.levels).map(move |(span, level)| {
            let start = end;
            end += span.len as usize;
            (start..end, *level)
        })
    }

    /// The level of each chunk.
    pub fn chunk_levels(&self) -> impl Iterator<Item = LevelId> {
        self.ranges().flat_map(|(chunks, level)| chunks.map(move |_| level))
    }

    pub(super) fn lower_keys(&self) -> impl Iterator<Item = Key> {
        let lower = self.ranges().filter(|(_, level)| *level > 0);
        lower.flat_map(move |(chunks, _)| self.range.keys()[chunks].iter().copied())
    }
}

/// How many chunks spans have.
fn chunks(spans: &[Span]) -> usize {
    spans.iter().map(|span| span.len as usize).sum()
}

/// A look-up that waits until other reads have ended.
#[derive(Debug)]
pub(super) struct Asked {
    pub slot: Slot,
    pub range: ChunkRange,
    pub at: Ticks,
}

/// Chunks of a prompt that a read ahead has brought, and the level that each lay in.
pub type ReadAhead = Vec<(Range<usize>, LevelId)>;

/// What the engine has to know of a transfer that ended.
#[derive(Debug)]
pub enum Ended {
    Lookup(Slot, Hit),
    /// A read ahead has ended.
    Ahead(Slot, ReadAhead),
    /// The engine need not wait for a read ahead any longer.
    Overdue(Slot),
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

/// A transfer of a device that reads for a lower level.
#[derive(Clone, Copy, Debug)]
pub(super) enum Read {
    Level {
        /// The index of the level among the lower ones.
        lower: usize,
        page_cache: bool,
        id: u64,
    },
    /// All is read, and waits for the thread that reads.
    HeldUp { until: Ticks },
    /// The caller makes it on a real device.
    External,
}

/// Chunks of one level that one device reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Portion {
    pub lower: usize,
    pub page_cache: bool,
    pub chunks: u64,
}

/// A hit whose lower chunks the tiers read, one portion after another. At the deadline the tiers answer with what has
/// arrived.
#[derive(Debug)]
pub(super) struct Prefetch {
    pub slot: Slot,
    pub hit: Hit,
    /// The room in the first level for the chunks, unless the tiers read them past it.
    pub room: Vec<Span>,
    /// When the portion under way began, and its chunks.
    pub began: Ticks,
    pub chunks: u64,
    /// The portions after it, the next one last.
    pub portions: Vec<Portion>,
    pub deadline: Ticks,
    /// No look-up waits for it: the chunks stay in the first level for one to come.
    pub ahead: bool,
    /// What each of its chunks is yet to take longer for each request that waits for a read.
    pub pass: Ticks,
}

impl Prefetch {
    /// When something is next to be decided, with a transfer under way until `end`.
    pub fn wakes_at(&self, now: Ticks, end: Ticks) -> Ticks {
        // One that waited for its turn may be overdue.
        if self.ahead && self.deadline <= now { end } else { end.min(self.deadline.max(now)) }
    }
}

#[derive(Debug)]
pub(super) enum Op {
    /// Lower levels to the first one.
    Prefetch(Box<Prefetch>, Read),
    /// The rest of a read that went on beyond its deadline.
    Rest(Read),
    /// First level to GPU.
    Load {
        slot: Slot,
        hit: Hit,
    },
    /// An answer without a transfer, for a request that waited until other prefetches had ended.
    Answer {
        slot: Slot,
        hit: Hit,
    },
    /// GPU to the first level: the marked chunks of a range; the `spilled` ones go to a lower level after that.
    Store {
        slot: Slot,
        range: ChunkRange,
        marks: Vec<Span>,
        spilled: Vec<Span>,
    },
    /// GPU to a lower level.
    Spill {
        slot: Slot,
        lower: usize,
        marks: Vec<Span>,
    },
    WriteDown(WriteDown),
}

/// First level to a lower one: chunks marked in `first` are read, those in `marks` are new in the lower level. Without
/// `first`, these are chunks that the level above has dropped.
#[derive(Debug, Default)]
pub(super) struct WriteDown {
    pub lower: usize,
    pub first: Vec<Span>,
    /// Chunks of the level above that stay there until this write has ended.
    pub above: Vec<Span>,
    pub marks: Vec<Span>,
    /// With this write a store of its chunks ends.
    pub ends_store: bool,
    /// A store that goes on to the next level after this one.
    pub next: Option<Box<StoreDown>>,
}

/// A store on its way down: `unended` of its chunks count as ended once the last level has them.
#[derive(Debug)]
pub(super) struct StoreDown {
    pub slot: Slot,
    pub range: ChunkRange,
    pub unended: u64,
}

impl Op {
    /// No request waits for it.
    pub fn is_quiet(&self) -> bool {
        matches!(self, Op::Store { .. } | Op::Spill { .. } | Op::WriteDown(_) | Op::Rest(_))
    }
}

/// Transfers under way. Ids count up; one that has ended leaves a gap until those before it have ended.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    from: IoId,
    ops: VecDeque<Option<Op>>,
}

impl Transfers {
    /// The id of the transfer that begins next.
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

    /// The id of the read ahead for a request.
    pub fn ahead_of(&self, slot: Slot) -> Option<IoId> {
        let reads =
            |op: &Option<Op>| matches!(op, Some(Op::Prefetch(one, _)) if one.ahead && one.slot == slot);
        self.ops.iter().position(reads).map(|index| self.from + index as IoId)
    }

    pub fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &Op> {
        self.ops.iter().flatten()
    }
}
