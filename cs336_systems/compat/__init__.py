"""This library's attention under names, layouts and defaults that programs already use.

- :mod:`cs336_systems.compat.sdpa`: torch's ``scaled_dot_product_attention``, and a way to take its place.
- :mod:`cs336_systems.compat.flash_attn`: the functions of the package ``flash_attn``, and a way to stand in for it.
- :mod:`cs336_systems.compat.huggingface`: an ``attn_implementation`` for transformers.

Importing this package alone imports none of them.
"""
