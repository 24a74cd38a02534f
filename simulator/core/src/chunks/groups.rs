//! How many extents begin in each group of chunks: a filter in front of the index.

use crate::keys::Key;

/// Chunks of a prompt in a group. A row has whole groups.
pub const GROUP: usize = 8;

/// How many extents begin in each group. The key of a group's first chunk names it; groups may share a count. One or
/// two looks tell that a level lacks a row of chunks, as it lacks most of a prompt that a request stores. A count that
/// has come to its limit stays there. Empty: nothing is counted.
#[derive(Debug, Default)]
pub struct GroupCounts(Vec<u8>);

impl GroupCounts {
    /// The group of the chunk of that number.
    pub fn group_of(prompt: &[Key], number: usize) -> u32 {
        (prompt[number - number % GROUP] >> 24) as u32
    }

    /// Counts these groups, in at least `places` counts.
    pub fn of(places: usize, groups: impl Iterator<Item = u32>) -> Self {
        let mut counts = Self(vec![0; places.next_power_of_two()]);
        groups.for_each(|group| counts.add(group));
        counts
    }

    /// The number of counts.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn clear(&mut self) {
        self.0.fill(0);
    }

    fn place(&self, group: u32) -> usize {
        group as usize & self.0.len().wrapping_sub(1)
    }

    /// No extent begins with a chunk of that group. False: one may.
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
