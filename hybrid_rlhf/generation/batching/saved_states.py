"""Slots of the saved states of recurrent layers.

Why: the keys and values of a sequence can be reused for any prefix of it, but a recurrent state belongs to one length
and has to be saved at that length. States are saved at three places: at the end of a sequence, where the next turn of a
conversation continues; where a sequence diverges from an earlier one, as after a common system prompt; and after the
last whole block of a prompt, for its further samples. The least recently used state is evicted.

Source: Marconi (arXiv 2411.19379, section 4.1) saves the first two kinds; vLLM saves the third.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class SavedStates:
    """Maps prefixes to the slots of their saved states."""

    def __init__(self, slots: int) -> None:
        self._slots: OrderedDict[Hashable, int] = OrderedDict()
        """Least recently used first."""
        self.slots = slots
        """Total number of slots."""
        self._free = list(range(slots - 1, -1, -1))

    def grow(self, slots: int) -> None:
        """Add slots after the present ones, up to `slots` in total."""
        self._free[:0] = range(slots - 1, self.slots - 1, -1)
        self.slots = slots

    def __contains__(self, prefix: Hashable) -> bool:
        """True if the state after a prefix is saved."""
        return prefix in self._slots

    def use(self, prefix: Hashable) -> int:
        """Return the slot of a saved state, and mark it as the most recently used."""
        self._slots.move_to_end(prefix)
        return self._slots[prefix]

    def add(self, prefix: Hashable) -> int | None:
        """Return a slot in which to save a state, evicting one if necessary; None if it is already saved or there are
        no slots."""
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
        """Remove a state if it is saved."""
        slot = self._slots.pop(prefix, None)
        if slot is not None:
            self._free.append(slot)

    def clear(self) -> None:
        """Remove all states."""
        for prefix in list(self._slots):
            self.drop(prefix)
