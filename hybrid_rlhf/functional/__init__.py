"""Pure tensor functions. torch only: the mathematics can be read and tested without a model, a rank or a GPU."""
