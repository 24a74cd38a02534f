//! Chunks in order of use, some of them locked: what both chunk tiers keep their contents in.
//!
//! Chunks come and are used as pieces of chains: the keys of a prompt's chunks, from its first on. A key stands for
//! all that precedes it, so equal keys have equal predecessors, and it is enough to index each piece by its first.
//! Whoever asks for a chunk gives the chain that leads to it. `lru_oracle.rs` says key by key what must come out.

use std::ops::Range;

use crate::keys::{Key, KeyMap};

type PieceId = u32;

const NONE: PieceId = u32::MAX;

/// Chunks in a row of one chain, as many times locked, and side by side in the order of use: the last is the oldest.
#[derive(Clone, Debug)]
struct Piece {
    keys: Vec<Key>,
    locks: u32,
    /// Grows with every use; parts of one piece share it.
    used: u64,
    older: PieceId,
    newer: PieceId,
}

#[derive(Clone, Debug)]
pub struct Lru {
    /// Pieces by their first key.
    index: KeyMap<PieceId>,
    /// Pieces by the key that they ended with when they were made: a short cut, where that is still so.
    ends: KeyMap<PieceId>,
    pieces: Vec<Piece>,
    spare: Vec<PieceId>,
    oldest: PieceId,
    newest: PieceId,
    /// All pieces older than this one are locked: chunks that wait to be written elsewhere can be many.
    unlocked: PieceId,
    uses: u64,
    len: u64,
}

impl Default for Lru {
    fn default() -> Self {
        Self {
            index: KeyMap::default(),
            ends: KeyMap::default(),
            pieces: Vec::new(),
            spare: Vec::new(),
            oldest: NONE,
            newest: NONE,
            unlocked: NONE,
            uses: 0,
            len: 0,
        }
    }
}

impl Lru {
    /// Chunks, locked or not.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Chunk by chunk of a chain's range: whether it is there.
    pub fn walk<'a>(&'a self, chain: &'a [Key], range: Range<usize>) -> impl Iterator<Item = bool> + 'a {
        let mut known =
            self.entry(chain, range.start).map_or(0, |(id, at)| at + self.common(id, &chain[at..]));
        range.map(move |at| {
            if at < known {
                return true;
            }
            let Some(&id) = self.index.get(&chain[at]) else { return false };
            known = at + self.common(id, &chain[at..]);
            true
        })
    }

    /// Makes chunks the most recently used ones, the first of them most of all, adding those that are not there, and
    /// locks them so many times.
    pub fn touch(&mut self, chain: &[Key], range: Range<usize>, locks: u32) {
        for (found, part) in self.isolate(chain, range).into_iter().rev() {
            let id = match found {
                Some(id) => {
                    self.unlink(id);
                    id
                }
                None => {
                    self.len += part.len() as u64;
                    self.keep(Piece {
                        keys: chain[part].to_vec(),
                        locks: 0,
                        used: 0,
                        older: NONE,
                        newer: NONE,
                    })
                }
            };
            self.pieces[id as usize].locks += locks;
            self.link_newest(id);
        }
    }

    /// Keeps chunks from being dropped until as many `unlock`s came. Those that are not there are let be.
    pub fn lock(&mut self, chain: &[Key], range: Range<usize>) {
        for (found, _) in self.isolate(chain, range) {
            if let Some(id) = found {
                self.pieces[id as usize].locks += 1;
            }
        }
    }

    pub fn unlock(&mut self, chain: &[Key], range: Range<usize>) {
        for (found, _) in self.isolate(chain, range) {
            if let Some(id) = found {
                let piece = &mut self.pieces[id as usize];
                piece.locks = piece.locks.saturating_sub(1);
                let used = piece.used;
                self.unlocked = match self.pieces.get(self.unlocked as usize) {
                    Some(first) if first.used < used => self.unlocked,
                    Some(first) if first.used == used => self.oldest,
                    _ => id,
                };
            }
        }
    }

