//! What SGLang's scheduler does otherwise than vLLM's with a prefix that the tiers hold: it has them read ahead of a
//! request's turn, and loads layer by layer while the step runs.
//!
//! It takes in requests between two steps, and matches each then, which makes the prefix the newest (scheduler.py,
//! ingest_requests, _prefetch_kvcache). It asks storage for the rest. Each pass first takes the answers to what earlier
//! passes have asked, and has the storage thread read what they name (check_hicache_events). So a request is not in the
//! first step that is chosen after it came, unless it asks for too little.
//!
//! Scheduler and storage thread share an interpreter, and the scheduler passes again and again meanwhile. So some
//! milliseconds go by between a question and the pass that has its answer, and that pass has the answers to all that was
//! asked by then. A pass that computes nothing gives its core up at its end (scheduler.py, on_idle). A front end on the
//! same core parses its request to the end then, so that the next pass begins with that one's arrival. Once the front end
//! has nothing left to parse, the storage thread has its turn, too, and answers what that request asks.
//!
//! Each pass matches all requests that wait, and between two pages the storage thread needs the interpreter: a read takes
//! longer, the more requests wait for theirs, and the more pages it has.

use std::mem;

use super::Engine;
use super::blocks::Held;
use super::request::{Asked, Lookup, Matched};
use super::schedule::Prefix;
use super::step::Batch;
use crate::keys::ChunkRange;
use crate::tiers::{ReadAhead, Slot};
use crate::time::{FOREVER, Ticks};

/// How often the tiers are asked to read ahead for a request (hicache_storage_prefetch_retry_max_attempts).
const MOST_READS: u64 = 8;

/// Requests that storage is asked about.
#[derive(Debug, Default)]
pub(super) struct Questions {
    /// Requests that came during the step in flight.
    newcomers: Vec<Slot>,
    /// Asked since the last pass began; its answer is there at the next one, at the earliest.
    asking: Vec<Slot>,
    asked: Vec<Slot>,
    /// When a pass has the answers to all of them.
    answered_at: Ticks,
    /// What was read for them is in the first level since the last pass.
    read: Vec<Slot>,
    /// A request has come since the last pass: the front end has had the core.
    yielded: bool,
}

impl Engine {
    /// When the next pass will have storage's answers; FOREVER: nothing is asked.
    pub(super) fn next_answer(&self) -> Ticks {
        let front_end_goes_first = self.yields_core() && !self.questions.yielded && self.front_end_parses();
        match self.questions.asked.is_empty() || front_end_goes_first {
            true => FOREVER,
            false => self.questions.answered_at.max(self.now),
        }
    }

    /// The scheduler's passes compute nothing, and give their core to the front end.
    fn yields_core(&self) -> bool {
        self.config.cost.yields_core && self.running.is_empty()
    }

    /// A request has come: the scheduler takes it in once no step is in flight.
    pub(super) fn came(&mut self, slot: Slot) {
        self.questions.yielded = true;
        match self.step {
            Some(_) => self.questions.newcomers.push(slot),
            None => self.ask_ahead(slot, 0),
        }
    }

    /// Takes in the requests that came during the step that has ended. The scheduler keeps a chunk of a prompt after
    /// that, when it looks for the next one (stash_chunked_request).
    #[inline(always)]
    pub(super) fn take_in(&mut self) {
        if self.config.reads_ahead {
            mem::take(&mut self.questions.newcomers).into_iter().for_each(|slot| self.ask_ahead(slot, 0));
        }
        if self.config.prefills_first {
            self.prefilling.clone().into_iter().for_each(|slot| self.keep_computed(slot));
        }
    }

    /// Asks storage for what the GPU and the first level lack of a waiting request's prompt.
    #[inline(never)]
    fn ask_ahead(&mut self, slot: Slot, times: u64) {
        if !self.server.as_ref().is_some_and(|server| server.tiers.has_lower()) {
            return;
        }
        self.use_prefix(slot, self.requests[slot].tokens_known() - 1);
        let (tokens, wanted) = (self.matched(slot), self.matchable(slot));
        let Some(server) = &mut self.server else { return };
        let matched = Matched { tokens, times };
        let lacking = (wanted.len() as u64 * self.config.chunk_tokens).saturating_sub(tokens);
        self.requests[slot].lookup = if server.tiers.reads(lacking) {
            if self.questions.asked.is_empty() && self.questions.asking.is_empty() {
                self.questions.answered_at = self.now + self.cost.vary(self.cost.poll);
            }
            self.questions.asking.push(slot);
            let found = server.tiers.look_below(self.now, &wanted);
            Lookup::Asked(Asked { at: self.now, found, lacking }, matched)
        } else {
            Lookup::Read(ReadAhead::new(), matched)
        };
    }

