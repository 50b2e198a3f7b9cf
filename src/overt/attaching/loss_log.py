"""Log the parts of the loss in the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from overt.attaching.api import state_in
from overt.attaching.state import Last
from overt.mechanisms.losses import Losses


class LossLog(TrainerCallback):
    """Logs `task_loss`, `kl` and `kl_weight` in addition to the Trainer's `loss`, which combines them.

    ```python
    trainer = Trainer(model, arguments, callbacks=[overt.LossLog()], …)
    ```

    Each value is an average over the steps since the last log, and within a step over accumulated batches
    and processes, weighted by their numbers of labels. The values appear in `trainer.state.log_history` and
    in progress bars. Reporters such as TensorBoard's run before the callbacks passed to the Trainer; to log
    to them too, add the callback with `LossLog.before_reporters(trainer)` instead. With a model to which
    nothing is attached, nothing is added. In distributed training, add it in every process.

    Some heads, BERT's classifiers among them, accept the Trainer's label count but do not divide by it:
    `loss` is then the task loss times the number of accumulated batches and processes. The values logged here
    are means. If the model computes no loss (label smoothing, `compute_loss_func`), only the KL is logged;
    your loss decides whether it is added.
    """

    def __init__(self) -> None:
        # Per batch of a step: task loss, KL and weight, each times the number of labels, and that number.
        self._batches: list[Tensor] = []
        self._steps: list[Tensor] = []
        self._seen = Losses(None, None, None, None)

    @classmethod
    def before_reporters(cls, trainer: Trainer) -> LossLog:
        """Add a LossLog to a Trainer before all other callbacks, so that reporters see its values."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"before_reporters takes a Hugging Face Trainer, got {type(trainer).__name__}")
        callback = cls()
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Discard what an earlier training run left."""
        del args, state, control, kwargs
        self._batches, self._steps = [], []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record an accumulated batch."""
        del args, state, control
        self._note(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the last batch of a step, and sum over the step's batches."""
        del state, control
        self._note(kwargs["model"])
        if args.logging_strategy == "no":
            self._batches = []
        elif self._batches:
            self._steps.append(torch.stack(self._batches).sum(dim=0))
            self._batches = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the averages to a log entry of the training loss."""
        del args, control, kwargs
        if not logs or "loss" not in logs or not self._steps:
            return
        sums = torch.stack(self._steps)
        self._steps = []
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        task, kl, weight = (sums[:, :3] / sums[:, 3:]).mean(dim=0).tolist()
        averages = {"task_loss": task} if self._seen.task is not None else {}
        if self._seen.kl is not None:
            averages |= {"kl": kl, "kl_weight": weight}
        logs.update(averages)
        # The Trainer has already appended a copy of the entry.
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(averages)

    def _note(self, model: nn.Module) -> None:
        seen = _last_trained(model)
        if seen is None:
            return
        self._seen = seen
        device = next(model.parameters()).device
        exact = torch.float32 if device.type == "mps" else torch.float64

        def on_device(part: Tensor | float) -> Tensor:
            if isinstance(part, Tensor):
                return part.to(device=device, dtype=exact)
            return torch.full(
                (), part, device=device, dtype=exact
            )  # a copy from the CPU would wait for the GPU

        number = on_device(1 if seen.items is None else seen.items)
        parts = (0.0 if part is None else part for part in (seen.task, seen.kl, seen.weight))
        sums = torch.stack([on_device(part) for part in parts]) * number
        sums = sums.where(number > 0, torch.zeros_like(sums))  # a batch without labels has no mean
        self._batches.append(torch.cat([sums, number.view(1)]))


def _last_trained(model: nn.Module) -> Losses | None:
    """The losses of the last training pass in any thread; None if they were taken already."""
    losses = getattr(model, "overt_losses", None)
    if isinstance(losses, Losses):  # one of overt's own models
        return losses
    state = state_in(model)
    if state is None or state.trainings[0].training is None:
        return None
    last, state.trainings[0] = state.trainings[0], Last()
    return last.losses()
