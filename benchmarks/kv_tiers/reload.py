"""Measures how fast a worker loads KV pages from host memory, as a share of a plain copy from pinned memory.

    python -m benchmarks.kv_tiers reload --device cuda --shape llama-3.1-8b

The pages go the way of a worker's: published in its prefix cache, saved by the thread of the tiers, evicted, planned
and reloaded with their checksums. `reload_bw_ratio` has the share by the tokens of the prefix. The model must have KV
in all layers, without sliding windows.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import Measured, at_least, need_gpu
from benchmarks.results import run_facts
from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.paged_cache import PagedCache, choose_pages, page_bytes
from tandem.engine.cache.prefix_cache import PrefixCache
from tandem.engine.cache.tiers.cache_tiers import CacheTiers
from tandem.engine.cache.tiers.disk import DiskTier
from tandem.engine.cache.tiers.host import HostTier
from tandem.engine.cache.tiers.page_copies import PageCopies
from tandem.engine.cache.tiers.tier import Tier
from tandem.engine.config.kv import kv_groups
from tandem.engine.models.shapes import shape_config
from tandem.protocol.errors import Internal, Unavailable
from tandem.protocol.messages import RequestRef
from tandem.settings.engine import GPU_PAGE_TOKENS

_TIMEOUT_S = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="llama-3.1-8b", help="the model")
    parser.add_argument("--tokens", default="4096,32768", help="lengths of the prefixes, comma-separated")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="of each measurement; medians count")
    parser.add_argument("--disk-path", type=Path, default=None, help="load from files in this folder instead")


def measure(options: argparse.Namespace) -> Measured:
    """Return the bandwidth of reloads and of plain copies by the tokens of the prefix."""
    if options.device == "cuda":
        need_gpu()
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    # The pages of a model with state layers are larger, because they must hold the state of a layer.
    spec, page_tokens = choose_pages(shape_config(options.shape), None, GPU_PAGE_TOKENS, torch.bfloat16, torch.bfloat16)
    reloads, copies = dict[str, float](), dict[str, float]()
    for tokens in options.tokens.split(","):
        numbers = at_least(page_tokens)(tokens) // page_tokens
        size = page_bytes(spec, page_tokens, torch.bfloat16)
        pages = PagedCache(spec, page_tokens, (2 + numbers * len(kv_groups(spec))) * size, torch.bfloat16, device)
        pages.storage.normal_()
        reloads[tokens] = reload_bandwidth(pages, numbers, options)
        copies[tokens] = copy_bandwidth(pages.storage, options.rounds)
        ratio = reloads[tokens] / copies[tokens]
        print(f"{tokens} tokens: {reloads[tokens]:.1f} of {copies[tokens]:.1f} GB/s, {ratio:.2f}", flush=True)
        del pages
    tier = "host" if options.disk_path is None else "disk"
    result = {
        "model": options.shape,
        "dtype": "bfloat16",
        "tier": tier,
        "reload_gb_per_s": {tokens: round(value, 2) for tokens, value in reloads.items()},
        "copy_gb_per_s": {tokens: round(value, 2) for tokens, value in copies.items()},
        "reload_bw_ratio": {tokens: round(value / copies[tokens], 4) for tokens, value in reloads.items()},
        **run_facts(options.device),
    }
    return f"kv-reload-{tier}-{options.shape}", result


def reload_bandwidth(pages: PagedCache, numbers: int, options: argparse.Namespace) -> float:
    """Return the GB/s at which a prefix of `numbers` full pages is loaded into the pool."""
    pool, size = PagePool(pages.pages), pages.page_bytes
    cache = PrefixCache(pool, pages.kv_pages)
    copies = PageCopies(pages.storage, page_checksums(*pages.views), pages.page_tokens)
    tier: Tier[Any]
    if options.disk_path is None:
        tier = HostTier(pages.pages * size, size, pages.storage.device)
    else:
        tier = DiskTier(options.disk_path / f"{numbers}-pages", 2 * pages.pages * size, size)
    tiers = CacheTiers(cache, copies, [tier])
    tiers.start()
    try:
        owner, prompt = RequestRef("first", 1), range(3, 4 + numbers * pages.page_tokens)
        prefix = cache.prefix(prompt, "")
        taken, _ = cache.allocate(owner, prefix, numbers, len(prompt) - 1)
        cache.publish(owner, prefix, taken)
        cache.leave(owner, prefix, taken)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while len(tier) < numbers:
            if time.monotonic() > deadline_s:
                raise Unavailable(f"the tier has saved {len(tier)} of {numbers} pages within {_TIMEOUT_S:g} s")
            time.sleep(0.01)
        return median(_reload(cache, tiers, prompt, size) for _ in range(options.rounds))
    finally:
        tiers.close()


def _reload(cache: PrefixCache, tiers: CacheTiers, prompt: range, size: int) -> float:
    """Evict all pages, load them again, and return the GB/s. Raises Internal if a page was not loaded."""
    pool, owner = cache.pool, RequestRef("evicts", 1)
    pool.free(owner, pool.allocate(owner, pool.total))
    reload = tiers.plan(cache.prefix(prompt, ""), 1)
    assert reload is not None
    began_s = time.perf_counter()
    tiers.begin(reload, _TIMEOUT_S)
    reload.done.result()
    seconds = time.perf_counter() - began_s
    if cache.hit(cache.prefix(prompt, "")) != reload.end:
        raise Internal("not all pages were loaded; see the log")
    return reload.end * size / seconds / 1e9


def copy_bandwidth(target: Tensor, rounds: int) -> float:
    """Return the GB/s of one copy from pinned memory, without checksums, to `target`."""
    source = torch.empty(target.shape, dtype=target.dtype, pin_memory=target.is_cuda)
    source.copy_(target)
    seconds = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if target.is_cuda:
            torch.cuda.synchronize(target.device)
        seconds.append(time.perf_counter() - began_s)
    # The first copy also pays for pages of memory that were never touched.
    return target.nbytes / median(seconds[1:]) / 1e9
