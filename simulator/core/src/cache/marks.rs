//! Marks: the spans of a prompt that a read or a write concerns, divided as extents are cut.

use super::Cache;
use crate::chunks::spans::{Span, span_at};
use crate::chunks::{ExtentId, NEW, NONE, PromptCursor};
use crate::keys::Key;

impl Cache {
    /// Divides spans before the chunk of that number. Returns the index of the span that begins there.
    pub fn divide(&mut self, spans: &mut Vec<Span>, number: usize) -> usize {
        let (index, skip) = span_at(spans, number);
        if skip == 0 {
            return index;
        }
        let rest = self.split_span(&mut spans[index], skip);
        spans.insert(index + 1, rest);
        index + 1
    }

    /// Leaves the first `len` chunks to a span that has more. Returns the span of the others.
    pub fn split_span(&mut self, span: &mut Span, len: usize) -> Span {
        let (mut at, mut left) = (span.at, len as u64);
        if at != NONE && at != NEW {
            while left >= self.chunks[at].chunks() {
                left -= self.chunks[at].chunks();
                at = self.chunks[at].rest();
            }
            if left > 0 {
                at = self.cut_one(at, left as usize);
            }
        }
        let rest = Span::new(at, span.len as usize - len);
        span.len = len as u32;
        rest
    }

    /// Unmarks all but the first `most` of the marked chunks. Returns how many stay marked.
    pub fn keep_first(&mut self, marks: &mut Vec<Span>, most: u64) -> u64 {
        let (mut kept, mut number, mut index) = (0, 0, 0);
        while index < marks.len() {
            let Span { at, len } = marks[index];
            if at != NONE {
                let more = u64::from(len).min(most - kept);
                if more == 0 {
                    marks[index].at = NONE;
                } else {
                    self.divide(marks, number + more as usize);
                    kept += more;
                }
            }
            number += marks[index].len as usize;
            index += 1;
        }
        kept
    }

    /// The extents of spans, in the memory of `gathered`: the caller puts it back.
    #[inline(always)]
    pub(super) fn gather(&mut self, spans: impl Iterator<Item = Span>) -> Vec<ExtentId> {
        let mut extents = std::mem::take(&mut self.gathered);
        extents.clear();
        spans.for_each(|span| extents.extend(self.chunks.extents_of(span)));
        extents
    }

    /// Divides marks where their extents were cut since: each is a single extent then.
    pub(super) fn divide_as_cut(&self, marks: &mut Vec<Span>) {
        let mut index = 0;
        while index < marks.len() {
            let Span { at, len } = marks[index];
            if at != NONE && self.chunks[at].chunks() < u64::from(len) {
                let extent = &self.chunks[at];
                marks[index].len = extent.chunks() as u32;
                marks.insert(index + 1, Span { at: extent.rest(), len: len - marks[index].len });
            }
            index += 1;
        }
    }

    /// Drops those of these chunks, each an extent by itself, that are neither read nor written.
    pub fn drop_settled(&mut self, keys: &[Key]) -> Vec<Key> {
        let mut dropped = Vec::new();
        for &key in keys {
            let found = self.chunks.find(&mut PromptCursor::new(), &[key], 0);
            if found.at != NONE && self.chunks[found.at].settled() {
                self.remove(found.at);
                dropped.push(key);
            }
        }
        dropped
    }
}
