"""What an engine may use: context, batch, pages and memory; and how many pages that makes.

Without `kv_pages` the cache gets as many pages as `memory_budget` holds (half of the memory that is free), but no more
than `max_batch_size` texts of `max_context` tokens can fill. On the CPU a page takes memory when it is first written.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.arch import Arch
from cann_llm_quant.quant.kv import KvPlan
from cann_llm_quant.runner.kv_policy import DEFAULT_PAGE_SIZE
from cann_llm_quant.runner.kv_store import page_bytes
from cann_llm_quant.runner.page_policy import PAGE_SIZES, PagePolicy
from cann_llm_quant.runner.pattern import parse_pattern, widest_window
from cann_llm_quant.runner.prefix_cache import Eviction
from cann_llm_quant.runner.scheduler import Limits, Preemption

SHARE_OF_FREE_MEMORY = 0.5
SHARE_OF_SENSITIVE_PAGES = 0.25


@dataclass(frozen=True)
class EngineOptions:
    """Limits and choices of one engine.

    `gather_ms`: how long an idle engine waits for more requests to come. `memory_budget`: bytes of the page pools.
    `host_offload`, `disk_offload`: bytes for pages that are moved out of the pools (cold shared pages, and preempted
    requests with `preemption="swap"`); `offload_folder` is where the disk tier makes its temporary folder.
    """

    max_batch_size: int = 16
    max_batch_tokens: int = 512
    max_waiting: int = 1024
    max_context: int | None = None
    gather_ms: float = 0.0
    page_size: int = DEFAULT_PAGE_SIZE
    kv_pages: int | None = None
    memory_budget: int | None = None
    prefix_cache: bool = True
    min_prefix_len: int = 0
    eviction: Eviction = "lru"
    preemption: Preemption = "recompute"
    host_offload: int = 0
    disk_offload: int = 0
    offload_folder: Path | None = None
    attention_pattern: str = "dense"

    def __post_init__(self) -> None:
        if self.page_size not in PAGE_SIZES:
            raise UsageError(f"page_size {self.page_size} must be one of {', '.join(map(str, PAGE_SIZES))}")
        if self.kv_pages is not None and self.kv_pages < 1:
            raise UsageError(f"kv_pages {self.kv_pages} must be at least 1")
        if self.memory_budget is not None and self.memory_budget < 1:
            raise UsageError(f"memory_budget {self.memory_budget} must be at least one byte")
        if self.preemption == "swap" and not self.host_offload + self.disk_offload:
            raise UsageError("preemption swap needs room outside: give host_offload or disk_offload some bytes")
        parse_pattern(self.attention_pattern)

    def limits(self, arch: Arch) -> Limits:
        """For a model. Raises UsageError for a context that the model does not have."""
        most = arch.max_positions
        if self.max_context is not None and not 1 <= self.max_context <= most:
            raise UsageError(f"max_context {self.max_context} must lie between 1 and the model's {most} positions")
        return Limits(
            self.max_batch_size,
            self.max_batch_tokens,
            self.max_waiting,
            self.max_context or most,
            self.gather_ms / 1000,
            self.preemption,
        )

    def policy(self, arch: Arch, plan: KvPlan) -> PagePolicy:
        """Which pages are sealed, kept in float or dropped."""
        pattern = parse_pattern(self.attention_pattern) or widest_window(arch)
        return PagePolicy(self.page_size, plan.recent_tokens, plan.sink_tokens, plan.sensitive, plan.quantizes, pattern)


@dataclass(frozen=True)
class PageCounts:
    """How many pages of each kind there are, and the bytes of one."""

    sealed: int
    floats: int
    sealed_bytes: int
    float_bytes: int

    @staticmethod
    def of(options: EngineOptions, arch: Arch, plan: KvPlan, dtype: torch.dtype, device: torch.device) -> "PageCounts":
        """As many as the options allow. Raises UsageError where memory does not hold what one text needs."""
        shape = (arch.num_kv_heads, arch.head_dim, options.page_size)
        sealed_bytes, float_bytes = (page_bytes(plan, kind, *shape, dtype) for kind in ("sealed", "float"))
        policy, limits = options.policy(arch, plan), options.limits(arch)
        # A request holds at least the page that is being filled, and the next one while that is sealed.
        extra = 0
        if plan.quantizes:
            extra = options.max_batch_size * (policy.recent_pages + 2 + policy.pages(policy.sink_tokens))
        budget = options.memory_budget or int(SHARE_OF_FREE_MEMORY * _free_memory(device))
        pages = options.kv_pages
        if pages is None:
            useful = options.max_batch_size * policy.pages(limits.max_context)
            rest = budget - extra * float_bytes
            each = sealed_bytes + SHARE_OF_SENSITIVE_PAGES * float_bytes * bool(plan.sensitive)
            pages = min(useful, int(rest // (each if plan.quantizes else float_bytes)))
        if plan.quantizes and plan.sensitive:
            extra += int(SHARE_OF_SENSITIVE_PAGES * pages)
        counts = (
            PageCounts(pages, extra, sealed_bytes, float_bytes)
            if plan.quantizes
            else PageCounts(0, pages, sealed_bytes, float_bytes)
        )
        if pages < 1 or (options.memory_budget is not None and counts.bytes > options.memory_budget):
            need = (
                counts.bytes if pages >= 1 else extra * float_bytes + (sealed_bytes if plan.quantizes else float_bytes)
            )
            raise UsageError(
                f"the KV cache needs {need:,} bytes for {max(pages, 1)} pages and memory_budget is {budget:,}; raise "
                "memory_budget or lower kv_pages or max_batch_size"
            )
        return counts

    @property
    def bytes(self) -> int:
        """All pages of both pools."""
        return self.sealed * self.sealed_bytes + self.floats * self.float_bytes


def _free_memory(device: torch.device) -> int:
    if device.type == "cpu":
        return psutil.virtual_memory().available
    free: int = getattr(torch, device.type).mem_get_info(device)[0]
    return free
