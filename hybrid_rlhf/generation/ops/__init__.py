"""Operations of a step. Each file has a reference in torch and Triton kernels, which tests compare with each other.

Read `choice.py` first: it chooses the implementation for a device. `gpu.py` lists the Triton kernels, `cpu_kernels.py`
has the compiled kernels of a CPU (`compiled.py` compiles them). Operations are in `rows.py` (rotary positions,
activations), `norms.py`, `attention.py`, `latent.py`, `routing.py`, `experts.py`, `convolution.py`, `recurrence.py`,
`quantisation.py` and `sampling.py`.
"""
