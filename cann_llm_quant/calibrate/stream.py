"""Hidden states of all calibration windows, between two layers: in memory, or in a file past a byte budget.

A file holds the windows one after another, raw, `[window, seq, hidden]` in the compute dtype. It is read and written
one window at a time through the file system rather than mapped, so that its pages never count as this process's
memory. The states after layer i go to `<name>-<i+1>.bin` (written under another name, fsynced, renamed), and those
before it are deleted only when the layer is safe in the writer's journal: a killed run finds the file it needs, or
recomputes.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cann_llm_quant.errors import CannQuantError, NumericError
from cann_llm_quant.models.attention import Attend, CausalAttend
from cann_llm_quant.models.decoder import DecoderLayer, Observe, Table, embed


class HiddenStates:
    """The states before layer `index`; `advance` replaces them by those after it."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        budget: int,
        scratch: Path,
        device: torch.device,
        name: str = "states",
    ) -> None:
        self.shape, self.dtype, self.index, self.name = shape, dtype, 0, name
        self._scratch, self.device = scratch, device
        self._window_bytes = shape[1] * shape[2] * dtype.itemsize
        self.spooled = self._window_bytes * shape[0] > budget
        self._memory: list[Tensor] = []

    def path(self, index: int) -> Path:
        """File of the states before layer `index`."""
        return self._scratch / f"{self.name}-{index}.bin"

    def start(self, embedding: Table, ids: Int[Tensor, "windows seq"]) -> None:
        """Fill with embedded tokens: the states before layer 0."""
        self._store(0, (embed(embedding, window[None]).to(self.dtype) for window in ids))

    def resume(self, index: int) -> bool:
        """Take up the states before layer `index` from an earlier run's file.

        False when there is none that is whole.
        """
        path = self.path(index)
        if not self.spooled or not path.exists() or path.stat().st_size != self._window_bytes * self.shape[0]:
            return False
        self.index = index
        return True

    def windows(self) -> Iterator[Float[Tensor, "1 seq hidden"]]:
        """The states, one window after another, on the compute device."""
        if not self.spooled:
            for state in self._memory:
                yield state.to(self.device)
            return
        with self.path(self.index).open("rb") as file:
            for _ in range(self.shape[0]):
                yield self._read(file)

    def window(self, number: int) -> Float[Tensor, "1 seq hidden"]:
        """One window's states, on the compute device."""
        if not self.spooled:
            return self._memory[number].to(self.device)
        with self.path(self.index).open("rb") as file:
            file.seek(number * self._window_bytes)
            return self._read(file)

    def _read(self, file: BinaryIO) -> Tensor:
        window = torch.frombuffer(bytearray(file.read(self._window_bytes)), dtype=self.dtype)
        return window.view(1, *self.shape[1:]).to(self.device)

    def advance(self, layer: DecoderLayer, *, check_finite: bool = True, attend: Attend | None = None) -> Iterator[int]:
        """Replace the states by `layer`'s outputs, with `attend` for its attention; yields the number of windows done.

        Raises NumericError naming the layer and the window when an output is not finite.
        """
        outputs = run_layer(layer, self.windows(), self.index, check_finite=check_finite, attend=attend)
        yield from self.replace(outputs)

    def replace(self, outputs: Iterator[Float[Tensor, "1 seq hidden"]]) -> Iterator[int]:
        """Replace the states by the next layer's, one for each window; yields the number of windows done."""
        yield from self._store_steps(self.index + 1, outputs)

    def forget_before(self, index: int) -> None:
        """Delete files of states that no resume needs any more."""
        for path in self._scratch.glob(f"{self.name}-*.bin"):
            if int(path.stem.removeprefix(f"{self.name}-")) < index:
                path.unlink()

    def _store(self, index: int, windows: Iterator[Tensor]) -> None:
        for _ in self._store_steps(index, windows):
            pass

    def _store_steps(self, index: int, windows: Iterator[Tensor]) -> Iterator[int]:
        if not self.spooled:
            # In place, window by window: the old and the new states never lie in memory together.
            for done, state in enumerate(windows):
                self._memory[done : done + 1] = [state.cpu()]
                yield done + 1
            self.index = index
            return
        try:
            yield from self._spool(index, windows)
        except OSError as error:
            raise CannQuantError(
                f"cannot write {self.path(index)}: {error.strerror}; make room or raise --activation-budget, "
                "then give the same command again, it resumes"
            ) from error

    def _spool(self, index: int, windows: Iterator[Tensor]) -> Iterator[int]:
        unfinished = self.path(index).with_suffix(".tmp")
        with unfinished.open("wb") as file:
            for done, state in enumerate(windows):
                file.write(state.cpu().contiguous().view(torch.uint8).numpy().tobytes())
                yield done + 1
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path(index))
        self.index = index


def run_layer(
    layer: DecoderLayer,
    windows: Iterator[Float[Tensor, "1 seq hidden"]],
    index: int,
    observe: Observe | None = None,
    *,
    check_finite: bool = True,
    attend: Attend | None = None,
) -> Iterator[Float[Tensor, "1 seq hidden"]]:
    """`layer`'s output for each window, one at a time, causal attention within the window unless `attend` is given.

    Raises NumericError naming the layer and the window when an output is not finite.
    """
    attend = attend or CausalAttend()
    for number, x in enumerate(windows):
        positions = torch.arange(x.shape[1], device=x.device)[None]
        y = layer(x, positions, attend, observe)
        if check_finite:
            require_finite(y, index, number)
        yield y


def require_finite(y: Float[Tensor, "1 seq hidden"], index: int, number: int) -> None:
    """Raises NumericError naming the layer and the window when its output is not finite."""
    if not bool(torch.isfinite(y).all()):
        raise NumericError(
            f"layer {index} gives NaN or infinity for calibration window {number} in {y.dtype}; "
            "use --dtype fp32 or bf16, or scan the source's weights with inspect --scan"
        )
