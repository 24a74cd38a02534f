//! Who acts next: a tournament of the instances' next next_events.

use crate::time::{FOREVER, Ticks};

/// The next moment of each of a number of instances. Setting one takes a match on each round.
pub struct NextEvents {
    at: Vec<Ticks>,
    /// The winner of each match, the final first, then the next round's two, and so on. Winners of round `rounds`
    /// are the instances themselves.
    winners: Vec<usize>,
    places: usize,
}

impl NextEvents {
    /// None of them acts.
    pub fn new(instances: usize) -> Self {
        let places = instances.next_power_of_two();
        let mut next_events = Self { at: vec![FOREVER; places], winners: vec![0; 2 * places], places };
        (0..places).for_each(|instance| next_events.winners[places + instance] = instance);
        (0..places).for_each(|instance| next_events.set(instance, FOREVER));
        next_events
    }

    pub fn set(&mut self, instance: usize, at: Ticks) {
        self.at[instance] = at;
        let mut place = (self.places + instance) / 2;
        while place > 0 {
            let (left, right) = (self.winners[2 * place], self.winners[2 * place + 1]);
            self.winners[place] = if self.at[right] < self.at[left] { right } else { left };
            place /= 2;
        }
    }

    pub fn at(&self, instance: usize) -> Ticks {
        self.at[instance]
    }

    /// It acts at `at` too.
    pub fn bring_forward(&mut self, instance: usize, at: Ticks) {
        if at < self.at[instance] {
            self.set(instance, at);
        }
    }

    /// The first moment, and of the instances that act then the one of the lowest number.
    pub fn first(&self) -> (Ticks, usize) {
        let instance = self.winners[1];
        (self.at[instance], instance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_moment_wins_and_the_lowest_number_among_equals() {
        for instances in [1, 2, 5, 8] {
            let mut next_events = NextEvents::new(instances);
            assert_eq!(next_events.first(), (FOREVER, 0));
            next_events.set(instances - 1, 7);
            assert_eq!(next_events.first(), (7, instances - 1));
            next_events.bring_forward(instances / 2, 9);
            assert_eq!(next_events.first(), (7, instances - 1));
            (0..instances).for_each(|instance| next_events.set(instance, 5));
            assert_eq!(next_events.first(), (5, 0));
            next_events.set(0, 6);
            assert_eq!(next_events.first(), if instances == 1 { (6, 0) } else { (5, 1) });
        }
    }
}
