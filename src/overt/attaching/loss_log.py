"""The parts of the loss in the Hugging Face Trainer's logs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from overt.attaching.api import state_in
from overt.attaching.state import Last
from overt.mechanisms.losses import Losses


class LossLog(TrainerCallback):
    """Logs `task_loss`, `kl` and `kl_weight` beside the Trainer's `loss`, which has them all in one.

    ```python
    trainer = Trainer(model, arguments, callbacks=[overt.LossLog()], …)
    ```

    Each is the average over the steps since the last log, and within a step over accumulated batches and
    processes, by their numbers of labels. They stand in `trainer.state.log_history`, and progress bars show
    them. Reporters such as TensorBoard's run before the callbacks that a Trainer is given: for their sake,
    add it by `LossLog.before_reporters(trainer)` instead. A model that nothing is attached to logs nothing
    more. Give it to every process of a distributed training.

    Some heads, BERT's classifiers among them, take the Trainer's count of labels and do not divide by it:
    `loss` then is the task's times the number of accumulated batches and processes. What is logged here is
    the mean. Where the model makes no loss (label smoothing, `compute_loss_func`), the KL is logged alone,
    and whether it joins is up to your loss.
    """

    def __init__(self) -> None:
        self._batches: list[Tensor] = []  # of a step: task, KL and weight, each times the labels, and these
        self._steps: list[Tensor] = []
        self._seen = Losses(None, None, None, None)

    @classmethod
    def before_reporters(cls, trainer: Trainer) -> LossLog:
        """Add one to a Trainer before all other callbacks, so that reporters see what it logs."""
        if not isinstance(trainer, Trainer):
            raise TypeError(f"before_reporters takes a Hugging Face Trainer, got {type(trainer).__name__}")
        made = cls()
        trainer.callback_handler.callbacks.insert(0, made)
        return made

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget what an earlier training left."""
        del args, state, control, kwargs
        self._batches, self._steps = [], []

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note an accumulated batch."""
        del args, state, control
        self._note(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the last batch of a step, and sum the step up."""
        del state, control
        self._note(kwargs["model"])
        if args.logging_strategy == "no":
            self._batches = []
        elif self._batches:
            self._steps.append(torch.stack(self._batches).sum(dim=0))
            self._batches = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the averages to a log of the training loss."""
        del args, control, kwargs
        if not logs or "loss" not in logs or not self._steps:
            return
        sums = torch.stack(self._steps)
        self._steps = []
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
        task, kl, weight = (sums[:, :3] / sums[:, 3:]).mean(dim=0).tolist()
        found = {"task_loss": task} if self._seen.task is not None else {}
        if self._seen.kl is not None:
            found |= {"kl": kl, "kl_weight": weight}
        logs.update(found)
        # The Trainer has put a copy there already.
        if state.log_history and "loss" in state.log_history[-1]:
            state.log_history[-1].update(found)

    def _note(self, model: nn.Module) -> None:
        seen = _last_trained(model)
        if seen is None:
            return
        self._seen = seen
        device = next(model.parameters()).device
        exact = torch.float32 if device.type == "mps" else torch.float64
        number = torch.as_tensor(1 if seen.items is None else seen.items, device=device, dtype=exact)
        parts = (0.0 if part is None else part for part in (seen.task, seen.kl, seen.weight))
        sums = torch.stack([torch.as_tensor(part, device=device, dtype=exact) for part in parts]) * number
        sums = sums.where(number > 0, torch.zeros_like(sums))  # of a batch without labels there is no mean
        self._batches.append(torch.cat([sums, number.view(1)]))


def _last_trained(model: nn.Module) -> Losses | None:
    """The losses of the last training forward that was not asked for yet, whichever thread it ran in."""
    made = getattr(model, "overt_losses", None)
    if isinstance(made, Losses):  # a model of overt's own
        return made
    state = state_in(model)
    if state is None or state.trainings[0].training is None:
        return None
    last, state.trainings[0] = state.trainings[0], Last()
    return last.losses()
