//! Eviction of chunks that must be somewhere else before they go.

use super::Cache;
use crate::chunks::spans::Span;
use crate::chunks::{NONE, OFFLOADED};
use crate::eviction::Eviction;
use crate::keys::Key;

impl Cache {
    /// Drops the next `count` chunks of those that are `copied`, or were offloaded. Gives each other chunk on the way one more
    /// reader, and returns those; single chunks only. One with another write in flight stays as it is.
    pub fn drop_copied(&mut self, count: u64, copied: impl Fn(Key) -> bool) -> (u64, Vec<(Key, Span)>) {
        let (mut dropped, mut lacking) = (0, Vec::new());
        while dropped < count
            && let Some(at) = self.eviction.victim(&mut self.chunks, NONE)
        {
            let key = self.chunks[at].key;
            debug_assert_eq!(self.chunks[at].chunks(), 1);
            if self.chunks[at].staged > 0 {
                self.pass_over(at);
            } else if self.chunks[at].is(OFFLOADED) || copied(key) {
                self.remove(at);
                if self.notes_gone {
                    self.gone.push(key);
                }
                dropped += 1;
            } else {
                let span = Span::new(at, 1);
                self.lock(std::iter::once(span));
                lacking.push((key, span));
            }
        }
        self.end_search();
        (dropped, lacking)
    }

    /// Takes a reader from single chunks, which uses them. `written`: the level below has got them.
    pub fn end_offload(&mut self, spans: &[Span], written: bool) {
        for span in spans {
            self.chunks[span.at].set(OFFLOADED, written);
        }
        self.unlock(spans.iter().copied());
        self.touch_at(spans.iter().copied());
    }
}
