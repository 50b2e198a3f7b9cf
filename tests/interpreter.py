"""Triton's interpreter, which runs GPU kernels where there is no GPU, without its wasted work."""

from __future__ import annotations

from typing import Any

KNOWN = ("3.6.", "3.7.")  # versions whose insides are as below; others run as they come


def trim() -> None:
    """Keep the interpreter from computing what it throws away or has computed before; results stay the same.

    It looks for overflow at every operation on integers and, unless debugging, ignores what it finds. For
    every tensor that it makes it builds a table of all types, a type's name and its shape in three forms.
    It compares the shapes of any two tensors size by size, and whenever one kernel's function calls another
    it looks through all of Triton's language for what to replace, which is replaced already. Without that it
    takes less than half the time.
    """
    import triton
    from triton import language as tl
    from triton.language.semantic import TritonSemantic
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

    describe, described, same = tl.block_type.__init__, {}, {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if isinstance(element_ty, tl.pointer_type):
            describe(self, element_ty, shape)
            return
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in described:
            describe(self, element_ty, shape)
            self.shape = same.setdefault(key[1:], self.shape)  # equal ones are one object, as used below
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

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block(), rhs.type.is_block()
        if blocks == (False, False) or (blocks == (True, True) and lhs.type.shape is rhs.type.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = broadcast_unless_equal

    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
        if any(tl.core.is_builtin(one) for one in (tl.tensor.__add__, *[module.load for module in modules])):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
