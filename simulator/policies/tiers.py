"""The rules of a cache server, as data."""

from __future__ import annotations

import msgspec

from simulator.policies.engines import Connector

NO_LIMIT = 1 << 32


class TierPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How a cache server fills and empties its tiers. It keeps whole chunks of prompts.

    The pack of the first tier, CPU memory, says how engine and tiers meet. A tier in memory below it empties itself by
    its own pack, and a storage tier by the disk's rules of the pack above it (`simulator/levels.py`). The core takes
    these fields from here (`core/src/tiers/config.rs`).

    eviction, disk_eviction: which chunk the CPU tier and the disk evict next: "lru", "fifo", "lfu", "s3-fifo", "arc",
        "lease", "sharded-lease" or "lmcache-arc" (LMCache's own, which differs from the paper's). They never evict a
        chunk that is read or written. A look-up uses the chunks that it finds. A store, and a load from below, bring
        chunks in, the prompt's last chunk first.
    lease_s: for "lease": a look-up keeps a chunk for so long; then the chunk goes first whose lease ran out first.
        "sharded-lease": a tick does so in each of 1,024 shards, for a share of its chunks.
    end_uses: a request's end uses its prompt's chunks once more, as in LMCache; otherwise a store uses those of its
        chunks that are there already.
    write_end_uses: a chunk comes into the order of eviction at the end of its write; otherwise at its beginning.
    placement: "copy": stores write to the CPU tier, which copies to disk. "waterfall": stores write to the CPU tier and
        evict there on demand, and evicted chunks move to disk. "spillover": stores write to the CPU tier while it is
        filled below the watermark, else to disk; nothing moves.
    partial_stores: a store without room for all of its chunks keeps the first ones; otherwise none.
    stores_replies: whole chunks with tokens of replies are stored, too, as soon as the GPU has their KV, or, where the
        engine inserts a reply when its request ends (prefills_first), then.
    evict_on_demand: a write that needs room evicts; otherwise only ticks do, and a write without room is given up.
    tick_s, watermark, evict_ratio, tick_share: when and how much ticks drop from the CPU tier. "ratio": at or above the
        watermark int(ratio x keys), at least one. "surplus": above the watermark, or after a store without room,
        ceil(max(ratio, usage - watermark + ratio) x keys).
    keep_prefetched: chunks read from disk stay in the CPU tier.
    read_in_place: chunks read from disk take no room in the CPU tier, and do not stay.
    connector: how the engine asks this cache server.
    counts_taken: its counters have what requests take from each tier beyond the GPU's and the tiers' above; otherwise
        all that look-ups find, as LMCache's.
    max_prefetches: requests that read from disk at a time, 65,534 at most; further ones wait.
    min_prefetch_tokens: the server does not read hits of fewer tokens from disk.
    prefetch_share: the server reads nothing more while it is reading into this share of the CPU tier; None: no limit.
    prefetch_timeout_s, prefetch_token_s: a read from disk ends after so long and so much more for each token, with the
        chunks that it has by then; None: when it has all. Of an engine that reads ahead: not before it asks.
    writes_use: a write that finds a chunk there uses it (below the first tier).
    disk_takes: "stores": each store goes on to the disk; "dropped": the disk gets what the tier above it drops;
        "offloaded": what that may drop goes to the disk first, at the next multiple of disk_heartbeat_s. It stays until
        then, leased once more by the read, in no order of prompts. All that may be dropped at a tick goes, not a share.
    disk_buffer_bytes: look-ups find a chunk as soon as its write to the disk begins, while no more than so many bytes
        are being written.
    disk_promotes: what is read from the disk is written to the tier above it, too.
    disk_evicts: a full disk drops chunks; otherwise it takes no more.
    disk_watermark, disk_target: a write beyond the first share of a disk that evicts empties it to the second one.
    """

    name: str
    eviction: str = "lru"
    disk_eviction: str = "lru"
    lease_s: float = 0.0
    end_uses: bool = False
    write_end_uses: bool = True
    placement: str = "copy"
    partial_stores: bool = False
    stores_replies: bool = False
    evict_on_demand: bool
    tick_s: float = 0.0
    watermark: float = 1.0
    evict_ratio: float = 0.0
    tick_share: str = "ratio"
    keep_prefetched: bool
    read_in_place: bool = False
    connector: Connector = Connector()
    counts_taken: bool = False
    max_prefetches: int
    min_prefetch_tokens: int = 0
    prefetch_share: float | None = None
    prefetch_timeout_s: float | None = None
    prefetch_token_s: float = 0.0
    writes_use: bool = False
    disk_takes: str = "stores"
    disk_heartbeat_s: float = 0.0
    disk_buffer_bytes: int = 0
    disk_promotes: bool = False
    disk_evicts: bool
    disk_watermark: float = 1.0
    disk_target: float = 1.0
