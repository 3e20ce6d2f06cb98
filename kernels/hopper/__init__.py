"""Gluon kernels for Hopper (sm_90a): copies by the tensor memory accelerator, asynchronous products, warps with roles.

`attention` does not choose them yet. The forward was right on an H200 in 252 calls (odd lengths, grouped heads,
windows, both 16-bit dtypes) before a counter shared out its tiles, and before it added up weights without looking for
the largest score. As it is now it has only been compiled, as has the backward. On a Hopper GPU both are tested by
`HOPPER=1 pytest -m gpu tests/kernels/test_hopper.py`.
"""
