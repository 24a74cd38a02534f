//! Transfers that have begun, and those of the disk that the caller makes on a real device.

use super::Engine;
use crate::keys::Key;
use crate::tiers::outbox::Issued;
use crate::tiers::{IoId, Tiers};
use crate::time::Ticks;

impl Engine {
    pub(super) fn note_transfers(&mut self) {
        if let Some(server) = &mut self.server {
            server.take_begun();
            self.name_owners();
        }
    }

    fn tiers(&mut self) -> Option<&mut Tiers> {
        self.server.as_mut().map(|server| &mut server.tiers)
    }

    /// The caller has yet to answer a transfer.
    pub(super) fn awaits_external_io(&self) -> bool {
        self.server.as_ref().is_some_and(|server| server.tiers.awaits_external_io())
    }

    /// Names the owners of new transfers, while the tiers' slot of each request is still its own.
    pub(super) fn name_owners(&mut self) {
        let requests = &self.requests;
        if let Some(server) = &mut self.server {
            server.tiers.name_owners(|slot| requests[slot].owner);
        }
    }

    /// Disk transfers to make since the last call; the caller answers each by `complete_io`. Needs an external level.
    pub fn take_issued(&mut self) -> Vec<Issued> {
        self.tiers().map_or_else(Vec::new, Tiers::take_issued)
    }

    /// Chunks that the external level has dropped since the last call, in that order; before the transfers issued
    /// since.
    pub fn take_dropped(&mut self) -> Vec<Key> {
        self.tiers().map_or_else(Vec::new, Tiers::take_dropped)
    }

    /// A transfer ended at `at`, or now, if that has passed. The `failed` chunks of a write are not on disk. An id that
    /// is not in flight changes nothing.
    pub fn complete_io(&mut self, id: IoId, at: Ticks, failed: Vec<Key>) {
        let end = at.max(self.now);
        if let Some(server) = &mut self.server {
            server.complete_io(id, end, failed);
        }
    }
}
