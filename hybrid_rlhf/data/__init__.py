"""From files to batches of tokens, independent of any model.

Read in the order in which a row is processed: `rows/sources.py` (files to rows), `rows/formats.py` (rows to records),
`chat/conversation.py` (records to tokens and loss masks), `images/` (images of rows), `tokenized.py` (complete data
sets, cached), `loaders.py` (batches, shuffled and sharded over ranks), `collation.py` (tensors).
"""
