"""Values with named fields in kernels: Triton's aggregates."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from typing_extensions import dataclass_transform

from ...versions import aggregate


@dataclass_transform()
def struct(cls: Any) -> Any:
    """An aggregate that is constructed from its fields in order, as Triton itself provides since 3.8."""
    # No constexpr: Triton 3.6 and 3.7 hash constants of the same name in the order of their addresses, which differs
    # from process to process, and so would the keys of all kernels on disk.
    fields = tuple((name, kind is gl.constexpr) for name, kind in cls.__annotations__.items())

    @gluon.constexpr_function
    def __init__(self, *values):
        def constants(value):
            # Of a tuple, Triton leaves numbers bare that it knows, and then cannot pass it to a warp's role.
            if isinstance(value, gl.tuple):
                return gl.tuple([constants(item) for item in value])
            return gl.constexpr(value) if isinstance(value, (int, float)) else value

        for field, value in zip(fields, values, strict=True):
            setattr(self, field[0], gl.constexpr(value) if field[1] else constants(value))

    cls.__init__ = __init__
    return aggregate(cls)