    /// A pass begins. The tree takes what was read, below the last node that the request's match had found, which
    /// becomes the newest with it (insert_host). The tiers read into the first level what storage was found to hold.
    pub(super) fn take_answers(&mut self) {
        for slot in mem::take(&mut self.questions.read) {
            let Lookup::Read(_, Matched { tokens, .. }) = self.requests[slot].lookup else { continue };
            let found = tokens / self.config.block_tokens;
            match self.pool.find(&self.requests[slot].runs, found).end.blocks == found {
                true => self.use_prefix(slot, tokens),
                false => self.touch_in_tiers(slot),
            }
        }
        if self.next_answer() > self.now {
            return;
        }
        if self.yields_core() && !self.front_end_parses() {
            self.questions.asked.append(&mut self.questions.asking);
        }
        for slot in mem::take(&mut self.questions.asked) {
            let (name, wanted) = (self.server_slot(slot), self.matchable(slot));
            let lookup = &mut self.requests[slot].lookup;
            let (Some(server), Lookup::Asked(asked, matched)) = (&mut self.server, &*lookup) else {
                continue;
            };
            let (range, matched) = (wanted.slice(0..asked.found), *matched);
            let found = (asked.found as u64 * self.config.chunk_tokens).saturating_sub(matched.tokens);
            let pass = self.cost.read_pass;
            let reads =
                server.tiers.reads(found) && server.tiers.read_ahead(self.now, name, &range, asked.at, pass);
            *lookup = if reads { Lookup::Ahead(matched) } else { Lookup::Read(ReadAhead::new(), matched) };
        }
        self.note_transfers();
    }

    /// A pass ends. True: a later pass will have storage's answer.
    pub(super) fn end_pass(&mut self) -> bool {
        self.questions.yielded = false;
        self.questions.asked.append(&mut self.questions.asking);
        !self.questions.asked.is_empty()
    }

    /// What was read ahead for a request is in the first level.
    pub(super) fn read_was_ahead(&mut self, slot: Slot, read: ReadAhead) {
        if let Lookup::Ahead(matched) = self.requests[slot].lookup {
            self.note_read(slot, read, matched);
            self.questions.read.push(slot);
        }
    }

    /// Notes that a wait for storage has ended, with what was read.
    fn note_read(&mut self, slot: Slot, read: ReadAhead, matched: Matched) {
        let request = &mut self.requests[slot];
        let blocks = |chunks: usize| chunks as u64 * self.config.chunk_tokens / self.config.block_tokens;
        for (chunks, _) in &read {
            self.pool.read_into_host(&request.runs, blocks(chunks.start)..blocks(chunks.end));
        }
        request.lookup = Lookup::Read(read, matched);
    }

    /// Ends the wait for storage if the request has waited long enough. False: it waits on.
    fn stops_waiting(&mut self, slot: Slot) -> bool {
        let (name, now) = (self.server_slot(slot), self.now);
        let (Some(server), lookup) = (&mut self.server, &mut self.requests[slot].lookup) else { return true };
        match lookup {
            Lookup::Asked(asked, matched) => {
                if server.tiers.waits_until(asked.at, asked.lacking) > now {
                    return false;
                }
                *lookup = Lookup::Read(ReadAhead::new(), *matched);
                self.questions.asking.retain(|&other| other != slot);
            }
            Lookup::Ahead(matched) => {
                let matched = *matched;
                let Some(read) = server.tiers.stop_ahead(now, name) else { return false };
                self.note_read(slot, read, matched);
            }
            _ => {}
        }
        true
    }

    /// Looks at the first level once what was read ahead is there. False: it is not yet.
    #[inline(never)]
    pub(super) fn looked_up_ahead(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        if !self.stops_waiting(slot) {
            return false;
        }
        if let Lookup::Read(_, Matched { tokens, times }) = self.requests[slot].lookup
            && times < MOST_READS
            && self.matched(slot) < tokens
        {
            // The GPU and the first level have lost some of it while the request waited.
            self.ask_ahead(slot, times + 1);
            if matches!(self.requests[slot].lookup, Lookup::Asked(..)) {
                return false;
            }
        }
        let name = self.server_slot(slot);
        let Some(server) = &mut self.server else { return true };
        let request = &mut self.requests[slot];
        let read = match &mut request.lookup {
            Lookup::Answered(_) => return true,
            Lookup::Read(read, matched) => {
                request.was_ahead = Some((read.clone(), *matched));
                mem::take(read)
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
        let answer = mem::replace(&mut request.lookup, Lookup::Read(read, matched));
        if let (Some(server), Lookup::Answered(hit)) = (&mut self.server, answer) {
            server.tiers.take_back(&hit);
        }
    }

    /// Makes what the GPU and the first level hold of a waiting request's first `tokens` tokens the newest.
    pub(super) fn use_prefix(&mut self, slot: Slot, tokens: u64) {
        let request = &self.requests[slot];
        let known = tokens / self.config.block_tokens;
        let (local, mut held) = (self.pool.find(&request.runs, known), Held::default());
        self.pool.take(&local, &mut held);
        self.pool.release(&mut held);
        self.touch_in_tiers(slot);
        self.cut_on_host(slot, local.end.blocks);
    }

    /// A waiting request's match, of which the GPU holds so many blocks, may end inside of a node that the host holds.
    pub(super) fn cut_on_host(&mut self, slot: Slot, local: u64) {
        let matched = self.matched(slot) / self.config.block_tokens;
        if matched > local {
            self.pool.cut_on_host(&self.requests[slot].runs, matched - 1);
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
            batch.loads_until = server.tiers.load(start, name, mem::take(hit), first as usize);
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
