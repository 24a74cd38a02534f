//! How the host's work varies: a task takes its mean time times a factor that a seed gives.

use crate::keys;
use crate::time::Ticks;

/// Factors in units of 2^-32. They are uniform around 1: the mean stays, and a seed gives the same ones everywhere.
const ONE: u64 = 1 << 32;

#[derive(Clone, Copy, Debug, Default)]
pub struct Jitter {
    /// The most that a factor differs from 1; 0: each task takes its mean time.
    reach: u64,
    next: u64,
}

impl Jitter {
    /// spread: the standard deviation of a task's time over its mean. Factors reach no further than from 0 to 2, so that
    /// more than 0.58 spreads no more.
    pub fn new(spread: f64, seed: u64) -> Self {
        // A uniform variable's standard deviation is half its width over √3.
        let reach = (spread * 3f64.sqrt()).min(1.0) * ONE as f64;
        Self { reach: reach as u64, next: keys::numbered(seed) }
    }

    /// When something happens this time in a span of twice that mean: at any moment of it alike.
    pub fn within(&mut self, mean: Ticks) -> Ticks {
        let mut whole = Self { reach: if self.reach == 0 { 0 } else { ONE }, next: self.next };
        let at = whole.of(mean);
        self.next = whole.next;
        at
    }

    /// What a task takes this time.
    pub fn of(&mut self, mean: Ticks) -> Ticks {
        if self.reach == 0 || mean == 0 {
            return mean;
        }
        self.next = self.next.wrapping_add(1);
        let draw = u128::from(keys::numbered(self.next) >> 32);
        let factor = u128::from(ONE - self.reach) + ((u128::from(2 * self.reach) * draw) >> 32);
        (mean >> 32).saturating_mul(factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time;

    #[test]
    fn factors_keep_the_mean_and_have_the_spread() {
        let mean = time::from_s(0.003);
        let mut jitter = Jitter::new(0.2, 7);
        let drawn: Vec<f64> = (0..20_000).map(|_| time::to_s(jitter.of(mean)) / 0.003).collect();
        let average = drawn.iter().sum::<f64>() / 20_000.0;
        let variance = drawn.iter().map(|x| (x - average).powi(2)).sum::<f64>() / 20_000.0;
        assert!((average - 1.0).abs() < 0.005 && (variance.sqrt() - 0.2).abs() < 0.005);
        let reach = 0.2 * 3f64.sqrt();
        assert!(drawn.iter().all(|x| (1.0 - reach..=1.0 + reach).contains(x)));
    }

    #[test]
    fn what_happens_within_a_span_may_come_at_any_moment_of_it() {
        let mean = time::from_s(0.003);
        assert_eq!(Jitter::new(0.0, 7).within(mean), mean);
        let mut jitter = Jitter::new(0.2, 7);
        let mut drawn: Vec<f64> = (0..20_000).map(|_| time::to_s(jitter.within(mean)) / 0.003).collect();
        drawn.sort_by(f64::total_cmp);
        assert!([0.25, 0.5, 0.75].iter().all(|q| (drawn[(20_000.0 * q) as usize] - 2.0 * q).abs() < 0.03));
        assert!(time::to_s(jitter.of(mean)) / 0.003 < 1.35, "other tasks vary as before");
    }

    #[test]
    fn a_seed_gives_the_same_factors_and_another_gives_others() {
        let drawn = |seed| {
            let mut jitter = Jitter::new(0.3, seed);
            [(); 5].map(|()| jitter.of(time::from_s(1.0)))
        };
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
    }

    #[test]
    fn without_a_spread_each_task_takes_its_mean_and_no_time_is_below_0() {
        let mean = time::from_s(0.1) + 1;
        assert_eq!(Jitter::new(0.0, 3).of(mean), mean);
        let mut widest = Jitter::new(9.0, 3);
        assert!((0..1000).all(|_| widest.of(mean) <= 2 * mean));
    }
}
