//! How the scheduler learns what the tiers hold: its connector asks the cache server, and each schedule looks whether the
//! answer has come.
//!
//! LMCache's connector asks for a look-up, waits for its acknowledgement, and then asks what came of it. While
//! the server still reads, the scheduler here sees the answer when the read ends. One thread of the server works on an engine's questions, one after another
//! (lmcache/v1/multiprocess/affinity_pool.py). Another one finds chunks once the look-up is acknowledged; both share an
//! interpreter.

use super::Engine;
use super::request::Lookup;
use super::step::Batch;
use crate::tiers::Slot;
use crate::time::Ticks;

impl Engine {
    /// Whether the tiers have said what they hold of a waiting request's prompt.
    pub(super) fn answered(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        match self.config.reads_ahead {
            true => self.looked_up_ahead(slot, batch),
            false => self.looked_up(slot, batch),
        }
    }

    /// Asks the tiers once; later schedules ask for their answer. The connector asks its questions one after another, the
    /// next one when a schedule sees the answer to the one before. False: the last one is not answered yet.
    fn looked_up(&mut self, slot: Slot, batch: &mut Batch) -> bool {
        let name = self.server_slot(slot);
        let Some(server) = &mut self.server else { return true };
        let request = &mut self.requests[slot];
        let mut takes = None;
        if let Lookup::NotAsked = request.lookup {
            batch.steady = false;
            request.lookup = match server.tiers.lookup(self.now, name, &request.chunks) {
                Some(hit) => Lookup::Answered(hit),
                None => Lookup::Pending,
            };
            request.polls_left = self.config.lookup_polls;
            takes = Some(self.cost.lookup(request.chunks.len()));
        } else if request.polls_left > 0 && self.now >= request.answer_at {
            request.polls_left -= 1;
            takes = Some(self.cost.status());
        }
        if request.polls_left == 0 {
            return matches!(request.lookup, Lookup::Answered(_));
        }
        if let Some((answer, after)) = takes {
            request.answer_at = server.answer(self.now, answer, after);
        }
        batch.poll(request.answer_at);
        false
    }

    /// A look for an answer takes no time, and the next one may see it already.
    pub(super) fn looks_at_once(&self, batch: &Batch) -> bool {
        self.cost.poll == 0 && batch.answer_at <= self.now
    }

    /// When an engine with nothing else to do looks for answers again. Where looks take no time it sees the next answer
    /// when it comes.
    pub(super) fn next_look(&mut self, batch: &Batch) -> Ticks {
        if self.cost.poll == 0 { batch.answer_at } else { self.now + self.cost.vary(self.cost.poll) }
    }
}
