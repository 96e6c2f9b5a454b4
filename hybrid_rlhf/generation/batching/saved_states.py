"""Which states of recurrent layers are saved, and in which slots.

Why: keys and values of a sequence serve any prefix of it; a recurrent state is that of one length, and has to be saved
at that length. States are saved at the ends of sequences, where the next turn of a conversation continues; where a
sequence leaves what an earlier one has computed, as at the end of a common system prompt; and after the last whole
block of a prompt, for its further samples. The least recently used is evicted.

Source: Marconi (arXiv 2411.19379, section 4.1), which saves the first two kinds; vLLM saves the third.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class SavedStates:
    """The slots of saved states, each of one prefix."""

    def __init__(self, slots: int) -> None:
        self._slots: OrderedDict[Hashable, int] = OrderedDict()
        """The least recently used first."""
        self.slots = slots
        """How many there are."""
        self._free = list(range(slots - 1, -1, -1))

    def grow(self, slots: int) -> None:
        """Add slots behind the present ones, up to `slots` in all."""
        self._free[:0] = range(slots - 1, self.slots - 1, -1)
        self.slots = slots

    def __contains__(self, prefix: Hashable) -> bool:
        """Whether the state after a prefix is saved."""
        return prefix in self._slots

    def use(self, prefix: Hashable) -> int:
        """The slot of a saved state."""
        self._slots.move_to_end(prefix)
        return self._slots[prefix]

    def add(self, prefix: Hashable) -> int | None:
        """The slot to save a state in, that of another if none is free; none if it is saved, or there are no slots."""
        if prefix in self._slots:
            self._slots.move_to_end(prefix)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._slots:
            _, slot = self._slots.popitem(last=False)
        else:
            return None
        self._slots[prefix] = slot
        return slot

    def drop(self, prefix: Hashable) -> None:
        """Forget a state, if it is saved."""
        slot = self._slots.pop(prefix, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Forget all."""
        for prefix in list(self._slots):
            self.drop(prefix)
