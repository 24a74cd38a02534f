//! Aligned memory for O_DIRECT, filled with bytes that compress badly and carry their chunk's key.
//!
//! A chunk's content: every 4 KiB block is pseudo-random by its position in the chunk, and begins with a stamp of 16
//! bytes: the chunk's key and the block's offset. So no two blocks on a device are equal, a block compresses by less
//! than a hundredth, and `verify` recognizes a wrong chunk or a wrong part of it.

use std::io;
use std::ptr::{self, NonNull};

pub const BLOCK: usize = 4096;
const STAMP: usize = 16;
const HUGE: usize = 2 << 20;

/// Zeroed memory, aligned to its pages.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: this value alone owns the memory. Users of the pointer keep Store's rule: one side at a time touches a
// frame's buffer, and no operation writes a slot that another store reads.
unsafe impl Send for Buffer {}
unsafe impl Sync for Buffer {}

impl Buffer {
    /// huge: with huge pages where the kernel has some; an 8 MiB transfer then pins 4 of them, not 2,048.
    pub fn new(len: usize, huge: bool) -> io::Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // Stores rarely fill a deep queue of large chunks.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // Whole huge pages and one more; the parts before the first whole page and behind the last one are unmapped.
        let page = if huge { HUGE } else { BLOCK };
        let len = len.checked_next_multiple_of(page).ok_or(io::ErrorKind::OutOfMemory)?;
        let mapped = if huge { len.checked_add(HUGE).ok_or(io::ErrorKind::OutOfMemory)? } else { len };
        // SAFETY: a fresh anonymous mapping; its result is checked.
        let found = unsafe { libc::mmap(ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if found == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = (found as usize).next_multiple_of(page) - found as usize;
        // SAFETY: `before` bytes, `len` and what is left are the mapping above, whole pages each; the advice may be
        // refused.
        let start = unsafe {
            let start = found.byte_add(before);
            for (at, bytes) in [(found, before), (start.byte_add(len), mapped - before - len)] {
                if bytes > 0 {
                    libc::munmap(at, bytes);
                }
            }
            libc::madvise(start, len, if huge { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE });
            start
        };
        let start = NonNull::new(start.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Self { start, len })
    }

    pub fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.len);
        // SAFETY: inside the mapping.
        unsafe { self.start.as_ptr().add(offset) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is len bytes long and initialized (zeroed by the kernel).
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// Memory for transfers of equal size, side by side: small ones share huge pages.
pub struct Places {
    memory: Buffer,
    each: usize,
    patterned: bool,
    used: Vec<bool>,
}

impl Places {
    /// patterned: each place gets the pattern; `stamp` makes it a chunk's content. each: whole blocks.
    pub fn new(count: usize, each: usize, huge: bool, patterned: bool) -> io::Result<Self> {
        let len = count.checked_mul(each).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory: Buffer::new(len, huge)?, each, patterned, used: vec![false; count] })
    }

    pub fn at(&self, index: usize, offset: usize) -> *mut u8 {
        self.memory.at(index * self.each + offset)
    }

    pub fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        assert!(index < self.used.len());
        // SAFETY: inside the mapping, initialized, and of this place alone: other places may be in flight.
        let place = unsafe { std::slice::from_raw_parts_mut(self.at(index, 0), self.each) };
        if self.patterned && !std::mem::replace(&mut self.used[index], true) {
            place.chunks_mut(BLOCK).enumerate().for_each(|(block, bytes)| fill(bytes, block));
        }
        place
    }
}

/// Makes a patterned buffer the content of chunk `key`.
pub fn stamp(bytes: &mut [u8], key: u64) {
    for (index, block) in bytes.chunks_mut(BLOCK).enumerate() {
        block[..8].copy_from_slice(&key.to_le_bytes());
        block[8..STAMP].copy_from_slice(&((index * BLOCK) as u64).to_le_bytes());
    }
}

/// Why the bytes are not the content of chunk `key`; None: they are.
pub fn wrong(bytes: &[u8], key: u64) -> Option<String> {
    let mut expected = [0; BLOCK];
    for (index, block) in bytes.chunks(BLOCK).enumerate() {
        fill(&mut expected, index);
        stamp(&mut expected, key);
        expected[8..STAMP].copy_from_slice(&((index * BLOCK) as u64).to_le_bytes());
        if block != &expected[..block.len()] {
            return Some(format!(
                "content differs from what was written, first in the block at {}",
                index * BLOCK
            ));
        }
    }
    None
}

/// The pattern of the block of that number: SplitMix64 of the position.
fn fill(block: &mut [u8], index: usize) {
    let mut state = index as u64 * BLOCK as u64;
    for word in block.chunks_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word.copy_from_slice(&(z ^ (z >> 31)).to_le_bytes()[..word.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_tells_chunks_and_places_apart() {
        let mut places = Places::new(3, 4 * BLOCK, true, true).unwrap();
        for index in 0..3 {
            let bytes = places.bytes_mut(index);
            stamp(bytes, 7);
            assert_eq!(wrong(bytes, 7), None);
            assert!(wrong(bytes, 8).is_some());
            assert!(wrong(&bytes[BLOCK..], 7).is_some());
            bytes[3 * BLOCK + 99] ^= 1;
            assert!(wrong(bytes, 7).is_some_and(|text| text.ends_with("12288")));
        }
        assert_eq!(places.at(0, 0) as usize % HUGE, 0);
        assert_eq!(places.at(2, 5) as usize, places.at(0, 0) as usize + 8 * BLOCK + 5);
    }
}
