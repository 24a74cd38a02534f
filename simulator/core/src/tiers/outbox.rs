//! The transfers of an external level, which the caller makes on a real device, and the slot of each chunk there.

use std::collections::BTreeMap;
#[cfg(test)]
use std::collections::BTreeSet;

use super::transfers::{IoId, Slot};
use crate::keys::{Key, KeyMap};

/// A transfer for the caller. owner: the reply's hash id of the request that waits for it, or whose chunks it writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    pub id: IoId,
    pub owner: i64,
    slot: Slot,
    pub write: bool,
    pub chunks: Vec<(Key, u64)>,
}

/// Issued transfers, and a slot for each chunk that the external level holds.
#[derive(Debug, Default)]
pub struct Outbox {
    slots: KeyMap<u64>,
    free: Vec<u64>,
    next_slot: u64,
    issued: Vec<Issued>,
    /// How many issued transfers have their owner.
    owned: usize,
    /// Chunks that the level has dropped since the caller last asked.
    dropped: Vec<Key>,
    /// Transfers that the caller has not answered; true: a write.
    pending: BTreeMap<IoId, bool>,
    /// Writes that the caller has answered and that have not ended: the chunks that did not arrive.
    failed: BTreeMap<IoId, Vec<Key>>,
}

impl Outbox {
    pub fn read(&mut self, id: IoId, slot: Slot, keys: impl Iterator<Item = Key>) {
        let chunks = keys.filter_map(|key| Some((key, *self.slots.get(&key)?))).collect();
        self.issue(Issued { id, owner: 0, slot, write: false, chunks });
    }

    pub fn write(&mut self, id: IoId, of: Slot, keys: impl Iterator<Item = Key>) {
        let chunks = keys.map(|key| (key, self.slot(key))).collect();
        self.issue(Issued { id, owner: 0, slot: of, write: true, chunks });
    }

    /// The level has dropped these chunks: others may use their slots.
    pub fn drop_chunks(&mut self, keys: &[Key]) {
        for key in keys {
            self.free.extend(self.slots.remove(key));
        }
        self.dropped.extend(keys);
    }

    /// The level has dropped all chunks.
    pub fn drop_all(&mut self) {
        let mut keys: Vec<Key> = self.slots.keys().copied().collect();
        keys.sort_unstable_by_key(|key| std::cmp::Reverse(self.slots[key]));
        self.drop_chunks(&keys);
    }

    /// The chunks of a write that did not arrive. A second call returns none.
    pub fn take_failed(&mut self, id: IoId) -> Vec<Key> {
        self.failed.remove(&id).unwrap_or_default()
    }

    /// The caller has yet to answer a transfer.
    pub fn awaits_answers(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Names the owners of the transfers issued since the last call.
    pub fn name_owners(&mut self, owner: impl Fn(Slot) -> i64) {
        for issued in &mut self.issued[self.owned..] {
            issued.owner = owner(issued.slot);
        }
        self.owned = self.issued.len();
    }

    pub fn take_issued(&mut self) -> Vec<Issued> {
        self.owned = 0;
        std::mem::take(&mut self.issued)
    }

    pub fn take_dropped(&mut self) -> Vec<Key> {
        std::mem::take(&mut self.dropped)
    }

    /// The caller answers a transfer; `failed`: the chunks of a write that did not arrive. False: it was not pending.
    pub fn answer(&mut self, id: IoId, failed: Vec<Key>) -> bool {
        let Some(write) = self.pending.remove(&id) else { return false };
        if write && !failed.is_empty() {
            self.failed.insert(id, failed);
        }
        true
    }

    fn issue(&mut self, issued: Issued) {
        self.pending.insert(issued.id, issued.write);
        self.issued.push(issued);
    }

    fn slot(&mut self, key: Key) -> u64 {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.next_slot += 1;
            self.next_slot - 1
        });
        self.slots.insert(key, slot);
        slot
    }
}

#[cfg(test)]
impl Outbox {
    /// Panics unless each chunk that the level holds or writes has a slot of its own, and no other chunk has one.
    pub fn check(&self, on_disk: &[Key], capacity: u64) {
        let slots: BTreeSet<u64> = self.slots.values().copied().collect();
        assert_eq!(slots.len(), self.slots.len(), "two chunks in one slot");
        assert!(slots.iter().all(|&slot| slot < capacity), "a slot that the device does not have");
        assert!(self.free.iter().all(|slot| !slots.contains(slot)), "a free slot that is in use");
        assert_eq!(
            on_disk.iter().collect::<BTreeSet<_>>(),
            self.slots.keys().collect(),
            "slots of other chunks than the disk's"
        );
        assert!(self.failed.keys().all(|id| !self.pending.contains_key(id)));
    }

    pub fn check_idle(&self) {
        assert!(self.pending.is_empty() && self.failed.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_dropped_chunks_are_used_again() {
        let mut outbox = Outbox::default();
        outbox.write(0, 7, [10, 11, 12].into_iter());
        outbox.drop_chunks(&[11]);
        outbox.write(1, 7, [13].into_iter());
        outbox.read(2, 8, [12, 13].into_iter());
        let chunks: Vec<_> = outbox.issued.iter().map(|issued| issued.chunks.clone()).collect();
        assert_eq!(chunks, [vec![(10, 0), (11, 1), (12, 2)], vec![(13, 1)], vec![(12, 2), (13, 1)]]);
        assert_eq!((outbox.pending.len(), &outbox.dropped), (3, &vec![11]));
    }
}
