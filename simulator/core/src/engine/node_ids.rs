//! Numbers and sizes of the nodes into which `nodes.rs` divides the block pool.

use hashbrown::HashSet;

use crate::keys::Key;

pub type NodeId = u32;

/// The blocks are evicted one by one.
pub const NO_NODE: NodeId = NodeId::MAX;

/// How many blocks each node has. Numbers without blocks are used again.
#[derive(Debug, Default)]
pub struct Nodes {
    /// Counts uses.
    clock: u64,
    pub(super) blocks: Vec<u32>,
    spare: Vec<NodeId>,
    /// The last blocks of nodes that were evicted: what the host keeps of them comes back as the same nodes.
    pub(super) ended: HashSet<(Key, u32)>,
    /// The last blocks of matches that ended on the host: what was read into it as one node is two since.
    pub(super) cut: HashSet<(Key, u32)>,
}

impl Nodes {
    /// Adds blocks to a node; None becomes a new one.
    pub fn add(&mut self, node: &mut Option<NodeId>, blocks: u32) -> NodeId {
        let id = *node.get_or_insert_with(|| {
            self.spare.pop().unwrap_or_else(|| {
                self.blocks.push(0);
                (self.blocks.len() - 1) as NodeId
            })
        });
        self.blocks[id as usize] += blocks;
        id
    }

    /// Nodes have ended, or were cut, that the host may hold.
    pub fn has_ends(&self) -> bool {
        !self.ended.is_empty() || !self.cut.is_empty()
    }

    pub fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub fn take(&mut self, id: NodeId, blocks: u32) {
        self.blocks[id as usize] -= blocks;
        if self.blocks[id as usize] == 0 {
            self.spare.push(id);
        }
    }
}
