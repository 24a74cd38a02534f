//! Prefetching of memory into the processor's caches.

/// Has the processor fetch the cache line at an address while other work goes on. It reads nothing.
#[inline(always)]
pub fn fetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is allowed.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// As `fetch`, of all lines of a slice.
#[inline(always)]
pub fn fetch_all<T>(slice: &[T]) {
    const LINE: usize = 64;
    let bytes = size_of_val(slice);
    (0..bytes).step_by(LINE).for_each(|offset| fetch(slice.as_ptr().cast::<u8>().wrapping_add(offset)));
}
