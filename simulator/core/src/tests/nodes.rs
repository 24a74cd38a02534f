//! The GPU's cache as a tree of nodes: what is evicted together, and what stays.

use crate::engine::blocks::{Adds, BlockPool, Held};
use crate::journal::Journal;
use crate::keys::{BlockRun, Segment, block_runs};

const SIZE: u64 = 4;

/// Whole blocks of a stream, and others behind them.
fn prompt(blocks: u64, stream: i64, others: u64) -> Vec<BlockRun> {
    let segments = [(1, blocks * SIZE), (stream, others * SIZE)];
    block_runs(&segments.map(|(hash_id, tokens)| Segment { hash_id, tokens }), SIZE)
}

/// Computes what the pool lacks of a prompt, so many blocks at a time. Returns how many it had.
fn compute(pool: &mut BlockPool, runs: &[BlockRun], chunk: u64, held: &mut Held) -> u64 {
    let (all, cached) = (runs.iter().map(|run| u64::from(run.blocks)).sum(), pool.find(runs, u64::MAX));
    pool.take(&cached, held);
    let mut end = cached.end.blocks;
    while end < all {
        let blocks = chunk.min(all - end);
        assert_eq!(pool.allocate(blocks, held), blocks);
        end += blocks;
        pool.register(runs, end, held, Adds::Computed);
    }
    pool.check([&*held].into_iter());
    cached.end.blocks
}

fn serve(pool: &mut BlockPool, runs: &[BlockRun], chunk: u64) -> u64 {
    let mut held = Held::default();
    let had = compute(pool, runs, chunk, &mut held);
    pool.release(&mut held);
    pool.check(std::iter::empty());
    had
}

fn evicted(pool: &mut BlockPool) -> Vec<(u64, u64)> {
    pool.journal.take().iter().map(|note| (note.numbers[0], note.numbers[1])).collect()
}

#[test]
fn a_node_goes_as_a_whole_and_its_first_block_is_told_first() {
    let mut pool = BlockPool::of_nodes(8, Journal::new(true));
    let old = prompt(6, 0, 0);
    serve(&mut pool, &old, 4);
    serve(&mut pool, &prompt(0, 2, 3), 8);
    // The second chunk goes first: nothing hangs on it. Two free blocks and one of its two were enough.
    assert_eq!(evicted(&mut pool), [(old[0].key, 4), (old[0].key, 5)]);
    assert_eq!(pool.find(&old, u64::MAX).end.blocks, 4);
    serve(&mut pool, &prompt(0, 3, 2), 8);
    assert_eq!(evicted(&mut pool), (0..4).map(|number| (old[0].key, number)).collect::<Vec<_>>());
}

#[test]
fn a_prefix_cuts_a_node_and_its_rest_is_used_too() {
    let mut pool = BlockPool::of_nodes(10, Journal::new(true));
    let (old, branch) = (prompt(5, 0, 0), prompt(2, 7, 1));
    serve(&mut pool, &old, 8);
    serve(&mut pool, &prompt(0, 2, 3), 8);
    assert_eq!(serve(&mut pool, &branch, 8), 2);
    // One is free. The other stream is older than the rest of the cut node, which is older than the branch.
    serve(&mut pool, &prompt(0, 3, 2), 8);
    assert_eq!(evicted(&mut pool).len(), 3);
    serve(&mut pool, &prompt(0, 4, 3), 8);
    assert_eq!(evicted(&mut pool), (2..5).map(|number| (old[0].key, number)).collect::<Vec<_>>());
    assert_eq!(pool.find(&branch, u64::MAX).end.blocks, 3);
}

#[test]
fn a_block_that_is_there_already_is_not_kept_twice() {
    let mut pool = BlockPool::of_nodes(8, Journal::new(true));
    let runs = prompt(4, 0, 0);
    serve(&mut pool, &runs, 8);
    // A prompt of whole blocks computes its last one again.
    let mut held = Held::default();
    pool.take(&pool.find(&runs, 3), &mut held);
    pool.allocate(1, &mut held);
    pool.register(&runs, 4, &mut held, Adds::Computed);
    pool.check([&held].into_iter());
    assert_eq!((pool.free(), held.len()), (4, 4));
    pool.release(&mut held);
    serve(&mut pool, &prompt(0, 2, 4), 8);
    assert_eq!(evicted(&mut pool), []);
    assert_eq!(pool.find(&runs, u64::MAX).end.blocks, 4);
}

