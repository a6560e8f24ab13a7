"""Causal attention with grouped queries, sliding windows, padding, and new tokens behind older keys.

Every query has a *slot*: the index of its own key. Query at slot s sees key j when

    j <= s,   j > s - window (if there is a window),   key j is no padding      or   j == s

The last clause keeps padding queries finite (they see themselves); nobody reads what they compute.
"""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@runtime_checkable
class Attend(Protocol):
    """Mixes values for the new tokens of one layer; whoever owns the keys and values implements it."""

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "batch heads seq dim"],
        k: Float[Tensor, "batch kv seq dim"],
        v: Float[Tensor, "batch kv seq dim"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "batch heads seq dim"]:
        """Attention of `q` (after RoPE) over the keys this object holds and the new ones."""
        ...


class CausalAttend:
    """Attention among the tokens of one call: no cache.

    `padding_mask` [batch, seq] is True at real tokens, on whichever side the padding is.
    """

    def __init__(self, padding_mask: Bool[Tensor, "batch seq"] | None = None) -> None:
        # a mask without padding would only cost the fast path
        self.padding_mask = None if padding_mask is None or bool(padding_mask.all()) else padding_mask

    def __call__(
        self,
        layer: int,
        q: Float[Tensor, "batch heads seq dim"],
        k: Float[Tensor, "batch kv seq dim"],
        v: Float[Tensor, "batch kv seq dim"],
        *,
        scale: float,
        window: int | None,
    ) -> Float[Tensor, "batch heads seq dim"]:
        """Attention of the tokens over themselves; `layer` does not matter without a cache."""
        return masked_attention(q, k, v, scale=scale, window=window, key_padding=self.padding_mask)


def masked_attention(
    q: Float[Tensor, "batch heads seq dim"],
    k: Float[Tensor, "batch kv keys dim"],
    v: Float[Tensor, "batch kv keys dim"],
    *,
    scale: float,
    window: int | None = None,
    query_slots: Int[Tensor, "batch seq"] | None = None,
    key_padding: Bool[Tensor, "batch keys"] | None = None,
) -> Float[Tensor, "batch heads seq dim"]:
    """Attention of `seq` new tokens over `keys` keys, theirs included, as the module's docstring defines it.

    `query_slots` tells where each query's own key lies in `k`; None: the queries are the last `seq` keys. With slots of
    its own, each row of a batch may hold another number of keys (what lies behind its last slot is not seen).
    `key_padding` is True at keys that may be seen.
    """
    seq, keys = q.shape[2], k.shape[2]
    grouped = q.shape[1] != k.shape[1]
    if window is not None and window >= keys:
        window = None
    if query_slots is None and key_padding is None and window is None and seq in (1, keys):
        return scaled_dot_product_attention(q, k, v, is_causal=seq > 1, scale=scale, enable_gqa=grouped)
    if query_slots is None:
        query_slots = torch.arange(keys - seq, keys, device=q.device)[None]
    mask = visible_keys(query_slots, keys, window, key_padding)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=grouped)


def visible_keys(
    query_slots: Int[Tensor, "rows seq"],
    keys: int,
    window: int | None = None,
    key_padding: Bool[Tensor, "batch keys"] | None = None,
) -> Bool[Tensor, "mask_rows seq keys"]:
    """True where a query sees a key; `mask_rows` is 1 when all rows of the batch agree."""
    slots = query_slots[:, :, None]
    key = torch.arange(keys, device=query_slots.device)
    visible = key <= slots
    if window is not None:
        visible &= key > slots - window
    if key_padding is not None:
        visible = visible & key_padding[:, None] | (key == slots)
    return visible
