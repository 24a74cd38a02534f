//! The most that any cache of a size could serve: Belady's rule, for prompts whose tokens hit only behind their prefix.
//!
//! When room lacks, the cache gives up what is used again last, and takes nothing that is used again later than all that
//! it holds. The tokens of a prefix are used again no later than those behind them, so the rule never breaks a prefix,
//! and it is the best rule there is for tokens of one size (Belady 1966, Mattson et al. 1970).
//!
//! Tokens that all prompts use together are one node; the cache may hold the first of a node's tokens only.

use std::collections::BinaryHeap;

use hashbrown::HashMap;

use crate::keys::Segment;

const NEVER: u32 = u32::MAX;
const ROOT: u32 = 0;

/// Tokens that prompts use together, behind those of the parent.
struct Node {
    parent: u32,
    tokens: u64,
    /// How many of them the cache holds, the first ones.
    held: u64,
    /// Nodes right behind this one of which the cache holds tokens.
    held_children: u32,
    /// The next prompt that uses the node.
    next_use: u32,
}

/// For each prompt, how many of its first tokens the best cache of `capacity` tokens holds when the prompt comes.
/// The cache begins empty, knows all prompts beforehand, and may take any token of a prompt that has come.
pub fn most_hits<'a>(prompts: impl Iterator<Item = &'a [Segment]> + Clone, capacity: u64) -> Vec<u64> {
    let (nodes, paths, ends) = build(prompts);
    let next_uses = next_uses(&paths, &ends, nodes.len());
    let mut cache = Best { nodes, room: capacity, leaves: BinaryHeap::new() };
    let mut begin = 0;
    let take = |&end: &usize| {
        let path = &paths[begin..end];
        let hits = cache.hits(path);
        cache.take(path, &next_uses[begin..end]);
        begin = end;
        hits
    };
    ends.iter().map(take).collect()
}

/// All nodes, the root first; the nodes of all prompts, one prompt's after the other's; where each prompt's nodes end.
fn build<'a>(prompts: impl Iterator<Item = &'a [Segment]> + Clone) -> (Vec<Node>, Vec<u32>, Vec<usize>) {
    // A stream is what a hash id names behind a prefix; a prefix is a stream up to a cut: the end of some segment.
    let mut streams: HashMap<(u32, i64), u32> = HashMap::new();
    let mut cuts: Vec<Vec<u64>> = Vec::new();
    let mut prefixes: HashMap<(u32, u64), u32> = HashMap::new();
    let mut walked: Vec<(u32, u64)> = Vec::new();
    for prompt in prompts.clone() {
        let mut prefix = ROOT;
        for segment in prompt {
            let fresh = streams.len() as u32;
            let stream = *streams.entry((prefix, segment.hash_id)).or_insert(fresh);
            if stream == fresh {
                cuts.push(Vec::new());
            }
            let fresh = prefixes.len() as u32 + 1;
            prefix = *prefixes.entry((stream, segment.tokens)).or_insert(fresh);
            if prefix == fresh {
                cuts[stream as usize].push(segment.tokens);
            }
            walked.push((stream, segment.tokens));
        }
    }
    cuts.iter_mut().for_each(|tokens| tokens.sort_unstable());
    let mut first_nodes: Vec<u32> = vec![0; cuts.len()];
    let mut nodes = vec![Node { parent: ROOT, tokens: 0, held: 0, held_children: 0, next_use: NEVER }];
    let (mut paths, mut ends, mut walk) = (Vec::new(), Vec::new(), walked.into_iter());
    for prompt in prompts {
        let mut parent = ROOT;
        for (stream, tokens) in walk.by_ref().take(prompt.len()) {
            let stream = stream as usize;
            if first_nodes[stream] == ROOT {
                first_nodes[stream] = nodes.len() as u32;
                let (mut above, mut before) = (parent, 0);
                for &cut in &cuts[stream] {
                    nodes.push(Node {
                        parent: above,
                        tokens: cut - before,
                        held: 0,
                        held_children: 0,
                        next_use: NEVER,
                    });
                    (above, before) = (nodes.len() as u32 - 1, cut);
                }
            }
            for (number, _) in cuts[stream].iter().take_while(|&&cut| cut <= tokens).enumerate() {
                parent = first_nodes[stream] + number as u32;
                paths.push(parent);
            }
        }
        ends.push(paths.len());
    }
    (nodes, paths, ends)
}

/// For each use of a node, the next prompt that uses it.
fn next_uses(paths: &[u32], ends: &[usize], nodes: usize) -> Vec<u32> {
    let mut coming = vec![NEVER; nodes];
    let mut found = vec![NEVER; paths.len()];
    for (prompt, &end) in ends.iter().enumerate().rev() {
        let begin = if prompt == 0 { 0 } else { ends[prompt - 1] };
        for at in begin..end {
            found[at] = std::mem::replace(&mut coming[paths[at] as usize], prompt as u32);
        }
    }
    found
}

struct Best {
    nodes: Vec<Node>,
    room: u64,
    /// Held nodes with none held behind them, by their next use; and entries that no longer hold.
    leaves: BinaryHeap<(u32, u32)>,
}

impl Best {
    fn hits(&self, path: &[u32]) -> u64 {
        let mut hits = 0;
        for &at in path {
            let node = &self.nodes[at as usize];
            hits += node.held;
            if node.held < node.tokens {
                break;
            }
        }
        hits
    }

