"""Triton's interpreter, which runs GPU kernels where there is no GPU, without its wasted work."""

from __future__ import annotations

from typing import Any

KNOWN = ("3.6.", "3.7.")  # versions whose insides are as below; others run as they come


def trim() -> None:
    """Keep the interpreter from computing what it throws away or has computed before; results stay the same.

    It looks for overflow at every operation on integers and, unless debugging, ignores what it finds. For
    every tensor that it makes it builds a table of all types, a type's name and its shape in three forms.
    Without that it takes less than half the time.
    """
    import triton
    from triton import language as tl
    from triton.runtime import interpreter

    if not triton.__version__.startswith(KNOWN):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        object.__setattr__(builder.options, "sanitize_overflow", False)

    table, dtypes = interpreter._get_np_dtype, {}

    def dtype_of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return table(scalar)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = table(scalar)
        return dtypes[scalar.name]

    interpreter._get_np_dtype = dtype_of

    describe, described = tl.block_type.__init__, {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(element_ty, tl.pointer_type):
            describe(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in described:
            describe(self, element_ty, shape)
            described[key] = vars(self).copy()
        vars(self).update(described[key])

    tl.block_type.__init__ = block_type

    shapes: dict[Any, Any] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            numel = 1
            for size in sizes:
                numel *= size
            shapes[sizes] = tl.constexpr(numel), tl.tuple([tl.constexpr(size) for size in sizes])
        self.numel, self.shape = shapes[sizes]

    tl.tensor.__init__ = tensor
