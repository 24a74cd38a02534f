//! Disk transfers that someone else makes, on a real device: what was issued, and which slot each chunk lies in.

use crate::engine::Engine;
use crate::keys::{Key, KeyMap};
use crate::tiers::{Begun, IoId, Slot};
use crate::time::Ticks;

/// A transfer to make. owner: the reply's hash id of the request that it is for, or whose chunks they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    pub id: IoId,
    pub owner: i64,
    slot: Slot,
    pub write: bool,
    pub chunks: Vec<(Key, u64)>,
}

/// Issued transfers, and slots for as many chunks as the disk tier holds.
#[derive(Debug, Default)]
pub struct Outbox {
    slots: KeyMap<u64>,
    free: Vec<u64>,
    next_slot: u64,
    capacity: u64,
    issued: Vec<Issued>,
    /// Of so many the owner is known.
    owned: usize,
    pub pending: u64,
}

impl Outbox {
    pub fn new(capacity: u64) -> Self {
        Self { capacity, ..Self::default() }
    }

    pub fn read(&mut self, id: IoId, slot: Slot, keys: impl Iterator<Item = Key>) {
        let chunks = keys.filter_map(|key| Some((key, *self.slots.get(&key)?))).collect();
        self.issue(Issued { id, owner: 0, slot, write: false, chunks });
    }

    /// `held`: what the disk tier still holds or is being written; slots of other chunks are used again.
    pub fn write(&mut self, id: IoId, of: Slot, keys: impl Iterator<Item = Key>, held: impl Fn(Key) -> bool) {
        let mut chunks = Vec::with_capacity(keys.size_hint().0);
        for key in keys {
            let slot = match self.slots.get(&key) {
                Some(&slot) => slot,
                None => self.slot(&held),
            };
            self.slots.insert(key, slot);
            chunks.push((key, slot));
        }
        self.issue(Issued { id, owner: 0, slot: of, write: true, chunks });
    }

    fn issue(&mut self, issued: Issued) {
        self.pending += 1;
        self.issued.push(issued);
    }

    fn slot(&mut self, held: &impl Fn(Key) -> bool) -> u64 {
        if self.free.is_empty() && self.next_slot == self.capacity {
            let free = &mut self.free;
            self.slots.retain(|&key, slot| {
                let keep = held(key);
                if !keep {
                    free.push(*slot);
                }
                keep
            });
            free.sort_unstable_by(|a, b| b.cmp(a));
        }
        self.free.pop().unwrap_or_else(|| {
            self.next_slot += 1;
            self.next_slot - 1
        })
    }
}

impl Engine {
    fn outbox(&mut self) -> Option<&mut Outbox> {
        self.server.as_mut().and_then(|server| server.tiers.outbox.as_mut())
    }

    /// Somebody else has yet to answer.
    pub(crate) fn owed(&self) -> bool {
        let outbox = self.server.as_ref().and_then(|server| server.tiers.outbox.as_ref());
        outbox.is_some_and(|outbox| outbox.pending > 0)
    }

    /// Notes whose transfers the new ones are, while the tiers' name for each request is still its own.
    pub(crate) fn own_issued(&mut self) {
        let requests = &self.requests;
        if let Some(outbox) = self.server.as_mut().and_then(|server| server.tiers.outbox.as_mut()) {
            for issued in &mut outbox.issued[outbox.owned..] {
                issued.owner = requests[issued.slot].owner;
            }
            outbox.owned = outbox.issued.len();
        }
    }

    /// Disk transfers to make since the last call; each must be answered by `complete_io`. With `external_disk`.
    pub fn take_issued(&mut self) -> Vec<Issued> {
        let Some(outbox) = self.outbox() else { return Vec::new() };
        outbox.owned = 0;
        std::mem::take(&mut outbox.issued)
    }

    /// Such a transfer ended at `at`, or now, if that has passed.
    pub fn complete_io(&mut self, id: IoId, at: Ticks) {
        let end = at.max(self.now);
        if let Some(outbox) = self.outbox() {
            outbox.pending = outbox.pending.saturating_sub(1);
        }
        if let Some(server) = &mut self.server {
            let quiet = server.tiers.is_quiet(id);
            server.ends(Begun { end, id, quiet });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_dropped_chunks_are_used_again() {
        let mut outbox = Outbox::new(3);
        outbox.write(0, 7, [10, 11, 12].into_iter(), |_| true);
        outbox.write(1, 7, [13].into_iter(), |key| key != 11);
        outbox.read(2, 8, [12, 13].into_iter());
        let chunks: Vec<_> = outbox.issued.iter().map(|issued| issued.chunks.clone()).collect();
        assert_eq!(chunks, [vec![(10, 0), (11, 1), (12, 2)], vec![(13, 1)], vec![(12, 2), (13, 1)]]);
        assert_eq!(outbox.pending, 3);
    }
}
