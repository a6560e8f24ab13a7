"""What a family that fuses or renames its matrices stores, as data: one table in `fused_layouts/` for each.

A table says under which names and in which rows the linears of a well-known family (`llama`, `mistral`, `qwen2`) lie in
the file, and turns the config into that family's. Rows of a fused matrix, with d the size of a head:

    blocks      q: heads x d | k: kv_heads x d | v: kv_heads x d             Baichuan, Qwen 1, Phi-3, ChatGLM 2 and 3
    by group    for each kv head: its queries (heads / kv_heads) x d, k d, v d                            InternLM 2
    halves      gate | up                                                                  Phi-3, ChatGLM 2 and 3, GLM
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cann_llm_quant.checkpoint.fused_config import FusedConfig

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

Rows = tuple[range, ...]


@dataclass(frozen=True)
class Sizes:
    """What decides whose a row is; `inner` is the width of the MLP."""

    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    def __str__(self) -> str:
        return f"{self.heads} heads and {self.kv_heads} kv heads of {self.head_dim}, an MLP of {self.inner}"


@dataclass(frozen=True)
class Fused:
    """One stored matrix that holds the rows of several linears; `rows` gives those of each part, in order."""

    parts: tuple[str, ...]
    rows: Callable[[Sizes], tuple[Rows, ...]]


@dataclass(frozen=True)
class Reading:
    """A config understood: sizes, the config of the family to be shown, and matrices whose rows are scaled to length 1.

    The latter are named as they are shown.
    """

    sizes: Sizes
    config: dict[str, Any]
    unit_rows: tuple[str, ...] = ()


@dataclass(frozen=True)
class FusedLayout:
    """How one `model_type` stores what another family stores plainly.

    `modules` maps a module below `layer_prefix` + number to its name below `model.layers.` + number, or to the parts
    that it fuses; `outer` maps whole names of tensors outside the layers. Whatever they do not name keeps its name.
    `read` raises InputError's kinds for configs that are damaged, or that describe a model which no plain family is.
    Where only some models of the type are stored so, `mark` is a part of a tensor's name that only those have.
    """

    model_type: str
    read: Callable[[FusedConfig], Reading]
    modules: Mapping[str, str | Fused] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    layer_prefix: str = "model.layers."
    mark: str = ""


def blocks(sizes: Sizes) -> tuple[Rows, ...]:
    """All queries, then all keys, then all values."""
    q = sizes.heads * sizes.head_dim
    kv = sizes.kv_heads * sizes.head_dim
    return (range(q),), (range(q, q + kv),), (range(q + kv, q + 2 * kv),)


def by_group(sizes: Sizes) -> tuple[Rows, ...]:
    """For each kv head the queries that share it, its key and its value."""
    d = sizes.head_dim
    queries = sizes.heads // sizes.kv_heads * d
    starts = range(0, sizes.kv_heads * (queries + 2 * d), queries + 2 * d)
    return (
        tuple(range(start, start + queries) for start in starts),
        tuple(range(start + queries, start + queries + d) for start in starts),
        tuple(range(start + queries + d, start + queries + 2 * d) for start in starts),
    )


def halves(sizes: Sizes) -> tuple[Rows, ...]:
    """The gate's rows, then up's."""
    return (range(sizes.inner),), (range(sizes.inner, 2 * sizes.inner),)
