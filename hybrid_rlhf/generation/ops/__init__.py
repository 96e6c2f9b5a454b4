"""Operations of a step: a file has the reference in torch and Triton's kernels, which tests compare with each other.

Read `choice.py` first: which implementation a device has. `gpu.py` lists Triton's kernels, `cpu_kernels.py` has the
compiled ones of a CPU (`compiled.py` compiles them). Operations are in `rows.py` (rotary positions, activations),
`norms.py`, `attention.py`, `latent.py`, `routing.py`, `experts.py`, `convolution.py`, `recurrence.py`,
`quantisation.py` and `sampling.py`, which reads `sampling_rows.py`. `triton_language.py` stands in for Triton where it
is not installed.
"""
