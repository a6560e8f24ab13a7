"""Pages outside of the pools: a tier of host memory and, behind it, one of files, each with a budget of bytes.

What `KvStore.dump(page)` gives (tensors by name) lies under a handle, in host memory while it fits. When it does not,
the oldest content there goes to disk, one safetensors file for each handle in a temporary folder that `close` removes.
Budgets count the tensors' bytes; a file adds some hundred bytes for its header.

A content lies in one tier as a whole, so up to one page's room can be left over in each: `usable_bytes` is what can be
promised (`page_table.Outside`).
"""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cann_llm_quant.errors import CannQuantError, UsageError
from cann_llm_quant.runner.page_table import Move


@runtime_checkable
class PageContents(Protocol):
    """Where the contents of pages come from and go to: `KvStore`."""

    def dump(self, page: int) -> dict[str, Tensor]:
        """All that is stored in a page."""
        ...

    def restore(self, page: int, tensors: Mapping[str, Tensor]) -> None:
        """Put it back into a page of the same kind."""
        ...


def usable_bytes(host: int, disk: int, largest_page: int) -> int:
    """How many bytes of pages always fit into tiers of `host` and `disk` bytes together."""
    if not disk or not host:
        return host + disk
    return max(host, disk, host + disk - largest_page)


def _size(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class OffloadStore:
    """Contents of pages by handle. `folder` is where the temporary folder is made; the system's own by default."""

    def __init__(self, *, host_bytes: int, disk_bytes: int = 0, folder: Path | None = None) -> None:
        if host_bytes < 0 or disk_bytes < 0:
            raise UsageError(f"offload budgets of {host_bytes} and {disk_bytes} bytes must not be negative")
        self.host_bytes = host_bytes
        self.disk_bytes = disk_bytes
        self.host_used = 0
        self.disk_used = 0
        self._host: dict[int, dict[str, Tensor]] = {}
        self._disk: dict[int, int] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if disk_bytes:
            try:
                self._folder = tempfile.TemporaryDirectory(prefix="cann-llm-quant-kv-", dir=folder)
            except OSError as error:
                raise UsageError(
                    f"pages cannot be offloaded to {folder}: {error.strerror}; name another folder"
                ) from error

    def __enter__(self) -> "OffloadStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pages(self) -> int:
        """How many pages lie here."""
        return len(self._host) + len(self._disk)

    def apply(self, moves: Iterable[Move], pages: PageContents) -> None:
        """Carry out a step's moves, in order, before anything is written into its pages."""
        for move in moves:
            if move.kind == "out":
                self.put(move.handle, pages.dump(move.page))
            elif move.kind == "in":
                pages.restore(move.page, self.take(move.handle))
            else:
                self.drop(move.handle)

    def put(self, handle: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a copy of `tensors` under a new handle.

        Raises CannQuantError where the disk refuses the file, ValueError where both budgets are spent.
        """
        assert handle not in self._host
        assert handle not in self._disk
        size = _size(tensors)
        if size > self.host_bytes:
            self._write(handle, tensors)
            return
        while self.host_used + size > self.host_bytes:
            oldest = next(iter(self._host))
            self._write(oldest, self._host[oldest])
            self.host_used -= _size(self._host.pop(oldest))
        # A tensor of the pool is a view that the next step overwrites.
        self._host[handle] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self.host_used += size

    def take(self, handle: int) -> dict[str, Tensor]:
        """What lies under a handle, which is forgotten; on the CPU."""
        if handle in self._host:
            tensors = self._host.pop(handle)
            self.host_used -= _size(tensors)
            return tensors
        try:
            read: dict[str, Tensor] = load_file(self._path(handle))
        except (OSError, SafetensorError) as error:
            raise CannQuantError(f"offloaded page {self._path(handle)} cannot be read back: {error}") from error
        self._erase(handle)
        return read

    def drop(self, handle: int) -> None:
        """Forget what lies under a handle."""
        if handle in self._host:
            self.host_used -= _size(self._host.pop(handle))
        else:
            self._erase(handle)

    def clear(self) -> None:
        """Forget everything."""
        for handle in self._disk:
            self._path(handle).unlink(missing_ok=True)
        self._host.clear()
        self._disk.clear()
        self.host_used = self.disk_used = 0

    def close(self) -> None:
        """Forget everything and remove the folder."""
        self.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _path(self, handle: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / f"page-{handle}.safetensors"

    def _write(self, handle: int, tensors: Mapping[str, Tensor]) -> None:
        size = _size(tensors)
        if self.disk_used + size > self.disk_bytes:
            raise ValueError(
                f"a page of {size} bytes does not fit: {self.disk_bytes - self.disk_used} are left on disk"
            )
        path = self._path(handle)
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise CannQuantError(
                f"page {path} cannot be offloaded: {error}; free space there or lower the disk budget"
            ) from error
        self._disk[handle] = size
        self.disk_used += size

    def _erase(self, handle: int) -> None:
        self.disk_used -= self._disk.pop(handle)
        self._path(handle).unlink()