    /// Drops up to `count` unlocked chunks, the least recently used first, and says how many.
    pub fn drop_oldest(&mut self, count: u64, mut gone: impl FnMut(Key)) -> u64 {
        let (mut left, mut at) = (count, self.unlocked);
        while at != NONE && left > 0 {
            let piece = &mut self.pieces[at as usize];
            let (id, first) = (at, piece.keys[0]);
            at = piece.newer;
            if piece.locks > 0 {
                if self.unlocked == id {
                    self.unlocked = at;
                }
                continue;
            }
            let keep = piece.keys.len().saturating_sub(left as usize);
            left -= (piece.keys.len() - keep) as u64;
            self.ends.remove(&piece.keys[piece.keys.len() - 1]);
            piece.keys.drain(keep..).rev().for_each(&mut gone);
            if keep == 0 {
                self.unlink(id);
                self.index.remove(&first);
                self.spare.push(id);
            }
        }
        self.len -= count - left;
        count - left
    }

    /// The last piece that begins at `at` or before, and where. If any piece holds that chunk, it is this.
    fn entry(&self, chain: &[Key], at: usize) -> Option<(PieceId, usize)> {
        let begins = |at: usize| self.index.get(chain.get(at)?).map(|&id| (id, at));
        let found = begins(at);
        if found.is_some() || at == 0 || self.ends_with(chain[at - 1]) {
            return found;
        }
        (0..at).rev().find_map(begins)
    }

    fn ends_with(&self, key: Key) -> bool {
        self.ends.get(&key).is_some_and(|&id| self.pieces[id as usize].keys.last() == Some(&key))
    }

    /// How many chunks a piece and a chain have in common, from the first of both on.
    fn common(&self, id: PieceId, chain: &[Key]) -> usize {
        self.pieces[id as usize].keys.iter().zip(chain).take_while(|(a, b)| a == b).count()
    }

    /// A range of a chain, cut into whole pieces and, between them, parts that are not there.
    fn isolate(&mut self, chain: &[Key], range: Range<usize>) -> Vec<(Option<PieceId>, Range<usize>)> {
        let mut parts: Vec<(Option<PieceId>, Range<usize>)> = Vec::new();
        let mut at = self.entry(chain, range.start).map_or(range.start, |(_, at)| at);
        while at < range.end {
            let Some(&found) = self.index.get(&chain[at]) else {
                match parts.last_mut() {
                    Some((None, part)) => part.end += 1,
                    _ => parts.push((None, at..at + 1)),
                }
                at += 1;
                continue;
            };
            let common = self.common(found, &chain[at..]);
            let part = at.max(range.start)..(at + common).min(range.end);
            if !part.is_empty() {
                let id = if part.start > at { self.split(found, part.start - at) } else { found };
                if part.len() < self.pieces[id as usize].keys.len() {
                    self.split(id, part.len());
                }
                parts.push((Some(id), part));
            }
            at = (at + common).max(range.start);
        }
        parts
    }

    /// Cuts a piece behind its first `keys` keys, and returns the other part.
    fn split(&mut self, id: PieceId, keys: usize) -> PieceId {
        let piece = &mut self.pieces[id as usize];
        let Piece { locks, used, older, .. } = *piece;
        let keys = piece.keys.split_off(keys);
        let other = self.keep(Piece { keys, locks, used, older, newer: id });
        if self.unlocked == id {
            self.unlocked = other;
        }
        let piece = &mut self.pieces[id as usize];
        piece.older = other;
        self.ends.insert(piece.keys[piece.keys.len() - 1], id);
        match older {
            NONE => self.oldest = other,
            older => self.pieces[older as usize].newer = other,
        }
        other
    }

    fn keep(&mut self, piece: Piece) -> PieceId {
        let id = self.spare.pop().unwrap_or(self.pieces.len() as PieceId);
        self.index.insert(piece.keys[0], id);
        self.ends.insert(piece.keys[piece.keys.len() - 1], id);
        if id as usize == self.pieces.len() {
            self.pieces.push(piece);
        } else {
            self.pieces[id as usize] = piece;
        }
        id
    }

    fn unlink(&mut self, id: PieceId) {
        let Piece { older, newer, .. } = self.pieces[id as usize];
        if self.unlocked == id {
            self.unlocked = newer;
        }
        match older {
            NONE => self.oldest = newer,
            other => self.pieces[other as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            other => self.pieces[other as usize].older = older,
        }
    }

    fn link_newest(&mut self, id: PieceId) {
        let previous = self.newest;
        if self.unlocked == NONE {
            self.unlocked = id;
        }
        self.uses += 1;
        let piece = &mut self.pieces[id as usize];
        (piece.used, piece.older, piece.newer) = (self.uses, previous, NONE);
        match previous {
            NONE => self.oldest = id,
            other => self.pieces[other as usize].newer = id,
        }
        self.newest = id;
    }
}
