"""Images of rows: reading them within limits, references to them, and the texts that take their places.

`reading` decodes bytes, `references` finds them, and `expansion` says what becomes of the images of rows.
"""
