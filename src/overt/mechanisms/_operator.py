"""Operations made of kernels, with gradients: called directly, or as one opaque operator by compilers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Maybe = tuple[Tensor | None, ...]


class Operator:
    """A function of a NamedTuple of arguments, tensors first, that returns a tuple of tensors.

    torch's dispatcher takes longer than small kernels do, so that it is gone through only where a compiler
    wants an operator.

    Args:
        name: in torch's namespace "overt".
        arguments: type of the arguments.
        forward: arguments → results.
        backward: arguments, results, gradients of the differentiable results (None where there are none),
            and which tensors' gradients are wanted → gradients of the first tensors, or None.
        shapes: arguments → empty results, for compilers.
        to_shapes: arguments, and which gradients are wanted → empty gradients of the first tensors, for
            compilers.
        trained: how many of the tensors, first, may have gradients.
        results: how many there are.
        differentiable: how many of the results, first, have gradients; the others are for `backward`.
    """

    def __init__(
        self,
        name: str,
        arguments: type,
        forward: Callable[[Any], Tensors],
        backward: Callable[[Any, Tensors, Maybe, tuple[bool, ...]], Maybe],
        shapes: Callable[[Any], Tensors],
        to_shapes: Callable[[Any, list[bool]], Tensors],
        trained: int,
        results: int,
        differentiable: int,
    ) -> None:
        kinds = get_type_hints(arguments)
        tensors = [name for name, kind in kinds.items() if kind in (Tensor, Tensor | None)]
        self.tensors, self.differentiable, self.results = len(tensors), differentiable, results
        self.arguments, self.run_backward = arguments, backward
        written = [
            f"{'Tensor?' if kind == Tensor | None else kind.__name__} {name}" for name, kind in kinds.items()
        ]
        inputs = ", ".join(written)
        saved = ", ".join(
            [f"Tensor result{i}" for i in range(results)]
            + [f"Tensor? gradient{i}" for i in range(differentiable)]
            + ["bool[] wanted"]
        )

        def returned(count: int) -> str:
            return ", ".join(["Tensor"] * count)

        self.gradients = trained
        self.operator = torch.library.custom_op(
            f"overt::{name}",
            lambda *given: forward(arguments(*given)),
            mutates_args=(),
            schema=f"({inputs}) -> ({returned(results)})",
        )
        self.operator.register_fake(lambda *given: shapes(arguments(*given)))
        self.backward_operator = torch.library.custom_op(
            f"overt::{name}_backward",
            self._whole_backward,
            mutates_args=(),
            schema=f"({saved}, {inputs}) -> ({returned(trained)})",
        )
        skipped = results + differentiable + 1
        self.backward_operator.register_fake(
            lambda *given: to_shapes(arguments(*given[skipped:]), given[skipped - 1])
        )
        torch.library.register_autograd(
            self.operator,
            lambda ctx, *gradients: self._gradients(ctx, gradients),
            setup_context=lambda ctx, inputs, output: self._setup(ctx, inputs, output),
        )
        operator = self

        class Function(torch.autograd.Function):
            """Takes the arguments as one, and beside them the tensors that may have gradients."""

            @staticmethod
            def forward(ctx: Any, given: Any, *tensors: Tensor | None) -> Tensors:
                del tensors
                found = forward(given)
                operator._setup(ctx, given, found)
                return found

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        "kernels have no gradients of gradients (create_graph=True): "
                        "`with overt.naive():` around the forward pass, plain operations do"
                    )
                saved, count = ctx.saved_tensors, operator.results
                given = arguments(*saved[count:], *ctx.numbers)
                wanted = ctx.needs_input_grad[1:]
                found = operator.run_backward(given, saved[:count], gradients[:differentiable], wanted)
                return None, *found

        self.function: Any = Function

    def __call__(self, arguments: Any) -> Tensors:
        """Run it."""
        if torch.compiler.is_compiling():
            found: Tensors = self.operator(*arguments)
            return found
        direct: Tensors = self.function.apply(arguments, *arguments[: self.gradients])
        return direct

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[self.differentiable :])
        ctx.save_for_backward(*output, *inputs[: self.tensors])
        ctx.numbers = inputs[self.tensors :]

    def _whole_backward(self, *given: Any) -> Tensors:
        results, rest = given[: self.results], given[self.results :]
        gradients, wanted, inputs = (
            rest[: self.differentiable],
            rest[self.differentiable],
            rest[self.differentiable + 1 :],
        )
        found = self.run_backward(self.arguments(*inputs), results, gradients, tuple(wanted))
        # What an operator returns may share no memory.
        taken: set[int] = set()
        alone = []
        for x in found:
            x = results[0].new_empty(0) if x is None else x
            place = x.untyped_storage().data_ptr()
            alone.append(x.clone() if place in taken else x)
            if x.numel():
                taken.add(place)
        return tuple(alone)

    def _gradients(self, ctx: Any, gradients: Maybe) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        results, tensors = saved[: self.results], saved[self.results :]
        gradients = gradients[: self.differentiable]
        wanted = list(ctx.needs_input_grad[: self.gradients])
        found = self.backward_operator(*results, *gradients, wanted, *tensors, *ctx.numbers)
        found = tuple(x if x.numel() else None for x in found)
        return (*found, *[None] * (self.tensors - self.gradients + len(ctx.numbers)))
