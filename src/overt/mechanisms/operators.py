"""Operations made of kernels, with gradients: called directly, or as one opaque operator by compilers."""

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
    functions given here see groups alone, and gradients go by the names of the fields that they belong to.

    torch's dispatcher takes longer than small kernels do, so that it is gone through only where a compiler
    wants an operator.

    Args:
        name: in torch's namespace "overt".
        groups: types of the groups, in order.
        trained: names of the tensors that may have gradients; no other tensor of the groups has one of them.
        forward: groups → results.
        backward: groups; results; gradients of the differentiable results, None where there are none; and
            which gradients are wanted, by name → gradients by name. Those left out are None.
        shapes: groups → empty results, for compilers.
        to_shapes: groups, and which gradients are wanted, by name → empty gradients by name, for compilers.
        results: how many there are.
        differentiable: how many of the results, first, have gradients; the others are for `backward`.
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
            + ["bool[] wanted"]
        )

        def returned(count: int) -> str:
            return ", ".join(["Tensor"] * count)

        self.operator = torch.library.custom_op(
            f"overt::{name}",
            lambda *fields: forward(*self._grouped(fields)),
            mutates_args=(),
            schema=f"({inputs}) -> ({returned(results)})",
        )
        self.operator.register_fake(lambda *fields: shapes(*self._grouped(fields)))
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
        """Where each field is: among all fields, and among tensors, which are saved apart from numbers."""
        self._schema: list[str] = []
        self._makers: list[tuple[Any, int, int]] = []  # of each group, and its first field and its last + 1
        tensors: list[int] = []
        names: list[str] = []  # of tensors
        for group in groups:
            first = len(self._schema)
            for field, kind in get_type_hints(group).items():
                if kind in _TENSORS:
                    tensors.append(len(self._schema))
                    names.append(field)
                written = "Tensor?" if kind == Tensor | None else kind.__name__
                self._schema.append(f"{written} {group.__name__.lower()}_{field}")
            self._makers.append((group._make, first, len(self._schema)))  # type: ignore[attr-defined]
        wrong = [name for name in self.trained if names.count(name) != 1]
        if wrong:
            raise ValueError(f"one tensor must have the name {wrong[0]!r}, got {names.count(wrong[0])}")
        every = range(len(self._schema))
        saved = [*tensors, *(place for place in every if place not in tensors)]
        self._trained_places = [tensors[names.index(name)] for name in self.trained]
        # Each picks from all fields at once, in C: these run on every call.
        self._pick_trained = itemgetter(*self._trained_places)
        self._pick_tensors, self._pick_numbers = itemgetter(*tensors), itemgetter(*saved[len(tensors) :])
        self._pick_saved = itemgetter(*(saved.index(place) for place in every))

    def _grouped(self, fields: Sequence[Any]) -> tuple[Any, ...]:
        return tuple([make(fields[first:end]) for make, first, end in self._makers])

    def _function(self) -> Any:
        operator, results, differentiable = self, self.results, self.differentiable

        class Function(torch.autograd.Function):
            """Takes the groups as one, and beside them the tensors that may have gradients."""

            @staticmethod
            def forward(ctx: Any, groups: Any, fields: Any, *trained: Tensor | None) -> Tensors:
                del trained
                found = operator._forward(*groups)
                operator._setup(ctx, fields, found)
                return found

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
                if torch.is_grad_enabled():
                    raise RuntimeError(
                        "kernels have no gradients of gradients (create_graph=True): "
                        "`with overt.naive():` around the forward pass, plain operations do"
                    )
                saved = ctx.saved_tensors
                fields = operator._pick_saved((*saved[results:], *ctx.numbers))
                wanted = dict(zip(operator.trained, ctx.needs_input_grad[2:], strict=True))
                found = operator._backward(
                    operator._grouped(fields), saved[:results], gradients[:differentiable], wanted
                )
                return None, None, *[found.get(name) for name in operator.trained]

        return Function

    def __call__(self, *groups: Any) -> Tensors:
        """Run it on its groups."""
        fields = [field for group in groups for field in group]
        if torch.compiler.is_compiling():
            found: Tensors = self.operator(*fields)
            return found
        direct: Tensors = self.function.apply(groups, fields, *self._pick_trained(fields))
        return direct

    def _setup(self, ctx: Any, fields: Sequence[Any], output: Tensors) -> None:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[self.differentiable :])
        ctx.save_for_backward(*output, *self._pick_tensors(fields))
        ctx.numbers = self._pick_numbers(fields)

    def _split(self, given: Sequence[Any]) -> tuple[Tensors, Maybe, dict[str, bool], tuple[Any, ...]]:
        """The backward operator's arguments: results, gradients, which are wanted, and groups."""
        ends = self.results, self.results + self.differentiable
        wanted = dict(zip(self.trained, given[ends[1]], strict=True))
        groups = self._grouped(given[ends[1] + 1 :])
        return tuple(given[: ends[0]]), tuple(given[ends[0] : ends[1]]), wanted, groups

    def _backward_shapes(self, *given: Any) -> Tensors:
        results, _, wanted, groups = self._split(given)
        found = self._to_shapes(groups, wanted)
        return tuple([_or_empty(found.get(name), results[0]) for name in self.trained])

    def _whole_backward(self, *given: Any) -> Tensors:
        results, gradients, wanted, groups = self._split(given)
        found = self._backward(groups, results, gradients, wanted)
        # What an operator returns may share no memory.
        taken: set[int] = set()
        alone = []
        for name in self.trained:
            x = _or_empty(found.get(name), results[0])
            place = x.untyped_storage().data_ptr()
            alone.append(x.clone() if place in taken else x)
            if x.numel():
                taken.add(place)
        return tuple(alone)

    def _gradients(self, ctx: Any, gradients: Maybe) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        results = saved[: self.results]
        fields = self._pick_saved((*saved[self.results :], *ctx.numbers))
        wanted = [ctx.needs_input_grad[place] for place in self._trained_places]
        found = self.backward_operator(*results, *gradients[: self.differentiable], wanted, *fields)
        to_fields: list[Tensor | None] = [None] * len(self._schema)
        for place, gradient in zip(self._trained_places, found, strict=True):
            to_fields[place] = gradient if gradient.numel() else None
        return tuple(to_fields)


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns no None."""
    return like.new_empty(0) if tensor is None else tensor
