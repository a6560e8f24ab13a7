"""Hidden states that stay: of every layer and window, in memory up to a byte budget and in files past it.

`HiddenStates` replaces a layer's inputs by its outputs; a backward pass needs the inputs of all layers. A state is
stored raw, in the compute dtype, `[1, seq, hidden]`; a slot (one layer's inputs, the gradients) holds one state a
window. Files are read and written whole, never mapped, for the reason that `stream.py` gives.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from cann_llm_quant.errors import CannQuantError


class StateStore:
    """States by slot and window; `scratch` is an empty folder that the caller deletes."""

    def __init__(self, windows: int, *, budget: int, scratch: Path, device: torch.device) -> None:
        self.windows = windows
        self._left, self._scratch, self._device = budget, scratch, device
        self._memory: dict[tuple[str, int], Tensor] = {}
        self._files: dict[tuple[str, int], tuple[torch.dtype, tuple[int, ...]]] = {}

    def put(self, slot: str, window: int, state: Float[Tensor, "1 seq hidden"]) -> None:
        """Store a state, over an older one of the same slot and window."""
        self._forget(slot, window)
        if state.nbytes <= self._left:
            self._left -= state.nbytes
            self._memory[slot, window] = state.detach().cpu()
            return
        path = self._path(slot, window)
        try:
            path.write_bytes(state.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        except OSError as error:
            raise CannQuantError(
                f"cannot write {path}: {error.strerror}; make room, raise --activation-budget or use fewer --samples"
            ) from error
        self._files[slot, window] = state.dtype, tuple(state.shape)

    def get(self, slot: str, window: int) -> Float[Tensor, "1 seq hidden"]:
        """A stored state on the compute device; KeyError when there is none."""
        if (slot, window) in self._memory:
            return self._memory[slot, window].to(self._device)
        dtype, shape = self._files[slot, window]
        content = bytearray(self._path(slot, window).read_bytes())
        return torch.frombuffer(content, dtype=dtype).view(shape).to(self._device)

    def all(self, slot: str) -> Iterator[Float[Tensor, "1 seq hidden"]]:
        """The slot's states in window order."""
        return (self.get(slot, window) for window in range(self.windows))

    def drop(self, slot: str) -> None:
        """Forget a slot."""
        for window in range(self.windows):
            self._forget(slot, window)

    def _forget(self, slot: str, window: int) -> None:
        old = self._memory.pop((slot, window), None)
        self._left += 0 if old is None else old.nbytes
        if self._files.pop((slot, window), None) is not None:
            self._path(slot, window).unlink()

    def _path(self, slot: str, window: int) -> Path:
        return self._scratch / f"{slot}-{window}.bin"
