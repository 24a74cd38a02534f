//! How many extents begin in each group of chunks: a filter in front of the index.

use crate::keys::Key;

/// Chunks of a prompt by so many, of which `GroupCounts` knows whether an extent begins with one of them. A row has whole
/// groups.
pub const GROUP: usize = 8;

/// How many extents begin in each group, which is named by its own first chunk's key; where groups share a place, in
/// all of theirs. So a look or two tell of a row of chunks that they lie nowhere, as most of a prompt do when they are
/// stored. A count that has come to its limit stays there. Empty: nothing is counted.
#[derive(Debug, Default)]
pub struct GroupCounts(Vec<u8>);

impl GroupCounts {
    /// The name of the group of the chunk of that number.
    pub fn group_of(prompt: &[Key], number: usize) -> u32 {
        (prompt[number - number % GROUP] >> 24) as u32
    }

    /// Counts these groups, in at least so many places.
    pub fn of(places: usize, groups: impl Iterator<Item = u32>) -> Self {
        let mut counts = Self(vec![0; places.next_power_of_two()]);
        groups.for_each(|group| counts.add(group));
        counts
    }

    /// How many places there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    fn place(&self, group: u32) -> usize {
        group as usize & self.0.len().wrapping_sub(1)
    }

    /// Surely no extent begins with a chunk of that group.
    pub fn is_empty(&self, group: u32) -> bool {
        self.0.get(self.place(group)) == Some(&0)
    }

    pub fn add(&mut self, group: u32) {
        let place = self.place(group);
        if let Some(count) = self.0.get_mut(place) {
            *count = count.saturating_add(1);
        }
    }

    pub fn remove(&mut self, group: u32) {
        let place = self.place(group);
        if let Some(count) = self.0.get_mut(place).filter(|count| **count < u8::MAX) {
            *count -= 1;
        }
    }
}
