"""How fast the kernels are, beside their peers and the machine's own peaks.

`python -m jax_fp8 bench` is the way in; nothing here is for the code of users.
"""
