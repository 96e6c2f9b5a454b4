"""The API of the board, one file per subject; docs/board.md has the contract.

Read `app.py` (all of it together, and what an error looks like), `access.py` (who may ask), `answers.py` (JSON), then
any subject.
"""
