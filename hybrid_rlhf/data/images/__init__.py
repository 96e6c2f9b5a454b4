"""Images of rows: reading them within limits, references to them, and the text that takes their places.

`reading` decodes bytes, `references` finds the bytes of an image, `placing` finds the images of a row's turns, and
`expansion` writes the text of each image.
"""
