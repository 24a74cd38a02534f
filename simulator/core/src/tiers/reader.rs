//! The device of reads from a lower level: one that all share alike, a pool of workers, or a remote one.

use super::device::{DeviceConfig, SharedDevice};
use super::remote::RemoteDevice;
use super::workers::WorkerPool;
use crate::time::Ticks;

/// What reads go through: a device that all share as one, one behind several workers, or a remote one.
#[derive(Clone, Debug)]
pub enum Reader {
    Near(SharedDevice),
    Pool(WorkerPool),
    Remote(RemoteDevice),
}

impl Reader {
    pub fn new(config: &DeviceConfig) -> Self {
        match config.link {
            None if config.depth > 1 => Self::Pool(WorkerPool::new(config)),
            None => Self::Near(SharedDevice::new(config)),
            Some(_) => Self::Remote(RemoteDevice::new(config)),
        }
    }

    /// Takes a client's transfer in. Returns its number and when it ends unless others join it; the caller asks `ended`
    /// then.
    pub fn submit(&mut self, now: Ticks, client: usize, chunks: u64, bytes: u64) -> (u64, Ticks) {
        match self {
            Self::Near(device) => device.submit(now, chunks, bytes),
            Self::Pool(device) => device.submit(now, chunks, bytes),
            Self::Remote(device) => device.submit(now, client, chunks, bytes),
        }
    }

    /// Ok: the transfer has ended, and the device forgets it. Err: when it will end unless others join it.
    pub fn ended(&mut self, now: Ticks, id: u64) -> Result<(), Ticks> {
        match self {
            Self::Near(device) => device.ended(now, id),
            Self::Pool(device) => device.ended(now, id),
            Self::Remote(device) => device.ended(now, id),
        }
    }
}
