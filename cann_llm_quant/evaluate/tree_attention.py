"""Attention for a tree of tokens below a trunk whose keys and values are kept (see `token_tree`).

A node at depth d sees a key at depth e, in the trunk or among its ancestors, when `e > d - window`; without a
window it sees them all, and itself.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cann_llm_quant.evaluate.token_tree import TokenTree
from cann_llm_quant.models.attention import masked_attention


class Trunk:
    """Keys and values of one text's beginning; as an `Attend` it appends the tokens of the pass to them."""

    def __init__(self, num_layers: int) -> None:
        self.tokens: tuple[int, ...] = ()
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers

    def cut(self, length: int) -> None:
        """Forget what lies behind the first `length` tokens."""
        self.tokens = self.tokens[:length]
        for kept in (self.keys, self.values):
            for layer, tensor in enumerate(kept):
                kept[layer] = None if tensor is None or length == 0 else tensor[:, :, :length]

    def joined(
        self, layer: int, k: Float[Tensor, "batch kv seq dim"], v: Float[Tensor, "batch kv seq dim"]
    ) -> tuple[Float[Tensor, "batch kv keys dim"], Float[Tensor, "batch kv keys dim"]]:
        """The trunk's keys and values of a layer with new ones behind them."""
        keys, values = self.keys[layer], self.values[layer]
        if keys is None or values is None:
            return k, v
        return torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)

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
        """Keep the new keys and values and attend to all that are kept."""
        keys, values = self.joined(layer, k, v)
        self.keys[layer], self.values[layer] = keys, values
        return masked_attention(q, keys, values, scale=scale, window=window)


class TreeAttend:
    """Attention of a tree's nodes; nothing of them is kept."""

    def __init__(self, trunk: Trunk, tree: TokenTree, device: torch.device) -> None:
        self._trunk = trunk
        self._depths = tree.depths.to(device)
        length = len(trunk.tokens)
        above = torch.ones(len(tree.ids), length, dtype=torch.bool)
        self._visible = torch.cat([above, tree.visible], dim=1).to(device)
        self._key_depths = torch.cat([torch.arange(length, device=device), self._depths])
        self._masks: dict[int | None, Tensor] = {None: self._visible}

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
        """Attention of the nodes over the trunk, their ancestors and themselves."""
        keys, values = self._trunk.joined(layer, k, v)
        grouped = q.shape[1] != k.shape[1]
        mask = self._mask(window)[None, None]
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)

    def _mask(self, window: int | None) -> Bool[Tensor, "nodes keys"]:
        if window is not None and window not in self._masks:
            near: Int[Tensor, "nodes keys"] = self._depths[:, None] - self._key_depths[None]
            self._masks[window] = self._visible & (near < window)
        return self._masks[window]
