"""What the fork server imports last: what each run of training reads once, and no collection of garbage looks at again.

A collection in a forked process would write to the page of every object that was imported, and so copy all of them.
"""

from __future__ import annotations

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # builds the table of all types
gc.collect()
gc.freeze()
