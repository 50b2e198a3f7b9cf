"""Triton's interpreter, which runs GPU kernels where there is no GPU, without work that has no effect."""

from __future__ import annotations


def trim() -> None:
    """Patch the interpreter so that it spends no time on results that it throws away or has had before.

    It looks for overflow at every integer operation and, unless debugging, ignores what it finds; and for
    every tensor that it makes it builds a table of all types anew. Together that is half of its time.
    """
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        object.__setattr__(builder.options, "sanitize_overflow", False)
    anew, known = interpreter._get_np_dtype, {}

    def once(dtype):  # type: ignore[no-untyped-def]
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        if isinstance(scalar, tl.pointer_type):
            return anew(scalar)
        if scalar.name not in known:
            known[scalar.name] = anew(scalar)
        return known[scalar.name]

    interpreter._get_np_dtype = once
