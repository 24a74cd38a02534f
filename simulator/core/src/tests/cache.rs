//! One level: what a search finds, where spans divide, and what the end of a store does to the order of eviction.

use crate::cache::Cache;
use crate::chunks::spans::Span;
use crate::chunks::{NEW, NONE, PromptCursor};
use crate::eviction::kind::EvictionKind;
use crate::keys::{ChunkRange, Key, numbered};

/// More than two rows of chunks, so that each row's border lies within a prompt.
const CHUNKS: usize = 40;

fn cache() -> Cache {
    Cache::new(100, EvictionKind::Lru, 0, false, false)
}

/// The keys of a prompt of that number.
fn prompt(number: u64) -> ChunkRange {
    let first = number * CHUNKS as u64;
    ChunkRange::of((first..first + CHUNKS as u64).map(numbered).collect::<Vec<Key>>())
}

fn store(cache: &mut Cache, range: &ChunkRange) {
    let mut marks = vec![Span::new(NEW, range.len())];
    assert!(cache.reserve(range, &mut marks, true, false));
    cache.admit_stored(&mut marks);
    cache.check();
}

/// The numbers of a prompt's chunks that a search finds which begins at each of them.
fn found(cache: &Cache, prompt: &ChunkRange) -> Vec<usize> {
    let holds = |&number: &usize| {
        let place = cache.find(&mut PromptCursor::new(), prompt.prompt(), number);
        cache.holds(place.at)
    };
    (0..prompt.len()).filter(holds).collect()
}

#[test]
fn a_search_finds_each_chunk_wherever_in_a_row_its_store_began() {
    let whole = prompt(0);
    for first in 0..CHUNKS {
        let mut cache = cache();
        store(&mut cache, &whole.slice(first..CHUNKS));
        assert_eq!(found(&cache, &whole), (first..CHUNKS).collect::<Vec<_>>());
    }
}

#[test]
fn a_search_finds_the_chunks_on_both_sides_of_a_cut() {
    for number in 0..10 {
        let (mut cache, whole) = (cache(), prompt(number));
        store(&mut cache, &whole);
        for at in 0..CHUNKS {
            let place = cache.find(&mut PromptCursor::new(), whole.prompt(), at);
            cache.cut(place, 1);
            cache.check();
            assert_eq!(found(&cache, &whole), (0..CHUNKS).collect::<Vec<_>>(), "prompt {number}, chunk {at}");
        }
    }
}

#[test]
fn a_search_finds_what_is_left_of_more_extents_than_a_groups_count_can_count() {
    // Keys of one group, each a prompt of its own: 300 extents come and 260 go.
    let mut cache = Cache::new(400, EvictionKind::Lru, 0, false, false);
    let prompts: Vec<ChunkRange> = (1..=300).map(|key| ChunkRange::of(vec![key])).collect();
    prompts.iter().for_each(|prompt| store(&mut cache, prompt));
    assert_eq!(cache.drop_some(260), 260);
    cache.check();
    let left: Vec<bool> = prompts.iter().map(|prompt| found(&cache, prompt) == [0]).collect();
    assert_eq!(left, (1..=300).map(|number| number > 260).collect::<Vec<_>>());
}

#[test]
fn a_division_gives_the_place_of_the_span_that_begins_at_the_chunk() {
    let (none, new) = (|len| Span::new(NONE, len), |len| Span::new(NEW, len));
    let mut spans = vec![none(3), new(5)];
    assert_eq!(cache().divide(&mut spans, 3), 1);
    assert_eq!(spans, [none(3), new(5)]);
    assert_eq!(cache().divide(&mut spans, 5), 2);
    assert_eq!(spans, [none(3), new(2), new(3)]);
}

#[test]
fn a_stores_end_queues_what_left_the_queue_meanwhile_and_renews_the_others_if_asked() {
    let keys = [1, 2, 3];
    let one = |key: Key| ChunkRange::of(vec![key]);
    for (renews, oldest) in [(true, 3), (false, 2)] {
        let mut cache = Cache::new(10, EvictionKind::Lru, 0, true, true);
        let mut stored = vec![Span::new(NEW, 1); 2];
        assert!(cache.reserve(&ChunkRange::of(keys[..2].to_vec()), &mut stored, true, false));
        // A read brings the first chunk before its store ends, for the time of one use.
        let loaded = [stored[0]];
        assert!(cache.reserve(&one(keys[0]), &mut loaded.to_vec(), false, false));
        cache.admit_loaded(&loaded, true);
        store(&mut cache, &one(keys[2]));
        cache.unlock(loaded.into_iter());
        cache.end_store(&mut stored, renews);
        cache.check_idle();
        assert_eq!((cache.drop_some(1), cache.gone()), (1, [oldest].as_slice()));
    }
}

#[test]
fn a_chunk_with_another_write_in_flight_neither_goes_nor_is_offloaded() {
    let mut cache = Cache::new(10, EvictionKind::Lru, 0, true, true);
    let one = ChunkRange::of(vec![1]);
    let mut stored = vec![Span::new(NEW, 1)];
    assert!(cache.reserve(&one, &mut stored, true, false));
    let loaded = [stored[0]];
    assert!(cache.reserve(&one, &mut loaded.to_vec(), false, false));
    cache.admit_loaded(&loaded, false);
    cache.unlock(loaded.into_iter());
    store(&mut cache, &ChunkRange::of(vec![2]));
    assert_eq!(cache.drop_copied(2, |_| true), (1, vec![]));
    cache.end_store(&mut stored, false);
    assert_eq!(cache.drop_copied(2, |_| true), (1, vec![]));
    cache.check_idle();
    assert_eq!(cache.gone(), [2, 1]);
}
