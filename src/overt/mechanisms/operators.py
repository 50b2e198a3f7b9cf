"""Differentiable operations made of kernels: called directly, or by compilers as one opaque operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, get_type_hints

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Maybe = tuple[Tensor | None, ...]
Gradients = Mapping[str, Tensor | None]
_TENSORS = (Tensor, Tensor | None)


class Operator:
    """A function of groups of arguments, NamedTuples of tensors and numbers, that returns a tuple of tensors.

    To torch it is an operator whose arguments are the fields of all groups, one after the other. The
    functions passed here see only groups, and gradients are identified by the names of their fields.

    torch's dispatcher takes longer than small kernels do, so it is used only where a compiler needs an
    operator.

    Args:
        name: in torch's namespace "overt".
        groups: types of the groups, in order.
        trained: names of the tensors that may have gradients; each must be unique among all groups' tensors.
        forward: groups → results.
        backward: groups; results; gradients of the differentiable results, None where there are none; and
            which gradients are needed, by name → gradients by name. Missing gradients count as None.
        shapes: groups → empty results, for compilers.
        to_shapes: groups, and which gradients are needed, by name → empty gradients by name, for compilers.
        results: number of results.
        differentiable: how many results, counted from the first, have gradients; `backward` uses the others.
    """

    def __init__(
        self,
        name: str,
        groups: tuple[type, ...],
        trained: tuple[str, ...],
        forward: Callable[..., Tensors],
        backward: Callable[[Any, Tensors, Maybe, Mapping[str, bool]], Gradients],
        shapes: Callable[..., Tensors],
        to_shapes: Callable[[Any, Mapping[str, bool]], Gradients],
        results: int,
        differentiable: int,
    ) -> None:
        self.trained, self.results, self.differentiable = trained, results, differentiable
        self._forward, self._backward, self._to_shapes = forward, backward, to_shapes
        self._lay_out(groups)
        inputs = ", ".join(self._schema)
        saved = ", ".join(
            [f"Tensor result{i}" for i in range(results)]
            + [f"Tensor? gradient{i}" for i in range(differentiable)]
            + ["bool[] needed"]
        )

        def returned(count: int) -> str:
            return ", ".join(["Tensor"] * count)

        self.operator = torch.library.custom_op(
            f"overt::{name}",
            lambda *fields: forward(*self._group(fields)),
            mutates_args=(),
            schema=f"({inputs}) -> ({returned(results)})",
        )
        self.operator.register_fake(lambda *fields: shapes(*self._group(fields)))
        self.backward_operator = torch.library.custom_op(
            f"overt::{name}_backward",
            self._whole_backward,
            mutates_args=(),
            schema=f"({saved}, {inputs}) -> ({returned(len(trained))})",
        )
        self.backward_operator.register_fake(self._backward_shapes)
        torch.library.register_autograd(
            self.operator,
            lambda ctx, *gradients: self._gradients(ctx, gradients),
            setup_context=lambda ctx, inputs, output: self._setup(ctx, inputs, output),
        )
        self.function = self._function()

    def _lay_out(self, groups: tuple[type, ...]) -> None:
        """Index the fields: among all fields, and among tensors, which are saved apart from numbers."""
        self._schema: list[str] = []
        self._makers: list[tuple[Any, int, int]] = []  # per group: constructor, first field, last field + 1
        tensors: list[int] = []
        names: list[str] = []  # of the tensors
        for group in groups:
            first = len(self._schema)
            for field, kind in get_type_hints(group).items():
                if kind in _TENSORS:
                    tensors.append(len(self._schema))
                    names.append(field)
                type_name = "Tensor?" if kind == Tensor | None else kind.__name__
                self._schema.append(f"{type_name} {group.__name__.lower()}_{field}")
            self._makers.append((group._make, first, len(self._schema)))  # type: ignore[attr-defined]
        wrong = [name for name in self.trained if names.count(name) != 1]
        if wrong:
            raise ValueError(f"exactly one tensor must be named {wrong[0]!r}, got {names.count(wrong[0])}")
        every = range(len(self._schema))
        saved = [*tensors, *(place for place in every if place not in tensors)]
        self._trained_places = [tensors[names.index(name)] for name in self.trained]
        # itemgetter picks fields in C: these run on every call.
        self._pick_trained = itemgetter(*self._trained_places)
        self._pick_tensors, self._pick_numbers = itemgetter(*tensors), itemgetter(*saved[len(tensors) :])
        self._pick_saved = itemgetter(*(saved.index(place) for place in every))

    def _group(self, fields: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([make(fields[first:end]) for make, first, end in self._makers])

    def _function(self) -> Any:
        operator, results, differentiable = self, self.results, self.differentiable

        class Function(torch.autograd.Function):
            """Takes the groups as one argument, followed by the tensors that may have gradients."""

            @staticmethod
            def forward(ctx: Any, groups: Any, fields: Any, *trained: Tensor | None) -> Tensors:
                del trained
                outputs = operator._forward(*groups)
                # The others are for `backward` alone, and autograd need not know them.
                ctx.set_materialize_grads(False)
                ctx.save_for_backward(*outputs, *operator._pick_tensors(fields))
                ctx.numbers = operator._pick_numbers(fields)
                return outputs[:differentiable]

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        "kernels have no second-order gradients (create_graph=True): "
                        "run the forward pass inside `with overt.naive():`, whose plain operations do"
                    )
                saved = ctx.saved_tensors
                fields = operator._pick_saved((*saved[results:], *ctx.numbers))
                needed = dict(zip(operator.trained, ctx.needs_input_grad[2:], strict=True))
                to_fields = operator._backward(
                    operator._group(fields), saved[:results], gradients[:differentiable], needed
                )
                return None, None, *[to_fields.get(name) for name in operator.trained]

        return Function

    def __call__(self, *groups: Any) -> Tensors:
        """Run the operator on its groups; returns the differentiable results."""
        fields = [field for group in groups for field in group]
        outputs: Tensors
        if torch.compiler.is_compiling():
            outputs = self.operator(*fields)[: self.differentiable]
        else:
            outputs = self.function.apply(groups, fields, *self._pick_trained(fields))
        return outputs

    def _setup(self, ctx: Any, fields: Sequence[Any], output: Tensors) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[self.differentiable :])
        ctx.save_for_backward(*output, *self._pick_tensors(fields))
        ctx.numbers = self._pick_numbers(fields)

    def _split(self, arguments: Sequence[Any]) -> tuple[Tensors, Maybe, dict[str, bool], tuple[Any, ...]]:
        """Split the backward operator's arguments: results, gradients, which are needed, and groups."""
        ends = self.results, self.results + self.differentiable
        needed = dict(zip(self.trained, arguments[ends[1]], strict=True))
        groups = self._group(arguments[ends[1] + 1 :])
        return tuple(arguments[: ends[0]]), tuple(arguments[ends[0] : ends[1]]), needed, groups

    def _backward_shapes(self, *arguments: Any) -> Tensors:
        results, _, needed, groups = self._split(arguments)
        shapes = self._to_shapes(groups, needed)
        return tuple([_or_empty(shapes.get(name), results[0]) for name in self.trained])

    def _whole_backward(self, *arguments: Any) -> Tensors:
        results, gradients, needed, groups = self._split(arguments)
        to_fields = self._backward(groups, results, gradients, needed)
        # The tensors that an operator returns must not share memory.
        addresses: set[int] = set()
        distinct = []
        for name in self.trained:
            x = _or_empty(to_fields.get(name), results[0])
            address = x.untyped_storage().data_ptr()
            distinct.append(x.clone() if address in addresses else x)
            if x.numel():
                addresses.add(address)
        return tuple(distinct)

    def _gradients(self, ctx: Any, gradients: Maybe) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        results = saved[: self.results]
        fields = self._pick_saved((*saved[self.results :], *ctx.numbers))
        needed = [ctx.needs_input_grad[place] for place in self._trained_places]
        to_trained = self.backward_operator(*results, *gradients[: self.differentiable], needed, *fields)
        to_fields: list[Tensor | None] = [None] * len(self._schema)
        for place, gradient in zip(self._trained_places, to_trained, strict=True):
            to_fields[place] = gradient if gradient.numel() else None
        return tuple(to_fields)


def plain_gradients(
    output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None = None
) -> list[Tensor | None]:
    """Differentiable gradients of the output of plain operations, per input; None where none is needed."""
    needed = [x for x in inputs if x.requires_grad]
    gradients = iter(torch.autograd.grad(output, needed, gradient, create_graph=True))
    return [next(gradients) if x.requires_grad else None for x in inputs]


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An empty tensor in place of None, which operators cannot return."""
    return like.new_empty(0) if tensor is None else tensor
