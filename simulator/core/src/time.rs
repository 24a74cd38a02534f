//! Virtual time in whole ticks of 2^-96 s.
//!
//! Integers make sums exact in any order: a macro-step of k decode steps ends at the same tick as k single steps. The
//! power of two makes the conversion from and to an f64 of seconds exact.

pub type Ticks = u128;

pub const FOREVER: Ticks = Ticks::MAX;

const TICKS_PER_S: f64 = (1u128 << 96) as f64;

/// Seconds to ticks; negative and NaN give 0, infinity gives FOREVER (about 136 years is the end of time).
pub fn from_s(seconds: f64) -> Ticks {
    if seconds == f64::INFINITY {
        return FOREVER;
    }
    (seconds * TICKS_PER_S) as Ticks
}

pub fn to_s(ticks: Ticks) -> f64 {
    ticks as f64 / TICKS_PER_S
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_survive_the_round_trip() {
        for seconds in [0.0, 1e-9, 0.1, 1.1, 3.3e-5, 12_345.678_9, 9e8] {
            assert_eq!(to_s(from_s(seconds)), seconds);
        }
        assert_eq!(from_s(f64::INFINITY), FOREVER);
    }
}
