//! Mooncake's leases: what they keep, and what an eviction by shards takes.

use std::collections::HashSet;

use super::eviction_oracle::stored;
use crate::cache::Cache;
use crate::chunks::spans::Span;
use crate::chunks::{NEW, PromptCursor};
use crate::eviction::kind::EvictionKind;
use crate::eviction::lease::{SHARDS, shard_of};
use crate::keys::{ChunkRange, Key};

#[test]
fn a_lease_says_when_it_runs_out() {
    let mut cache = Cache::new(2, EvictionKind::Lease, 1000, true, false);
    let (range, mut marks) = (ChunkRange::of(vec![7]), vec![Span::new(NEW, 1)]);
    cache.clock(5);
    assert!(cache.reserve(&range, &mut marks, true, true));
    cache.admit_stored(&mut marks);
    assert_eq!(cache.next_change(), None);
    let at = cache.find(&mut PromptCursor::new(), range.prompt(), 0).at;
    cache.touch_at(std::iter::once(Span::new(at, 1)));
    assert_eq!(cache.next_change(), Some(1005));
    cache.clock(1005);
    assert_eq!(cache.next_change(), None);
}

#[test]
fn room_counts_the_chunks_whose_leases_ran_out() {
    let mut cache = Cache::new(3, EvictionKind::Lease, 1000, true, false);
    stored(&mut cache, 7);
    stored(&mut cache, 8);
    assert_eq!((cache.room(false), cache.room(true)), (1, 3));
    let at = cache.find(&mut PromptCursor::new(), &[7], 0).at;
    cache.touch_at(std::iter::once(Span::new(at, 1)));
    assert_eq!(cache.room(true), 2);
    cache.clock(1000);
    assert_eq!(cache.room(true), 3);
}

#[test]
fn a_lease_of_length_0_begins_when_the_store_ends() {
    let mut cache = Cache::new(2, EvictionKind::Lease, 1000, true, true);
    let (first, second) = (ChunkRange::of(vec![7]), ChunkRange::of(vec![8]));
    let (mut one, mut other) = (vec![Span::new(NEW, 1)], vec![Span::new(NEW, 1)]);
    assert!(cache.reserve(&first, &mut one, true, true));
    assert!(cache.reserve(&second, &mut other, true, true));
    cache.admit_stored(&mut other);
    cache.admit_stored(&mut one);
    assert_eq!(cache.drop_some(1), 1);
    assert_eq!(cache.gone(), [8]);
}

/// A cache of that many chunks in the order of their writes, of which those under the given keys are leased.
fn sharded(count: u64, leased: impl Iterator<Item = Key>) -> Cache {
    let mut cache = Cache::new(count, EvictionKind::ShardedLease, 1000, true, true);
    let (all, mut marks) =
        (ChunkRange::of((0..count).collect::<Vec<_>>()), vec![Span::new(NEW, count as usize)]);
    assert!(cache.reserve(&all, &mut marks, true, true));
    cache.admit_stored(&mut marks);
    for key in leased {
        let at = cache.find(&mut PromptCursor::new(), &[key], 0).at;
        cache.touch_at(std::iter::once(Span::new(at, 1)));
    }
    cache
}

#[test]
fn by_shards_a_share_of_each_goes_and_not_the_oldest_of_all() {
    // Sixteen chunks a shard: of each, one of twenty goes.
    let mut cache = sharded(16 << 10, std::iter::empty());
    assert_eq!(cache.drop_some(820), 820);
    let gone: Vec<Key> = cache.take_gone().collect();
    let old = gone.iter().filter(|&&key| key < 820).count();
    assert!((400..600).contains(&old), "{old} of the oldest 820");
    assert!(gone.iter().all(|&key| key < 8 << 10), "no shard has only young chunks");
    assert_eq!(cache.drop_some(820), 820);
}

#[test]
fn by_shards_what_is_leased_stays() {
    let mut cache = sharded(4 << 10, 0..2 << 10);
    assert_eq!(cache.drop_some(205), 205);
    assert!(cache.take_gone().all(|key| key >= 2 << 10));
}

#[test]
fn by_shards_the_oldest_others_make_up_half_of_what_is_to_go() {
    // Only the shard that comes first has chunks without a lease; its share is one of its four or so.
    let first: HashSet<Key> =
        (0..4 << 10).filter(|&key| shard_of(key, SHARDS) == shard_of(0, SHARDS)).collect();
    assert!((2..10).contains(&first.len()), "{}", first.len());
    let mut cache = sharded(4 << 10, (0..4 << 10).filter(|key| !first.contains(key)));
    assert_eq!(cache.drop_some(205), first.len() as u64);
    assert_eq!(cache.take_gone().collect::<HashSet<_>>(), first);
    // With none left nothing goes, and that is in the way of no later eviction.
    assert_eq!(cache.drop_some(205), 0);
    cache.clock(1000);
    assert_eq!(cache.drop_some(205), 205);
}

#[test]
fn an_eviction_by_shards_that_takes_nothing_leaves_the_next_one_as_it_was() {
    let gone = |in_vain| {
        let mut cache = sharded(4 << 10, 0..4 << 10);
        for _ in 0..in_vain {
            assert_eq!(cache.drop_some(205), 0);
        }
        cache.clock(1000);
        assert_eq!(cache.drop_some(205), 205);
        cache.take_gone().collect::<HashSet<_>>()
    };
    assert_eq!(gone(0), gone(3));
}

#[test]
fn an_eviction_for_room_is_none_by_shards_though_one_of_those_took_nothing_before() {
    let gone = |in_vain: bool| {
        let mut cache = sharded(4 << 10, std::iter::empty());
        assert_eq!(cache.drop_some(2), 2);
        // All are leased but a chunk that a second read brings, too.
        let (all, one) = (ChunkRange::of((0..4 << 10).collect::<Vec<_>>()), ChunkRange::of(vec![1 << 20]));
        cache.touch(&all);
        let mut read = vec![Span::new(NEW, 1)];
        assert!(cache.reserve(&one, &mut read, false, true));
        assert!(cache.reserve(&one, &mut read.clone(), false, true));
        cache.admit_loaded(&read, false);
        cache.unlock(read.into_iter());
        assert!(!in_vain || cache.drop_some(205) == 0);
        cache.clock(1000);
        assert!(cache.reserve(&ChunkRange::of(vec![2 << 20]), &mut vec![Span::new(NEW, 1)], true, true));
        cache.take_gone().for_each(drop);
        assert_eq!(cache.drop_some(205), 205);
        cache.take_gone().collect::<HashSet<_>>()
    };
    assert_eq!(gone(false), gone(true));
}

#[test]
fn the_look_up_that_read_a_chunk_gives_it_no_lease() {
    let mut cache = Cache::new(2, EvictionKind::Lease, 1000, true, true);
    let (read, stored) = (ChunkRange::of(vec![7]), ChunkRange::of(vec![8]));
    let (mut reading, mut storing) = (vec![Span::new(NEW, 1)], vec![Span::new(NEW, 1)]);
    assert!(cache.reserve(&read, &mut reading, false, true));
    cache.admit_loaded(&reading, false);
    assert!(cache.reserve(&stored, &mut storing, true, true));
    cache.admit_stored(&mut storing);
    cache.touch_at(reading.iter().copied());
    cache.unlock(reading.iter().copied());
    // Neither has a lease, and the one that was read is the last that was used.
    assert_eq!((cache.room(true), cache.next_change()), (2, None));
    assert_eq!(cache.drop_some(1), 1);
    assert_eq!(cache.gone(), [8]);
}
