//! The eviction policies, use by use, against naive ones that keep their queues as plain lists.

use std::collections::BTreeSet;

use super::Chance;
use crate::cache::{Cache, replay};
use crate::chunks::spans::Span;
use crate::chunks::{NEW, PromptCursor};
use crate::eviction::kind::EvictionKind;
use crate::keys::{ChunkRange, Key};

type Policy = fn(usize, &[Key]) -> Vec<bool>;

/// A few keys are used often; which ones those are changes, and scans of new keys come in between.
fn uses(seed: u64) -> Vec<Key> {
    let mut chance = Chance(seed);
    let (mut keys, mut fresh) = (Vec::new(), 1_000_000);
    while keys.len() < 1500 {
        if chance.below(50) == 0 {
            let count = 1 + chance.below(60);
            keys.extend(fresh..fresh + count);
            fresh += count;
        }
        let (hot, rank) = (keys.len() as u64 / 500 * 20, 1 + chance.below(12));
        keys.push(hot + chance.below(rank * rank));
    }
    keys
}

fn agrees(kind: EvictionKind, naive: Policy) {
    for seed in 0..6 {
        let keys = uses(seed);
        for capacity in [2, 3, 9, 20, 33, 70] {
            let (ours, theirs) = (replay(kind, capacity as u64, &keys), naive(capacity, &keys));
            assert_eq!(
                ours.iter().zip(&theirs).position(|(one, other)| one != other),
                None,
                "{seed}, {capacity}"
            );
            assert!(ours.contains(&true) && ours.contains(&false));
        }
    }
}

/// Takes a key out of a list. False: it is not there.
fn take(list: &mut Vec<Key>, key: Key) -> bool {
    let place = list.iter().position(|&other| other == key);
    place.map(|place| list.remove(place)).is_some()
}

fn lru(capacity: usize, keys: &[Key]) -> Vec<bool> {
    let mut held = Vec::new();
    let mut one = |&key: &Key| {
        let hit = take(&mut held, key);
        if held.len() == capacity {
            held.remove(0);
        }
        held.push(key);
        hit
    };
    keys.iter().map(&mut one).collect()
}

fn fifo(capacity: usize, keys: &[Key]) -> Vec<bool> {
    let mut held: Vec<Key> = Vec::new();
    let mut one = |&key: &Key| {
        if held.contains(&key) {
            return true;
        }
        if held.len() == capacity {
            held.remove(0);
        }
        held.push(key);
        false
    };
    keys.iter().map(&mut one).collect()
}

/// Ordered by the number of uses, then by the use that made it so many.
fn lfu(capacity: usize, keys: &[Key]) -> Vec<bool> {
    let mut held: BTreeSet<(u32, usize, Key)> = BTreeSet::new();
    let mut one = |(now, &key): (usize, &Key)| {
        let known = held.iter().find(|entry| entry.2 == key).copied();
        if let Some(entry) = known {
            held.remove(&entry);
        } else if held.len() == capacity {
            held.pop_first();
        }
        held.insert((known.map_or(1, |entry| entry.0 + 1), now, key));
        known.is_some()
    };
    keys.iter().enumerate().map(&mut one).collect()
}

/// Lists with the oldest first; an entry of a queue is a key and its uses.
fn s3_fifo(capacity: usize, keys: &[Key]) -> Vec<bool> {
    let small_room = (capacity / 10).max(1);
    let (main_room, ghost_room) = (capacity - small_room, capacity * 9 / 10);
    let (mut small, mut main, mut ghosts) =
        (Vec::<(Key, u8)>::new(), Vec::<(Key, u8)>::new(), Vec::<Key>::new());
    let mut evicted = false;
    let mut one = |&key: &Key| {
        if let Some(entry) = small.iter_mut().chain(&mut main).find(|entry| entry.0 == key) {
            entry.1 = entry.1.saturating_add(1);
            return true;
        }
        let returns = take(&mut ghosts, key);
        if small.len() + main.len() == capacity {
            evicted = true;
            let main_goes = main.len() > main_room || small.is_empty();
            // The small queue gives its oldest key that was used less than twice; the others go to the main queue.
            while !main_goes && small.first().is_some_and(|entry| entry.1 >= 2) {
                main.push((small.remove(0).0, 0));
            }
            if main_goes || small.is_empty() {
                while main[0].1 > 0 {
                    let (again, uses) = main.remove(0);
                    main.push((again, uses.min(3) - 1));
                }
                main.remove(0);
            } else {
                if ghosts.len() == ghost_room && ghost_room > 0 {
                    ghosts.remove(0);
                }
                let (gone, _) = small.remove(0);
                ghosts.extend((ghost_room > 0).then_some(gone));
            }
        }
        let to_main = returns || (!evicted && small.len() >= small_room);
        if to_main {
            main.push((key, 0))
        } else {
            small.push((key, 0))
        }
        false
    };
    keys.iter().map(&mut one).collect()
}

