//! The block pool's free queue: extents without users, in eviction order.

use super::blocks::{BlockPool, Extent, ExtentId, NONE, PLAIN};

impl BlockPool {
    pub(super) fn append(&mut self, id: ExtentId) {
        let Extent { blocks, used, .. } = self.extents[id as usize];
        let (mut before, mut after) = (self.tail, NONE);
        // Without nodes, all were last used when they came here.
        while before != NONE && self.extents[before as usize].used > used {
            (before, after) = (self.extents[before as usize].before, before);
        }
        self.free += u64::from(blocks);
        let extent = &mut self.extents[id as usize];
        (extent.before, extent.after) = (before, after);
        match before {
            NONE => self.head = id,
            other => self.extents[other as usize].after = id,
        }
        match after {
            NONE => self.tail = id,
            other => self.extents[other as usize].before = id,
        }
    }

    pub(super) fn prepend_plain(&mut self, blocks: u32) {
        self.free += u64::from(blocks);
        let head = self.head;
        if head != NONE && self.extents[head as usize].key.is_none() {
            self.extents[head as usize].blocks += blocks;
            return;
        }
        let id = self.keep(Extent { blocks, after: head, ..PLAIN });
        match head {
            NONE => self.tail = id,
            other => self.extents[other as usize].before = id,
        }
        self.head = id;
    }

    pub(super) fn unlink(&mut self, id: ExtentId) {
        let Extent { before, after, blocks, .. } = self.extents[id as usize];
        match before {
            NONE => self.head = after,
            other => self.extents[other as usize].after = after,
        }
        match after {
            NONE => self.tail = before,
            other => self.extents[other as usize].before = before,
        }
        self.free -= u64::from(blocks);
    }
}