#[test]
fn a_reply_is_one_node() {
    let mut pool = BlockPool::of_nodes(6, Journal::new(true));
    let (runs, mut held) = (prompt(2, 9, 3), Held::default());
    for end in [2, 5] {
        pool.allocate(end - held.len(), &mut held);
        pool.register(&runs, end, &mut held, Adds::Computed);
    }
    pool.release(&mut held);
    serve(&mut pool, &prompt(0, 3, 2), 8);
    assert_eq!(evicted(&mut pool).len(), 3);
    assert_eq!(pool.find(&runs, u64::MAX).end.blocks, 2);
}

#[test]
fn what_is_loaded_comes_back_as_the_nodes_that_it_was() {
    let mut pool = BlockPool::of_nodes(6, Journal::new(true));
    let (runs, mut held) = (prompt(6, 0, 0), Held::default());
    serve(&mut pool, &runs, 2);
    serve(&mut pool, &prompt(0, 2, 6), 8);
    pool.allocate(6, &mut held);
    pool.register(&runs, 6, &mut held, Adds::Loaded);
    pool.release(&mut held);
    evicted(&mut pool);
    serve(&mut pool, &prompt(0, 3, 1), 8);
    assert_eq!(evicted(&mut pool), [(runs[0].key, 4), (runs[0].key, 5)]);
}

/// How many of a prompt's four blocks go as one, which a request has made findable so.
fn first_to_go(pool: &mut BlockPool, runs: &[BlockRun], adds: Adds) -> usize {
    let mut held = Held::default();
    pool.allocate(4, &mut held);
    pool.register(runs, 4, &mut held, adds);
    pool.release(&mut held);
    serve(pool, &prompt(0, 2, 3), 8);
    evicted(pool).len()
}

#[test]
fn a_match_cuts_what_the_host_holds_until_the_host_has_it_anew() {
    let (runs, pool) = (prompt(4, 0, 0), || BlockPool::of_nodes(6, Journal::new(true)));
    for adds in [Adds::Loaded, Adds::Fetched] {
        let mut cut = pool();
        cut.cut_on_host(&runs, 1);
        assert_eq!(first_to_go(&mut cut, &runs, adds), 2, "{adds:?}");
        let mut anew = pool();
        anew.cut_on_host(&runs, 1);
        anew.read_into_host(&runs, 0..4);
        assert_eq!(first_to_go(&mut anew, &runs, adds), 4, "{adds:?}");
    }
    // What a request computes, the host has lost.
    let mut computed = pool();
    computed.cut_on_host(&runs, 1);
    assert_eq!(first_to_go(&mut computed, &runs, Adds::Computed), 4);
}

#[test]
fn a_node_has_the_place_of_its_last_use() {
    let mut pool = BlockPool::of_nodes(8, Journal::new(true));
    let (old, mut held) = (prompt(3, 0, 0), Held::default());
    compute(&mut pool, &old, 8, &mut held);
    let (newer, mut other) = (prompt(0, 2, 4), Held::default());
    pool.allocate(4, &mut other);
    pool.register(&newer, 4, &mut other, Adds::Computed);
    pool.release(&mut other);
    // It is released after the newer one, and was used before it.
    pool.release(&mut held);
    serve(&mut pool, &prompt(0, 3, 2), 8);
    assert_eq!(evicted(&mut pool), (0..3).map(|number| (old[0].key, number)).collect::<Vec<_>>());
}

#[test]
fn requests_that_compute_the_same_keep_one_of_it() {
    let mut pool = BlockPool::of_nodes(12, Journal::new(true));
    let (short, long) = (prompt(3, 0, 0), prompt(3, 7, 2));
    let mut helds = [Held::default(), Held::default()];
    for (held, runs) in helds.iter_mut().zip([&short, &long]) {
        pool.allocate(runs.iter().map(|run| u64::from(run.blocks)).sum(), held);
    }
    pool.register(&long, 5, &mut helds[1], Adds::Computed);
    pool.register(&short, 3, &mut helds[0], Adds::Computed);
    pool.check(helds.iter());
    assert_eq!(pool.free(), 7);
    helds.iter_mut().rev().for_each(|held| pool.release(held));
    // The shorter one has cut the longer one's node in two.
    serve(&mut pool, &prompt(0, 2, 8), 8);
    assert_eq!(evicted(&mut pool).len(), 2);
    assert_eq!(pool.find(&long, u64::MAX).end.blocks, 3);
}
