//! Modelled devices: one direction (reads or writes) of something that moves bytes.
//!
//! Bandwidth is shared first come, first served: a transfer's data moves at full speed after the data of those
//! submitted before it. Latency is waited out by each transfer beside the others. A device never sleeps; it says when
//! a transfer will have ended.

use crate::time::{self, Ticks};

#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct DeviceConfig {
    pub latency_s: f64,
    pub chunk_s: f64,
    pub byte_s: f64,
}

#[derive(Clone, Debug)]
pub struct Device {
    latency: Ticks,
    chunk: Ticks,
    byte: Ticks,
    busy_until: Ticks,
}

impl Device {
    pub fn new(config: &DeviceConfig) -> Self {
        Self {
            latency: time::from_s(config.latency_s),
            chunk: time::from_s(config.chunk_s),
            byte: time::from_s(config.byte_s),
            busy_until: 0,
        }
    }

    /// Takes a transfer in and returns when it ends.
    pub fn submit(&mut self, now: Ticks, chunks: u64, bytes: u64) -> Ticks {
        let start = (now + self.latency).max(self.busy_until);
        self.busy_until = start + self.chunk * u128::from(chunks) + self.byte * u128::from(bytes);
        self.busy_until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_queue_for_bandwidth_and_overlap_latency() {
        let config = DeviceConfig { latency_s: 1.0, chunk_s: 0.5, byte_s: 0.25 };
        let mut device = Device::new(&config);
        assert_eq!(time::to_s(device.submit(0, 2, 4)), 3.0);
        assert_eq!(time::to_s(device.submit(0, 1, 2)), 4.0);
        assert_eq!(time::to_s(device.submit(time::from_s(10.0), 0, 0)), 11.0);
    }
}
