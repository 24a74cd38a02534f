//! Pieces: how those who hold or mark chunks in a row of a prompt name them.

use crate::cache::Cache;
use crate::chunks::{At, NEW, NONE};
use crate::keys::{Key, Part};

/// Chunks in a row, from an extent's first one on. It may have been cut since: `Chunks::lie_in`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// NONE: they are not marked. NEW: they are to come.
    pub at: At,
    pub len: u32,
}

impl Piece {
    pub fn new(at: At, len: usize) -> Self {
        Self { at, len: len as u32 }
    }
}

/// The pieces of marked chunks.
pub fn marked(marks: &[Piece]) -> impl Iterator<Item = Piece> {
    marks.iter().copied().filter(|piece| piece.at != NONE)
}

/// Adds a piece; marks in a row for chunks that are not there are one.
pub fn push_piece(marks: &mut Vec<Piece>, piece: Piece) {
    match marks.last_mut() {
        Some(last) if last.at == piece.at && matches!(piece.at, NONE | NEW) => last.len += piece.len,
        _ => marks.push(piece),
    }
}

/// How many chunks are marked.
pub fn count(marks: &[Piece]) -> u64 {
    marked(marks).map(|piece| u64::from(piece.len)).sum()
}

/// In which of the pieces the chunk of that number lies, counted from their first one, and how far behind its first one.
pub fn piece_of(pieces: &[Piece], number: usize) -> (usize, usize) {
    let mut left = number;
    for (index, piece) in pieces.iter().enumerate() {
        if left < piece.len as usize {
            return (index, left);
        }
        left -= piece.len as usize;
    }
    (pieces.len(), 0)
}

/// Takes the marks off the first so many of the marked chunks, which are to come.
pub fn drop_first(marks: &mut Vec<Piece>, count: u64) {
    let (mut left, mut index) = (count as u32, 0);
    while left > 0 && index < marks.len() {
        let Piece { at, len } = marks[index];
        if at != NONE {
            let gone = len.min(left);
            marks[index] = Piece { at: NONE, len: gone };
            if gone < len {
                marks.insert(index + 1, Piece { at, len: len - gone });
            }
            left -= gone;
        }
        index += 1;
    }
}

/// The keys of a part's marked chunks.
pub fn keys(part: &Part, marks: &[Piece]) -> impl Iterator<Item = Key> {
    let mut end = 0;
    let ranges = marks.iter().map(move |piece| {
        let start = end;
        end += piece.len as usize;
        (piece.at, start..end)
    });
    ranges.filter(|(at, _)| *at != NONE).flat_map(move |(_, chunks)| part.keys()[chunks].iter().copied())
}

impl Cache {
    /// Divides pieces before the chunk of that number, counted from their first one: that of the piece which begins there.
    pub fn divide(&mut self, pieces: &mut Vec<Piece>, number: usize) -> usize {
        let (index, skip) = piece_of(pieces, number);
        if skip == 0 {
            return index;
        }
        let rest = self.divide_piece(&mut pieces[index], skip);
        pieces.insert(index + 1, rest);
        index + 1
    }

    /// Leaves the first `len` of its chunks to a piece that has more, and returns the piece of the others.
    pub fn divide_piece(&mut self, piece: &mut Piece, len: usize) -> Piece {
        let (mut at, mut left) = (piece.at, len as u64);
        if at != NONE && at != NEW {
            while left >= self.chunks[at].chunks() {
                left -= self.chunks[at].chunks();
                at = self.chunks[at].rest();
            }
            if left > 0 {
                at = self.cut_one(at, left as usize);
            }
        }
        let rest = Piece::new(at, piece.len as usize - len);
        piece.len = len as u32;
        rest
    }

    /// Leaves no more than the first `most` of the marked chunks, and says how many those are.
    pub fn keep_first(&mut self, marks: &mut Vec<Piece>, most: u64) -> u64 {
        let (mut kept, mut number, mut index) = (0, 0, 0);
        while index < marks.len() {
            let Piece { at, len } = marks[index];
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

    /// The extents of pieces, in memory that is lent: it goes back to `gathered`.
    #[inline(always)]
    pub(crate) fn gather(&mut self, pieces: impl Iterator<Item = Piece>) -> Vec<At> {
        let mut extents = std::mem::take(&mut self.gathered);
        extents.clear();
        pieces.for_each(|piece| extents.extend(self.chunks.lie_in(piece)));
        extents
    }

    /// Makes each mark one of a single extent, though extents were cut since.
    pub(crate) fn divide_as_cut(&self, marks: &mut Vec<Piece>) {
        let mut index = 0;
        while index < marks.len() {
            let Piece { at, len } = marks[index];
            if at != NONE && self.chunks[at].chunks() < u64::from(len) {
                let extent = &self.chunks[at];
                marks[index].len = extent.chunks() as u32;
                marks.insert(index + 1, Piece { at: extent.rest(), len: len - marks[index].len });
            }
            index += 1;
        }
    }
}
