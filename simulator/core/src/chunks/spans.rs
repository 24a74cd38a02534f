//! Spans: names for chunks in a row of a prompt that a hit holds, or that a read or a write marks.

use super::extent::{ExtentId, NEW, NONE};
use crate::keys::{ChunkRange, Key};

/// Chunks in a row, from an extent's first one on. The extent may have been cut since: `Chunks::extents_of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// NONE: the chunks are not marked. NEW: their extents are yet to be made.
    pub at: ExtentId,
    pub len: u32,
}

impl Span {
    pub fn new(at: ExtentId, len: usize) -> Self {
        Self { at, len: len as u32 }
    }
}

/// The spans of marked chunks.
pub fn marked(marks: &[Span]) -> impl Iterator<Item = Span> {
    marks.iter().copied().filter(|span| span.at != NONE)
}

/// Adds a span. Joins it to the last one if both are NONE, or both NEW.
pub fn push_span(marks: &mut Vec<Span>, span: Span) {
    match marks.last_mut() {
        Some(last) if last.at == span.at && matches!(span.at, NONE | NEW) => last.len += span.len,
        _ => marks.push(span),
    }
}

/// How many chunks are marked.
pub fn count(marks: &[Span]) -> u64 {
    marked(marks).map(|span| u64::from(span.len)).sum()
}

/// The index of the span that has the chunk of that number, and the chunk's position in the span.
pub fn span_at(spans: &[Span], number: usize) -> (usize, usize) {
    let mut left = number;
    for (index, span) in spans.iter().enumerate() {
        if left < span.len as usize {
            return (index, left);
        }
        left -= span.len as usize;
    }
    (spans.len(), 0)
}

/// Unmarks the first `count` of the marked chunks, all of them NEW.
pub fn drop_first(marks: &mut Vec<Span>, count: u64) {
    let (mut left, mut index) = (count as u32, 0);
    while left > 0 && index < marks.len() {
        let Span { at, len } = marks[index];
        if at != NONE {
            let gone = len.min(left);
            marks[index] = Span { at: NONE, len: gone };
            if gone < len {
                marks.insert(index + 1, Span { at, len: len - gone });
            }
            left -= gone;
        }
        index += 1;
    }
}

/// The keys of the marked chunks of a range.
pub fn keys(range: &ChunkRange, marks: &[Span]) -> impl Iterator<Item = Key> {
    let mut end = 0;
    let ranges = marks.iter().map(move |span| {
        let start = end;
        end += span.len as usize;
        (span.at, start..end)
    });
    ranges.filter(|(at, _)| *at != NONE).flat_map(move |(_, chunks)| range.keys()[chunks].iter().copied())
}
