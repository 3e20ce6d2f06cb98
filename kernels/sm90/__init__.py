"""Gluon kernels for Hopper (sm_90a): copies by the tensor memory accelerator, asynchronous products, warps with roles.

`coverage` says which calls they compute; the portable kernels compute the others.
"""
