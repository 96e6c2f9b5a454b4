"""What the fork server imports last: nothing that exists by now is looked at by collections of garbage.

A collection in a forked process would write to the page of every object that was imported, and so copy all of them.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
