"""This library's attention with the names, layouts and defaults of other libraries.

- `cs336_systems.compat.sdpa`: torch's ``scaled_dot_product_attention``, a context manager that replaces it, and these
  kernels as torch's flash backend.
- `cs336_systems.compat.flash_attn`: the functions of the package ``flash_attn``, and a replacement of the package.
- `cs336_systems.compat.flex_attention`: the functions of ``torch.nn.attention.flex_attention``.
- `cs336_systems.compat.huggingface`: an ``attn_implementation`` for transformers.

Importing this package alone imports none of them.
"""
