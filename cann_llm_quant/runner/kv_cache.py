"""Keys and values of the tokens so far, one growing buffer a layer.

A buffer [batch, kv heads, capacity, head dim] doubles when it is full, up to `max_length`, so that a short
chat in a model of long context does not pay for that context. The cache is the decoder's `Attend`: within
one forward pass every layer appends its new keys and values behind `length` tokens and attends to all of
them; `advance` then counts the new tokens in.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.errors import UsageError
from cann_llm_quant.models.attention import masked_attention

FIRST_CAPACITY = 256


class KVCache:
    """Keys and values of one batch of equally long sequences."""

    def __init__(
        self,
        num_layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        max_length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_length = max_length
        self.length = 0
        shape = (batch, kv_heads, min(FIRST_CAPACITY, max_length), head_dim)
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

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
        """Store the new keys and values behind the `length` old ones and attend over all of them.

        Raises UsageError when they do not fit `max_length`.
        """
        seq = k.shape[2]
        end = self.length + seq
        if end > self.max_length:
            raise UsageError(f"{end} tokens exceed the context of {self.max_length}; shorten the prompt")
        self._reserve(layer, end)
        self._keys[layer][:, :, self.length : end] = k
        self._values[layer][:, :, self.length : end] = v
        # The oldest key that the first new query still sees; earlier ones need not be read.
        first = 0 if window is None else max(0, self.length + 1 - window)
        keys, values = self._keys[layer][:, :, first:end], self._values[layer][:, :, first:end]
        return masked_attention(q, keys, values, scale=scale, window=window)

    def _reserve(self, layer: int, length: int) -> None:
        for buffers in (self._keys, self._values):
            old = buffers[layer]
            capacity = old.shape[2]
            if length <= capacity:
                continue
            grown = min(self.max_length, max(length, 2 * capacity))
            new = old.new_empty(old.shape[0], old.shape[1], grown, old.shape[3])
            new[:, :, : self.length] = old[:, :, : self.length]
            buffers[layer] = new

    def advance(self, tokens: int) -> None:
        """Count in the tokens that every layer has stored since the last call."""
        self.length += tokens
