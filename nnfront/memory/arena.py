# SPDX-License-Identifier: Apache-2.0
"""Places in one memory for values that are not all alive at once."""

from __future__ import annotations

from dataclasses import dataclass, field

ALIGNMENT = 64


@dataclass
class Arena:
    """Gives places while a program is walked in the order in which it runs, and takes them back where its instructions free values (`Run.frees`,
    by which a plan's allocations end too). `size` is how large the memory has to be.
    """

    size: int = 0
    # Bytes by offset, no two of them next to each other.
    _free: dict[int, int] = field(default_factory=dict)
    # By offset: bytes, and how many slots hold them.
    _held: dict[int, tuple[int, int]] = field(default_factory=dict)

    def take(self, count: int) -> int:
        """Find an offset for bytes that one slot holds, no two the same: in the smallest piece that fits, or at the end."""
        count = max(-(-count // ALIGNMENT), 1) * ALIGNMENT
        fitting = [(size, offset) for offset, size in self._free.items() if size >= count]
        if fitting:
            size, offset = min(fitting)
            del self._free[offset]
        else:
            last = max(self._free, default=self.size)
            is_last = last + self._free.get(last, 0) == self.size
            offset, size = (last, self._free.pop(last, 0)) if is_last else (self.size, 0)
            self.size = max(self.size, offset + count)
        if size > count:
            self._free[offset + count] = size - count
        self._held[offset] = count, 1
        return offset

    def hold(self, offset: int) -> None:
        """Say that one more slot has what lies there."""
        count, slots = self._held[offset]
        self._held[offset] = count, slots + 1

    def release(self, offset: int) -> None:
        """Say that one slot less does."""
        count, slots = self._held.pop(offset)
        if slots > 1:
            self._held[offset] = count, slots - 1
            return
        count += self._free.pop(offset + count, 0)
        before = next((at for at, size in self._free.items() if at + size == offset), offset)
        self._free[before] = self._free.get(before, 0) + count
