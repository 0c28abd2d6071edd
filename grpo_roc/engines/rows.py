"""The KV cache of decoding requests once more, each request in a row of its own.

The cells of a request are scattered over the cache. To gather them at every step would move the whole cache once per token. A
row grows with its request: only what is missing is copied from the cells.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

STEP = 64  # rows are longer by so many tokens


class Rows:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """`keys`, `values`: the cache, (layers, cells, kv heads, D)."""
        self._cache = (keys, values)
        self.clear()

    def clear(self) -> None:
        layers, _, heads, size = self._cache[0].shape
        self.keys, self.values = (torch.zeros(layers, 0, heads, 0, size) for _ in range(2))  # (layers, R, kv heads, S, D)
        self._owners: list[list[int]] = []  # the cells of the request in each row: the same list, so that an eviction is seen
        self._filled: list[int] = []  # tokens of each row

    def find(self, requests: Sequence[list[int]]) -> Tensor:
        """The rows (B,) of requests with these cells, the last of which is for the token that is read now."""
        wanted = {id(cells) for cells in requests}
        if 2 * len(requests) < len(self._owners):  # attention is computed for all rows
            self.clear()
        places = {id(cells): row for row, cells in enumerate(self._owners) if id(cells) in wanted}
        free = [row for row, cells in enumerate(self._owners) if id(cells) not in wanted]
        free += self._grow(len(requests) - len(places) - len(free), max(len(cells) for cells in requests))
        found = []
        for cells in requests:
            row = places.get(id(cells))
            if row is None:
                row = free.pop()
                self._owners[row], self._filled[row] = cells, 0
            self._copy(row, self._filled[row], cells[self._filled[row] : -1])
            self._filled[row] = len(cells)
            found.append(row)
        return torch.tensor(found)

    def _grow(self, more: int, length: int) -> range:
        """Make room for so many more rows and for so long ones; returns the new rows."""
        layers, rows, heads, room, size = self.keys.shape
        more = max(0, more)
        if more or length > room:
            shape = (layers, rows + more, heads, max(room, -(-length // STEP) * STEP), size)
            for name in ("keys", "values"):
                larger = torch.zeros(shape)
                larger[:, :rows, :, :room] = getattr(self, name)
                setattr(self, name, larger)
        self._owners += [[] for _ in range(more)]
        self._filled += [0] * more
        return range(rows, rows + more)

    def _copy(self, row: int, first: int, cells: Sequence[int]) -> None:
        if cells:
            places, last = torch.tensor(cells), first + len(cells)
            self.keys[:, row, :, first:last] = self._cache[0][:, places].transpose(1, 2)
            self.values[:, row, :, first:last] = self._cache[1][:, places].transpose(1, 2)
