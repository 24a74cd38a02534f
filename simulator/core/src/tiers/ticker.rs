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
    /// Returns how many there were, and the keys that went, with the moment of the tick.
    pub fn run(&mut self, now: Ticks, cache: &mut Cache) -> (u64, Vec<(Ticks, Vec<Key>)>) {
        let mut dropped = Vec::new();
        let ticks = self.run_with(now, cache, |cache, at, share| {
            let went = cache.drop_some(share);
            dropped.push((at, cache.take_gone().collect()));
            went
        });
        (ticks, dropped)
    }

    /// `drops` is to drop so many chunks at a tick's moment, and returns how many went.
    #[inline(never)]
    pub fn run_with(
        &mut self,
        now: Ticks,
        cache: &mut Cache,
        drops: impl FnMut(&mut Cache, Ticks, u64) -> u64,
    ) -> u64 {
        let first = self.next;
        // Mostly one tick is due, and such divisions are slow.
        let last = if now - self.due < self.every { first } else { now / self.every };
        self.drop_until(last, cache, drops);
        self.next = last + 1;
        self.due = self.next.saturating_mul(self.every);
        (last - first + 1) as u64
    }

    fn drop_until(
        &mut self,
        last: u128,
        cache: &mut Cache,
        mut drops: impl FnMut(&mut Cache, Ticks, u64) -> u64,
    ) {
        let mut tick = self.next;
        while tick <= last {
            cache.clock(tick * self.every);
            let share = self.share(cache);
            if share == 0 {
                break;
            }
            let went = drops(cache, tick * self.every, share);
            self.short_of_room &= went == 0;
            tick += 1;
            if went == 0 {
                // A level that can drop nothing stays so until the next event, or until a lease runs out.
                let Some(change) = cache.next_change() else { break };
                tick = tick.max(change.div_ceil(self.every));
            }
        }
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
