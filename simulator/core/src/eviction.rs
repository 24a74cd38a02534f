//! Which chunk goes next. The loop that evicts is `Cache`'s; a policy supplies what differs.
//!
//! LRU, FIFO, LFU, S3-FIFO and ARC decide as the reference implementations of libCacheSim 0.3.5 do, for chunks of one
//! size. A chunk that is locked is passed over; where the queue that should give one has only such, the other one does.

use std::collections::BTreeMap;
use std::fmt::Debug;

use crate::arc::Arc;
use crate::chunks::{At, Chunks, FRESH};
use crate::keys::{Key, KeyMap};
use crate::lease::Lease;
use crate::lmcache_arc::LmcacheArc;
use crate::queue::Queue;
use crate::s3fifo::S3Fifo;
use crate::time::Ticks;

pub trait Eviction: Debug + Send + Sync {
    /// The time from now on, for policies that know one.
    fn clock(&mut self, _now: Ticks) {}

    /// When a chunk that may not go now may, by time alone; None: never.
    fn next_change(&self) -> Option<Ticks> {
        None
    }

    /// How many chunks the policy lets go now, of those that nobody reads or writes; None: all of them.
    fn ready(&self, _chunks: &Chunks) -> Option<u64> {
        None
    }

    /// It knows single chunks only, each an extent by itself, and room is made for one after another: which one goes may
    /// depend on the one that comes. Otherwise chunks of an extent are one in its queue.
    fn one_by_one(&self) -> bool {
        true
    }

    /// `other` was cut off the end of an extent.
    fn cut(&mut self, _chunks: &mut Chunks, _at: At, _other: At) {}

    /// A chunk that is not there is about to come, before room is made for it.
    fn miss(&mut self, _chunks: &Chunks, _at: At) {}

    /// Room for a chunk was taken.
    fn insert(&mut self, chunks: &mut Chunks, at: At);

    /// A chunk was written, or its room taken once more: part of the use that brought it.
    fn written(&mut self, _chunks: &mut Chunks, _at: At) {}

    /// The look-up that brought a chunk uses it: part of that one use, if the policy sees it so.
    fn used_first(&mut self, chunks: &mut Chunks, at: At) {
        self.written(chunks, at);
    }

    /// A chunk was used again.
    fn used(&mut self, chunks: &mut Chunks, at: At);

    /// `written` for each, the last one first.
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[At]) {
        extents.iter().rev().for_each(|&at| self.written(chunks, at));
    }

    /// `used`, or `used_first` if it is that, for each that lies in a queue, the last one first.
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[At]) {
        for &at in extents.iter().rev() {
            if !chunks[at].queued() {
                continue;
            }
            if chunks[at].is(FRESH) {
                chunks[at].set(FRESH, false);
                self.used_first(chunks, at);
            } else {
                self.used(chunks, at);
            }
        }
    }

    /// The chunk to go next, of those that are free; None: no chunk is. May set others back. `from`: the one that lay
    /// behind the last victim of the same eviction, or NONE; what lies before it in the same queue is not free.
    fn victim(&mut self, chunks: &mut Chunks, from: At) -> Option<At>;

    /// A chunk goes: evicted, or else given up by whoever brought it.
    fn remove(&mut self, chunks: &mut Chunks, at: At, evicted: bool);
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionKind {
    Lru,
    Fifo,
    Lfu,
    S3Fifo,
    Arc,
    Lease,
    LmcacheArc,
}

impl EvictionKind {
    pub const ALL: [(&str, Self); 7] = [
        ("lru", Self::Lru),
        ("fifo", Self::Fifo),
        ("lfu", Self::Lfu),
        ("s3-fifo", Self::S3Fifo),
        ("arc", Self::Arc),
        ("lease", Self::Lease),
        ("lmcache-arc", Self::LmcacheArc),
    ];

    pub fn make(self, capacity: u64, lease: Ticks) -> Policy {
        Policy::Other(match self {
            Self::Lru => return Policy::Lru(Lru(Queue::new(0))),
            Self::Fifo => Box::new(Fifo(Queue::new(0))),
            Self::Lfu => Box::new(Lfu::default()),
            Self::S3Fifo => Box::new(S3Fifo::new(capacity)),
            Self::Arc => Box::new(Arc::new(capacity)),
            Self::Lease => Box::new(Lease::new(lease)),
            Self::LmcacheArc => Box::new(LmcacheArc::new()),
        })
    }
}

/// LRU decides most often by far, so it is called without a detour.
#[derive(Debug)]
pub enum Policy {
    Lru(Lru),
    Other(Box<dyn Eviction>),
}

/// Calls the policy, whichever it is.
macro_rules! either {
    ($policy:expr, $verb:ident($($given:expr),*)) => {
        match $policy {
            Policy::Lru(lru) => lru.$verb($($given),*),
            Policy::Other(policy) => policy.$verb($($given),*),
        }
    };
}