/// The paper's figure 4, with its names: T1 and T2 hold keys, B1 and B2 are their ghosts; p is a real number.
fn arc(capacity: usize, keys: &[Key]) -> Vec<bool> {
    let (mut t1, mut t2, mut b1, mut b2) = (Vec::new(), Vec::new(), Vec::new(), Vec::<Key>::new());
    let (c, mut p) = (capacity, 0.0_f64);
    let mut one = |&key: &Key| {
        if take(&mut t1, key) || take(&mut t2, key) {
            t2.push(key);
            return true;
        }
        let (of_b1, of_b2) = (b1.contains(&key), b2.contains(&key));
        let (ones, twos) = (b1.len() as f64, b2.len() as f64);
        if of_b1 {
            p = (p + (twos / ones).max(1.0)).min(c as f64);
        } else if of_b2 {
            p = (p - (ones / twos).max(1.0)).max(0.0);
        }
        let _ = take(&mut b1, key) || take(&mut b2, key);
        if t1.len() + t2.len() == c {
            let all = t1.len() + b1.len();
            if !of_b1 && !of_b2 && all >= c && b1.is_empty() {
                t1.remove(0);
            } else {
                if !of_b1 && !of_b2 && all >= c {
                    b1.remove(0);
                } else if !of_b1 && !of_b2 && all + t2.len() + b2.len() >= 2 * c {
                    b2.remove(0);
                }
                let (size, some) = (t1.len() as f64, !t1.is_empty());
                if t2.is_empty() || (some && (size > p || (of_b2 && size == p))) {
                    b1.push(t1.remove(0));
                } else {
                    b2.push(t2.remove(0));
                }
            }
        }
        if of_b1 || of_b2 {
            t2.push(key)
        } else {
            t1.push(key)
        }
        false
    };
    keys.iter().map(&mut one).collect()
}

/// LMCache's variant: the victim goes before the chunk that comes is known, and a ghost counts as used once again.
fn lmcache_arc(capacity: usize, keys: &[Key]) -> Vec<bool> {
    let (mut once, mut again) = (Vec::new(), Vec::<Key>::new());
    let (mut once_ghosts, mut again_ghosts) = (Vec::new(), Vec::<Key>::new());
    let (mut most, mut target) = (0, 0.0_f64);
    let mut one = |&key: &Key| {
        if take(&mut once, key) || take(&mut again, key) {
            again.push(key);
            return true;
        }
        for comes in [false, true] {
            if comes {
                let (ones, twos) = (once_ghosts.len() as f64, again_ghosts.len() as f64);
                if take(&mut once_ghosts, key) {
                    target = (target + (twos / ones).max(1.0)).min(most as f64);
                } else if take(&mut again_ghosts, key) {
                    target = (target - (ones / twos).max(1.0)).max(0.0);
                }
                once.push(key);
                most = most.max(once.len() + again.len());
            } else if once.len() + again.len() < capacity {
                continue;
            } else if again.is_empty() || (!once.is_empty() && once.len() >= target as usize) {
                once_ghosts.push(once.remove(0));
            } else {
                again_ghosts.push(again.remove(0));
            }
            while once.len() + once_ghosts.len() > most && !once_ghosts.is_empty() {
                once_ghosts.remove(0);
            }
            while once.len() + again.len() + once_ghosts.len() + again_ghosts.len() > 2 * most {
                if again_ghosts.is_empty() {
                    once_ghosts.remove(0)
                } else {
                    again_ghosts.remove(0)
                };
            }
        }
        false
    };
    keys.iter().map(&mut one).collect()
}

#[test]
fn lru_agrees_with_a_list() {
    agrees(EvictionKind::Lru, lru);
}

#[test]
fn fifo_agrees_with_a_list() {
    agrees(EvictionKind::Fifo, fifo);
}

#[test]
fn lfu_agrees_with_an_ordered_set() {
    agrees(EvictionKind::Lfu, lfu);
}

#[test]
fn s3_fifo_agrees_with_three_lists() {
    agrees(EvictionKind::S3Fifo, s3_fifo);
}

#[test]
fn arc_agrees_with_the_papers_four_lists() {
    agrees(EvictionKind::Arc, arc);
}

#[test]
fn lmcaches_arc_agrees_with_its_four_lists() {
    agrees(EvictionKind::LmcacheArc, lmcache_arc);
}

/// Stores one chunk under this key.
pub(super) fn stored(cache: &mut Cache, key: Key) {
    let mut marks = vec![Span::new(NEW, 1)];
    assert!(cache.reserve(&ChunkRange::of(vec![key]), &mut marks, true, true));
    cache.admit_stored(&mut marks);
}

fn goes_next(cache: &mut Cache) -> Vec<Key> {
    cache.clear_gone();
    assert_eq!(cache.drop_some(1), 1);
    cache.gone().to_vec()
}

