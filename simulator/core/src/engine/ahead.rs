//! What SGLang's scheduler does otherwise than vLLM's with a prefix that the tiers hold: it has them read ahead of a
//! request's turn, and loads layer by layer while the step runs.

use super::Engine;
use super::request::{Lookup, Matched};
use super::schedule::Prefix;
use super::step::Batch;
use crate::keys::ChunkRange;
use crate::tiers::{ReadAhead, Slot};

/// How often the tiers are asked to read ahead for a request (hicache_storage_prefetch_retry_max_attempts).
const MOST_READS: u64 = 8;

impl Engine {
    /// The tiers read into the first level what they hold below it of a waiting request's prompt.
    #[inline(never)]
    pub(super) fn read_ahead(&mut self, slot: Slot, times: u64) {
        let (name, tokens, wanted) = (self.server_slot(slot), self.matched(slot), self.matchable(slot));
        let Some(server) = &mut self.server else { return };
        let (request, matched) = (&mut self.requests[slot], Matched { tokens, times });
        request.lookup = match server.tiers.read_ahead(self.now, name, &wanted) {
            true => Lookup::Ahead(matched),
            false => Lookup::Read(ReadAhead::new(), matched),
        };
        self.note_transfers();
    }

    /// What was read ahead for a request is in the first level.
    pub(super) fn read_was_ahead(&mut self, slot: Slot, read: ReadAhead) {
        let lookup = &mut self.requests[slot].lookup;
        if let Lookup::Ahead(matched) = *lookup {
            *lookup = Lookup::Read(read, matched);
        }
    }

    /// Looks at the first level once what was read ahead is there. False: it is not yet.
    #[inline(never)]
    pub(super) fn looked_up_ahead(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        let name = self.server_slot(slot);
        let Some(server) = &mut self.server else { return true };
        let lookup = &mut self.requests[slot].lookup;
        if let Lookup::Ahead(matched) = *lookup {
            let Some(read) = server.tiers.stop_ahead(self.now, name) else { return false };
            *lookup = Lookup::Read(read, matched);
        }
        if let Lookup::Read(_, Matched { tokens, times }) = *lookup
            && times < MOST_READS
            && self.matched(slot) < tokens
        {
            // The GPU and the first level have lost some of it while the request waited.
            self.read_ahead(slot, times + 1);
            if matches!(self.requests[slot].lookup, Lookup::Ahead(_)) {
                return false;
            }
        }
        let Some(server) = &mut self.server else { return true };
        let request = &mut self.requests[slot];
        let read = match &mut request.lookup {
            Lookup::Answered(_) => return true,
            Lookup::Read(read, matched) => {
                request.was_ahead = Some((read.clone(), *matched));
                std::mem::take(read)
            }
            _ => ReadAhead::new(),
        };
        batch.steady = false;
        request.lookup = Lookup::Answered(server.tiers.lookup_first(self.now, name, &request.chunks, &read));
        true
    }

    /// Forgets the answer of a request that does not begin in this step: the next pass looks again, as it may have
    /// changed.
    pub(super) fn look_again(&mut self, slot: Slot) {
        let request = &mut self.requests[slot];
        let Some((read, matched)) = request.was_ahead.take() else { return };
        let answer = std::mem::replace(&mut request.lookup, Lookup::Read(read, matched));
        if let (Some(server), Lookup::Answered(hit)) = (&mut self.server, answer) {
            server.tiers.take_back(&hit);
        }
    }

    /// The chunks of a request's prompt before its last token, which is computed.
    fn matchable(&self, slot: Slot) -> ChunkRange {
        let request = &self.requests[slot];
        let most = (request.tokens_known() - 1) / self.config.chunk_tokens;
        request.chunks.slice(0..request.chunks.len().min(most as usize))
    }

    /// Tokens of a request's prompt that the GPU holds, or the first level.
    fn matched(&self, slot: Slot) -> u64 {
        let request = &self.requests[slot];
        let findable = (request.tokens_known() - 1) / self.config.block_tokens;
        let local = self.pool.find(&request.runs, findable).end.blocks * self.config.block_tokens;
        let first = self.server.as_ref().map_or(0, |server| server.tiers.first_holds(&self.matchable(slot)));
        local.max(first * self.config.chunk_tokens)
    }

    /// Gets a request the blocks of what the tiers hold, and begins to load them.
    pub(super) fn load_by_layer(&mut self, slot: Slot, prefix: &Prefix, batch: &mut Batch) {
        let name = self.server_slot(slot);
        if let (Some(server), Lookup::Answered(hit)) = (&mut self.server, &mut self.requests[slot].lookup) {
            let first = prefix.local_tokens / self.config.chunk_tokens;
            let start = self.now.max(batch.loads_until);
            batch.loads_until = server.tiers.load(start, name, std::mem::take(hit), first as usize);
            if self.cost.synchronous_loads {
                batch.work.add_host(batch.loads_until - start);
            }
        }
        let computed = prefix.local_tokens + prefix.external_tokens;
        let lacking = self.lacking(slot, computed);
        self.allocate(slot, lacking);
        self.register_loaded(slot, computed);
    }
}