impl Eviction for Policy {
    #[inline(always)]
    fn clock(&mut self, now: Ticks) {
        either!(self, clock(now));
    }
    #[inline(always)]
    fn next_change(&self) -> Option<Ticks> {
        either!(self, next_change())
    }
    #[inline(always)]
    fn ready(&self, chunks: &Chunks) -> Option<u64> {
        either!(self, ready(chunks))
    }
    #[inline(always)]
    fn one_by_one(&self) -> bool {
        either!(self, one_by_one())
    }
    #[inline(always)]
    fn cut(&mut self, chunks: &mut Chunks, at: At, other: At) {
        either!(self, cut(chunks, at, other));
    }
    #[inline(always)]
    fn miss(&mut self, chunks: &Chunks, at: At) {
        either!(self, miss(chunks, at));
    }
    #[inline(always)]
    fn insert(&mut self, chunks: &mut Chunks, at: At) {
        either!(self, insert(chunks, at));
    }
    #[inline(always)]
    fn written(&mut self, chunks: &mut Chunks, at: At) {
        either!(self, written(chunks, at));
    }
    #[inline(always)]
    fn used_first(&mut self, chunks: &mut Chunks, at: At) {
        either!(self, used_first(chunks, at));
    }
    #[inline(always)]
    fn used(&mut self, chunks: &mut Chunks, at: At) {
        either!(self, used(chunks, at));
    }
    #[inline(always)]
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[At]) {
        either!(self, written_all(chunks, extents));
    }
    #[inline(always)]
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[At]) {
        either!(self, used_all(chunks, extents));
    }
    #[inline(always)]
    fn victim(&mut self, chunks: &mut Chunks, from: At) -> Option<At> {
        either!(self, victim(chunks, from))
    }
    #[inline(always)]
    fn remove(&mut self, chunks: &mut Chunks, at: At, evicted: bool) {
        either!(self, remove(chunks, at, evicted));
    }
}

/// The least recently used chunk goes.
#[derive(Debug)]
pub struct Lru(Queue);

impl Eviction for Lru {
    fn one_by_one(&self) -> bool {
        false
    }
    fn cut(&mut self, chunks: &mut Chunks, at: At, other: At) {
        self.0.cut(chunks, at, other);
    }
    fn insert(&mut self, chunks: &mut Chunks, at: At) {
        self.0.push(chunks, at);
    }
    fn written(&mut self, chunks: &mut Chunks, at: At) {
        self.0.renew(chunks, at);
    }
    fn used(&mut self, chunks: &mut Chunks, at: At) {
        self.0.renew(chunks, at);
    }
    fn written_all(&mut self, chunks: &mut Chunks, extents: &[At]) {
        self.0.renew_all(chunks, extents);
    }
    fn used_all(&mut self, chunks: &mut Chunks, extents: &[At]) {
        // Whether it is the first use makes no difference here.
        self.0.renew_all(chunks, extents);
    }
    fn victim(&mut self, chunks: &mut Chunks, from: At) -> Option<At> {
        self.0.free_from(chunks, from)
    }
    fn remove(&mut self, chunks: &mut Chunks, at: At, _evicted: bool) {
        self.0.take(chunks, at);
    }
}

/// The chunk that came first goes.
#[derive(Debug)]
struct Fifo(Queue);

impl Eviction for Fifo {
    fn one_by_one(&self) -> bool {
        false
    }
    fn cut(&mut self, chunks: &mut Chunks, at: At, other: At) {
        self.0.cut(chunks, at, other);
    }
    fn insert(&mut self, chunks: &mut Chunks, at: At) {
        self.0.push(chunks, at);
    }
    fn used(&mut self, _chunks: &mut Chunks, _at: At) {}
    fn victim(&mut self, chunks: &mut Chunks, from: At) -> Option<At> {
        self.0.free_from(chunks, from)
    }
    fn remove(&mut self, chunks: &mut Chunks, at: At, _evicted: bool) {
        self.0.take(chunks, at);
    }
}

/// The least often used chunk goes; of several, the one that has been used so often for the longest time. A chunk that
/// went is forgotten.
#[derive(Debug, Default)]
struct Lfu {
    by_uses: BTreeMap<u32, Queue>,
    /// How often each was used, by place.
    uses: Vec<u32>,
}

impl Lfu {
    fn push(&mut self, chunks: &mut Chunks, at: At, uses: u32) {
        let place = at as usize;
        self.uses.resize(self.uses.len().max(place + 1), 0);
        self.uses[place] = uses;
        self.by_uses.entry(uses).or_insert_with(|| Queue::new(0)).push(chunks, at);
    }
}

impl Eviction for Lfu {
    fn insert(&mut self, chunks: &mut Chunks, at: At) {
        self.push(chunks, at, 1);
    }
    fn used(&mut self, chunks: &mut Chunks, at: At) {
        let uses = self.uses[at as usize];
        self.remove(chunks, at, false);
        self.push(chunks, at, uses.saturating_add(1));
    }
    fn victim(&mut self, chunks: &mut Chunks, _from: At) -> Option<At> {
        self.by_uses.values().find_map(|queue| queue.first_free(chunks))
    }
    fn remove(&mut self, chunks: &mut Chunks, at: At, _evicted: bool) {
        let uses = self.uses[at as usize];
        if let Some(queue) = self.by_uses.get_mut(&uses) {
            queue.take(chunks, at);
            if queue.len() == 0 {
                self.by_uses.remove(&uses);
            }
        }
    }
}

/// Keys of chunks that went, the oldest first.
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