#[test]
fn the_order_of_lru_is_that_of_the_ends_of_stores() {
    let mut cache = Cache::new(2, EvictionKind::Lru, 0, true, true);
    let ranges = [ChunkRange::of(vec![7]), ChunkRange::of(vec![8])];
    let mut marks = [vec![Span::new(NEW, 1)], vec![Span::new(NEW, 1)]];
    for (range, marks) in ranges.iter().zip(&mut marks) {
        assert!(cache.reserve(range, marks, true, true));
    }
    marks.iter_mut().rev().for_each(|marks| cache.admit_stored(marks));
    assert_eq!(cache.next_change(), None);
    assert_eq!(goes_next(&mut cache), [8]);
}

#[test]
fn a_use_of_a_prompt_s_later_chunks_leaves_the_earlier_ones_where_they_are() {
    let mut cache = Cache::new(8, EvictionKind::Lru, 0, false, true);
    let whole = ChunkRange::of(vec![1, 2, 3, 4]);
    let mut marks = vec![Span::new(NEW, 4)];
    assert!(cache.reserve(&whole, &mut marks, true, true));
    cache.admit_stored(&mut marks);
    stored(&mut cache, 9);
    cache.touch(&whole.slice(2..4));
    assert_eq!([0; 3].map(|_| goes_next(&mut cache)[0]), [2, 1, 9]);
}

#[test]
fn lmcaches_arc_counts_the_look_up_that_read_a_chunk_as_a_second_use() {
    let mut cache = Cache::new(4, EvictionKind::LmcacheArc, 0, true, true);
    let (read, mut reading) = (ChunkRange::of(vec![7]), vec![Span::new(NEW, 1)]);
    assert!(cache.reserve(&read, &mut reading, false, true));
    cache.admit_loaded(&reading, false);
    cache.touch_at(reading.iter().copied());
    cache.unlock(reading.iter().copied());
    stored(&mut cache, 8);
    assert_eq!(goes_next(&mut cache), [8]);
}

#[test]
fn lmcaches_arc_counts_a_second_write_as_a_second_use_and_remembers_no_failed_one() {
    let mut cache = Cache::new(4, EvictionKind::LmcacheArc, 0, true, true);
    stored(&mut cache, 7);
    let range = ChunkRange::of(vec![7]);
    let at = cache.find(&mut PromptCursor::new(), range.prompt(), 0).at;
    let mut again = vec![Span::new(at, 1)];
    assert!(cache.reserve(&range, &mut again, true, true));
    cache.admit_stored(&mut again);
    stored(&mut cache, 8);
    assert_eq!(goes_next(&mut cache), [8]);

    let mut cache = Cache::new(4, EvictionKind::LmcacheArc, 0, true, true);
    let mut failing = vec![Span::new(NEW, 1)];
    assert!(cache.reserve(&range, &mut failing, true, true));
    cache.give_up_stored(&failing);
    stored(&mut cache, 7);
    stored(&mut cache, 8);
    assert_eq!(goes_next(&mut cache), [7]);
}

#[test]
fn s3_fifo_does_not_remember_a_chunk_whose_write_failed() {
    let mut cache = Cache::new(10, EvictionKind::S3Fifo, 0, true, true);
    let failed = ChunkRange::of(vec![7]);
    let mut marks = vec![Span::new(NEW, 1)];
    assert!(cache.reserve(&failed, &mut marks, true, true));
    cache.give_up_stored(&marks);
    stored(&mut cache, 7);
    stored(&mut cache, 8);
    assert_eq!(goes_next(&mut cache), [7]);
}

#[test]
fn a_chunk_that_a_read_brought_goes_after_one_stored_during_the_read() {
    let mut cache = Cache::new(2, EvictionKind::Lru, 0, true, true);
    let (read, stored) = (ChunkRange::of(vec![7]), ChunkRange::of(vec![8]));
    let (mut reading, mut storing) = (vec![Span::new(NEW, 1)], vec![Span::new(NEW, 1)]);
    assert!(cache.reserve(&read, &mut reading, false, true));
    assert!(cache.reserve(&stored, &mut storing, true, true));
    cache.admit_stored(&mut storing);
    cache.admit_loaded(&reading, false);
    cache.unlock(reading.iter().copied());
    assert_eq!(cache.drop_some(1), 1);
    assert_eq!(cache.gone(), [8]);
}

/// Three groups of eight chunks. The groups share one count, or each has its own.
#[test]
fn a_gap_in_a_row_ends_where_the_next_chunks_begin() {
    for shift in [24, 40] {
        let mut cache = Cache::new(64, EvictionKind::Lru, 0, false, false);
        let keys = (0..24).map(|number: Key| (1 + number + number / 8) << shift);
        let whole = ChunkRange::of(keys.collect::<Vec<_>>());
        for part in [0..12, 16..24] {
            let mut marks = vec![Span::new(NEW, part.len())];
            assert!(cache.reserve(&whole.slice(part), &mut marks, true, true));
            cache.admit_stored(&mut marks);
        }
        for number in 0..24 {
            let found = cache.find(&mut PromptCursor::new(), whole.prompt(), number);
            let gap = (12..16).contains(&number);
            assert_eq!(cache.holds(found.at), !gap, "{number}");
            assert!(!gap || number + found.len <= 16, "{number}: {} chunks", found.len);
        }
    }
}
