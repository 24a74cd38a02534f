//! Which instance acts next: a tournament tree of the instances' next events.

use std::hint::select_unpredictable;

use crate::time::{FOREVER, Ticks};

/// The moment of each instance's next event. Setting one replays a match in each round.
pub struct NextEvents {
    /// The winner of each match, with its moment: the final at 1, then the two semi-finals, and so on. The last half are
    /// the instances themselves.
    winners: Vec<(Ticks, usize)>,
    places: usize,
}

impl NextEvents {
    /// No instance has an event.
    pub fn new(instances: usize) -> Self {
        let places = instances.next_power_of_two();
        let mut events = Self { winners: vec![(FOREVER, 0); 2 * places], places };
        (0..places).for_each(|instance| events.set(instance, FOREVER));
        events
    }

    pub fn set(&mut self, instance: usize, at: Ticks) {
        let (mut place, mut winner) = (self.places + instance, (at, instance));
        while place > 1 {
            self.winners[place] = winner;
            // Among equals the lowest number wins. No branch here: the processor would often guess wrong.
            let other = self.winners[place ^ 1];
            let wins = (other.0 < winner.0) | ((other.0 == winner.0) & (other.1 < winner.1));
            winner.0 = select_unpredictable(wins, other.0, winner.0);
            winner.1 = select_unpredictable(wins, other.1, winner.1);
            place /= 2;
        }
        self.winners[1] = winner;
    }

    pub fn at(&self, instance: usize) -> Ticks {
        self.winners[self.places + instance].0
    }

    /// The instance acts at `at`, too.
    pub fn bring_forward(&mut self, instance: usize, at: Ticks) {
        if at < self.at(instance) {
            self.set(instance, at);
        }
    }

    /// The first moment, and the instance of the lowest number that acts then.
    pub fn first(&self) -> (Ticks, usize) {
        self.winners[1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_moment_wins_and_the_lowest_number_among_equals() {
        for instances in [1, 2, 5, 8] {
            let mut events = NextEvents::new(instances);
            assert_eq!(events.first(), (FOREVER, 0));
            events.set(instances - 1, 7);
            assert_eq!(events.first(), (7, instances - 1));
            events.bring_forward(instances / 2, 9);
            assert_eq!(events.first(), (7, instances - 1));
            (0..instances).for_each(|instance| events.set(instance, 5));
            assert_eq!(events.first(), (5, 0));
            events.set(0, 6);
            assert_eq!(events.first(), if instances == 1 { (6, 0) } else { (5, 1) });
        }
    }
}
