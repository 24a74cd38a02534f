//! Eviction by the clock: at each tick, a level that is filled beyond its watermark drops a share of its chunks.

use super::config::{TickConfig, TickShare};
use crate::cache::Cache;
use crate::keys::Key;
use crate::time::{self, FOREVER, Ticks};

#[derive(Debug)]
pub struct Ticker {
    every: Ticks,
    watermark: f64,
    ratio: f64,
    share: TickShare,
    /// The number of the next tick, and when it is due; FOREVER: there are no ticks.
    next: u128,
    pub due: Ticks,
    /// A write found no room since the last eviction.
    pub short_of_room: bool,
}

impl Ticker {
    /// None: the clock evicts nothing.
    pub fn new(config: Option<&TickConfig>) -> Self {
        let every = config.map_or(0, |config| time::from_s(config.tick_s));
        let (watermark, ratio) = config.map_or((1.0, 0.0), |config| (config.watermark, config.evict_ratio));
        let share = config.map_or(TickShare::Ratio, |config| config.tick_share);
        let due = if every > 0 { every } else { FOREVER };
        Self { every, watermark, ratio, share, next: 1, due, short_of_room: false }
    }

    /// Runs the ticks that are due. Use changes only at events, so ticks between two events can wait for the later one.
    /// Returns how many there were, and the keys that went, with the moment of the tick. `falls`: they begin writes, so
    /// that a tick that drops some is the last one.
    pub fn run(&mut self, now: Ticks, cache: &mut Cache, falls: bool) -> (u64, Vec<(Ticks, Vec<Key>)>) {
        let mut dropped = Vec::new();
        let ticks = self.run_with(now, cache, |cache, at, share| {
            let went = cache.drop_some(share);
            dropped.push((at, cache.take_gone().collect()));
            (went, falls && went > 0)
        });
        (ticks, dropped)
    }

    /// `drops` is to drop so many chunks at a tick's moment, and returns how many went, and whether transfers begin: these
    /// may end before the next tick, which is left for later.
    #[inline(never)]
    pub fn run_with(
        &mut self,
        now: Ticks,
        cache: &mut Cache,
        drops: impl FnMut(&mut Cache, Ticks, u64) -> (u64, bool),
    ) -> u64 {
        let first = self.next;
        // Mostly one tick is due, and such divisions are slow.
        let last = if now - self.due < self.every { first } else { now / self.every };
        let last = self.drop_until(last, cache, drops);
        self.next = last + 1;
        self.due = self.next.saturating_mul(self.every);
        (last - first + 1) as u64
    }

    /// The last tick that has passed.
    fn drop_until(
        &mut self,
        last: u128,
        cache: &mut Cache,
        mut drops: impl FnMut(&mut Cache, Ticks, u64) -> (u64, bool),
    ) -> u128 {
        let mut tick = self.next;
        while tick <= last {
            cache.clock(tick * self.every);
            let share = self.share(cache);
            if share == 0 {
                break;
            }
            let (went, begins) = drops(cache, tick * self.every, share);
            self.short_of_room &= went == 0;
            if begins {
                return tick;
            }
            tick += 1;
            if went == 0 {
                // A level that can drop nothing stays so until the next event, or until a lease runs out.
                let Some(change) = cache.next_change() else { break };
                tick = tick.max(change.div_ceil(self.every));
            }
        }
        last
    }

    /// How many chunks the next tick drops.
    fn share(&self, cache: &Cache) -> u64 {
        let usage = cache.usage();
        match self.share {
            TickShare::Ratio if usage >= self.watermark => {
                ((self.ratio * cache.tracked() as f64) as u64).max(1)
            }
            TickShare::Surplus if usage > self.watermark || self.short_of_room => {
                let ratio = self.ratio.max(usage - self.watermark + self.ratio);
                (ratio * cache.resident() as f64).ceil() as u64
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunks::NEW;
    use crate::chunks::spans::Span;
    use crate::eviction::kind::EvictionKind;
    use crate::keys::ChunkRange;

    #[test]
    fn a_tick_whose_chunks_fall_is_the_last_one_before_what_they_begin_may_end() {
        let share = TickShare::Ratio;
        let config = TickConfig { tick_s: 1.0, watermark: 0.5, evict_ratio: 0.1, tick_share: share };
        for (falls, ticks, next_s) in [(false, 3, 4.0), (true, 1, 2.0)] {
            let mut cache = Cache::new(10, EvictionKind::Lru, 0, true, true);
            let mut marks = vec![Span::new(NEW, 1); 10];
            assert!(cache.reserve(&ChunkRange::of((0..10).collect::<Vec<_>>()), &mut marks, true, false));
            cache.admit_stored(&mut marks);
            let mut ticker = Ticker::new(Some(&config));
            let (passed, dropped) = ticker.run(time::from_s(3.5), &mut cache, falls);
            assert_eq!((passed, dropped.len() as u64, ticker.due), (ticks, ticks, time::from_s(next_s)));
        }
    }
}
