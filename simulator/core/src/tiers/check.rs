//! What tests see of the tiers, and what must hold at any moment.

use super::level::Level;
use super::outbox::Outbox;
use super::transfers::{Hit, Op};
use super::{Tiers, first_cache, lower_levels};
use crate::chunks::spans::{Span, marked};
use crate::keys::{Key, KeyMap};

impl Tiers {
    /// The same tiers for callers that name chunks without their prompts.
    pub fn loose(mut self) -> Self {
        (self.first, self.lower) = (first_cache(&self.config, true, true), lower_levels(&self.config, true));
        self
    }

    /// Chunks held and being written, by level.
    pub fn used(&self) -> Vec<u64> {
        std::iter::once(self.first.used()).chain(self.lower.iter().map(Level::used)).collect()
    }

    /// Which levels hold this chunk.
    pub fn holders(&self, key: Key) -> Vec<bool> {
        let lower = self.lower.iter().map(|level| level.contains(key));
        std::iter::once(self.first.contains(key)).chain(lower).collect()
    }

    /// No level holds more than it has room for.
    pub fn check_capacities(&self) {
        let room = self.config.levels.iter().map(|level| level.chunks);
        assert!(self.used().into_iter().zip(room).all(|(used, room)| used <= room));
    }

    /// What must hold at any moment, for `hits` that were answered and neither loaded nor released.
    pub fn check(&self, hits: &[&Hit]) {
        self.first.check();
        self.lower.iter().for_each(Level::check);
        if let (Some(outbox), [disk]) = (&self.outbox, self.lower.as_slice()) {
            outbox.check(&disk.all_keys(), self.config.levels[1].chunks);
        }
        let mut pins: KeyMap<u32> = KeyMap::default();
        let mut pin = |keys: &[Key]| keys.iter().for_each(|&key| *pins.entry(key).or_default() += 1);
        let keys = |spans: &mut dyn Iterator<Item = Span>| {
            spans.flat_map(|span| self.first.keys(span)).collect::<Vec<_>>()
        };
        hits.iter().for_each(|hit| pin(hit.range.keys()));
        self.waiting_reads.iter().for_each(|(_, hit, _)| pin(&keys(&mut hit.spans_in(0))));
        for op in self.transfers.iter() {
            match op {
                Op::Load { hit, .. } | Op::Answer { hit, .. } => pin(hit.range.keys()),
                Op::WriteDown(write) => {
                    pin(&keys(&mut marked(&write.first)));
                    if write.lower == 0 {
                        pin(&keys(&mut write.above.iter().copied()));
                    }
                }
                Op::Prefetch(prefetch, _) => pin(&keys(&mut prefetch.hit.spans_in(0))),
                Op::Store { .. } | Op::Spill { .. } | Op::Rest(_) => {}
            }
        }
        let held = |key: &Key| self.first.readers(*key) + self.in_place.get(key).copied().unwrap_or(0);
        pins.iter().for_each(|(key, &times)| assert_eq!(held(key), times, "pins of {key:x}"));
    }

    /// What the only lower level holds or is writing, in order.
    pub fn keys_on_disk(&self) -> Vec<Key> {
        let mut keys = self.lower.first().map_or_else(Vec::new, Level::all_keys);
        keys.sort_unstable();
        keys
    }

    pub fn check_idle(&self) {
        self.check(&[]);
        self.first.check_idle();
        self.lower.iter().for_each(Level::check_idle);
        self.outbox.iter().for_each(Outbox::check_idle);
        assert_eq!((self.prefetching, self.prefetching_chunks, self.in_place.len()), (0, 0, 0));
        assert!(self.waiting_lookups.is_empty() && self.waiting_reads.is_empty());
        assert_eq!(self.counters.stores_begun, self.counters.stores_ended);
    }
}