    fn take(&mut self, path: &[u32], next_uses: &[u32]) {
        for (&at, &next_use) in path.iter().zip(next_uses) {
            self.nodes[at as usize].next_use = next_use;
        }
        // What is never used again goes, the end of the prompt first.
        let used_again = next_uses.iter().take_while(|&&next_use| next_use != NEVER).count();
        for &at in path[used_again..].iter().rev() {
            self.give_up(at, u64::MAX);
        }
        for &at in &path[..used_again] {
            if !self.fill(at) {
                break;
            }
        }
        let last = path[..used_again].iter().rev().find(|&&at| self.nodes[at as usize].held > 0);
        if let Some(&at) = last {
            self.enter(at);
        }
    }

    /// Takes what the cache lacks of a node, in place of what is used again later. False: not all of it.
    fn fill(&mut self, at: u32) -> bool {
        loop {
            let Node { parent, tokens, held, next_use, .. } = self.nodes[at as usize];
            let more = (tokens - held).min(self.room);
            if more > 0 {
                if held == 0 {
                    self.nodes[parent as usize].held_children += 1;
                }
                self.nodes[at as usize].held += more;
                self.room -= more;
            }
            let lacks = tokens - held - more;
            if lacks == 0 {
                return true;
            }
            let Some(victim) = self.last_used_after(next_use) else { return false };
            self.give_up(victim, lacks);
            self.enter(victim);
        }
    }

    /// Takes the leaf that is used again last out of the heap, if that is after the given prompt.
    fn last_used_after(&mut self, prompt: u32) -> Option<u32> {
        while let Some(&(next_use, at)) = self.leaves.peek() {
            let node = &self.nodes[at as usize];
            let holds = node.held > 0 && node.held_children == 0 && node.next_use == next_use;
            if holds && next_use <= prompt {
                return None;
            }
            self.leaves.pop();
            if holds {
                return Some(at);
            }
        }
        None
    }

    /// Gives up a leaf's last tokens, `most` at most.
    fn give_up(&mut self, at: u32, most: u64) {
        let node = &mut self.nodes[at as usize];
        let gone = node.held.min(most);
        node.held -= gone;
        self.room += gone;
        if gone > 0 && node.held == 0 {
            let parent = node.parent;
            self.nodes[parent as usize].held_children -= 1;
            self.enter(parent);
        }
    }

    /// Puts a node into the heap, if it is a leaf.
    fn enter(&mut self, at: u32) {
        let node = &self.nodes[at as usize];
        if at != ROOT && node.held > 0 && node.held_children == 0 {
            self.leaves.push((node.next_use, at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hits(prompts: &[Vec<(i64, u64)>], capacity: u64) -> Vec<u64> {
        let named = |&(hash_id, tokens): &(i64, u64)| Segment { hash_id, tokens };
        let prompts: Vec<Vec<Segment>> =
            prompts.iter().map(|prompt| prompt.iter().map(named).collect()).collect();
        most_hits(prompts.iter().map(Vec::as_slice), capacity)
    }

    /// The best of all choices, token by token: which of the tokens that have come the cache keeps after each prompt.
    fn best(prompts: &[Vec<u64>], held: &[u64], capacity: usize) -> u64 {
        let Some((prompt, rest)) = prompts.split_first() else { return 0 };
        let found = prompt.iter().take_while(|token| held.contains(token)).count() as u64;
        let mut known: Vec<u64> = held.iter().chain(prompt).copied().collect();
        known.sort_unstable();
        known.dedup();
        let kept = (0u32..1 << known.len()).filter(|set| set.count_ones() as usize <= capacity);
        let chosen = |set: u32| {
            known.iter().enumerate().filter(move |(at, _)| set >> at & 1 == 1).map(|(_, one)| *one)
        };
        found + kept.map(|set| best(rest, &chosen(set).collect::<Vec<_>>(), capacity)).max().unwrap_or(0)
    }

    /// A token's name: the whole prompt up to it.
    fn tokens(prompt: &[(i64, u64)]) -> Vec<u64> {
        let streams = prompt.iter().flat_map(|&(hash_id, tokens)| (0..tokens).map(move |at| (hash_id, at)));
        let mut name = 1;
        streams
            .map(|(hash_id, at)| {
                name = name * 31 + hash_id as u64 * 5 + at;
                name
            })
            .collect()
    }

    #[test]
    fn what_is_used_again_last_goes_first() {
        let prompts = [vec![(1, 4)], vec![(2, 4)], vec![(3, 4)], vec![(1, 4)], vec![(2, 4)]];
        assert_eq!(hits(&prompts, 8), [0, 0, 0, 4, 4]);
        assert_eq!(hits(&prompts, 6), [0, 0, 0, 4, 2]);
        assert_eq!(hits(&prompts, 4), [0, 0, 0, 4, 0]);
        assert_eq!(hits(&prompts, 0), [0; 5]);
    }

    #[test]
    fn a_stream_s_beginning_hits_and_what_follows_a_missing_token_does_not() {
        let prompts = [vec![(1, 5), (2, 3)], vec![(1, 3), (2, 3)], vec![(1, 9)], vec![(1, 5), (2, 3)]];
        assert_eq!(hits(&prompts, u64::MAX), [0, 3, 5, 8]);
        assert_eq!(hits(&prompts, 5), [0, 3, 5, 5]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]
        #[test]
        fn no_choice_is_better(
            prompts in prop::collection::vec(prop::collection::vec((0..2i64, 1..3u64), 1..3), 1..5),
            capacity in 0..5usize,
        ) {
            let all: Vec<Vec<u64>> = prompts.iter().map(|prompt| tokens(prompt)).collect();
            let sum: u64 = hits(&prompts, capacity as u64).iter().sum();
            prop_assert_eq!(sum, best(&all, &[], capacity));
        }
    }
}
