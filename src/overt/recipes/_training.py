"""Training for all recipes: the Hugging Face Trainer with checkpoints, step times and a progress bar."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import overt
from overt._extras import need
from overt.data.batching import Collate, E, Example, batches
from overt.mechanisms.chain import Chain
from overt.models.agreement import AgreementClassifier
from overt.recipes._cuda_graphs import GraphedLoss

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from transformers import Trainer


@torch.no_grad()
def predict(
    model: AgreementClassifier,
    examples: Sequence[E],
    collate: Collate[E],
    samples: int | None = None,
    batch: int = 64,
) -> Tensor:
    """Probabilities of singular and plural, (examples, 2); with `samples`, (samples, examples, 2)."""
    model.eval()
    device = model.step.device
    parts = []
    numbered = sorted(enumerate(examples), key=lambda item: len(item[1].tokens))  # little padding
    for start in range(0, len(numbered), batch):
        items = {name: value.to(device) for name, value in collate(numbered[start : start + batch]).items()}
        draws = [None] if samples is None else range(samples)
        logits = [
            model(
                items["input_ids"],
                items["attention_mask"],
                chain=Chain(step=model.step, sample=draw, examples=items["examples"]),
            )["logits"]
            for draw in draws
        ]
        parts.append(torch.softmax(torch.stack(logits).double(), dim=-1))
    probabilities = torch.cat(parts, dim=1).cpu()
    # back to the original order
    probabilities = probabilities[:, torch.tensor([number for number, _ in numbered]).argsort()]
    return probabilities[0] if samples is None else probabilities


def hits(probabilities: Tensor, examples: Sequence[Example]) -> list[bool]:
    """Which examples are answered correctly, from (examples, 2)."""
    targets = torch.tensor([int(example.plural) for example in examples])
    return [bool(hit) for hit in probabilities.argmax(dim=-1) == targets]


def share(flags: Sequence[bool]) -> float:
    """The share of true values."""
    return sum(flags) / len(flags)


def torch_device(name: str) -> torch.device:
    """The device that "cpu", "cuda" or "auto" means here."""
    if name not in ("cpu", "cuda", "auto"):
        raise ValueError(f"--device must be cpu, cuda or auto, got {name}")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch finds none: use cpu or auto")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def precision_of_products(device: str) -> str:
    """Of products of matrices in float32, where a training allows less: "tf32" on GPUs that have it."""
    if torch_device(device).type != "cuda" or torch.cuda.get_device_capability()[0] < 8:
        return "float32"
    return "tf32"


def in_tf32(device: str) -> dict[str, Any]:
    """Arguments of `Run` for products in TF32, where there is such a thing."""
    return {"tf32": True} if precision_of_products(device) == "tf32" else {}


@contextmanager
def short_products(device: str) -> Iterator[None]:
    """Inside, products of matrices in float32 are those of TF32, on GPUs that have it."""
    products = torch.backends.cuda.matmul
    # What all backends share, as a training with TF32 sets it, is not made this one's own.
    shared = torch.backends.fp32_precision  # type: ignore[attr-defined]
    before = "none" if products.fp32_precision == shared else products.fp32_precision
    if precision_of_products(device) == "tf32":
        products.fp32_precision = "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def is_main_process() -> bool:
    """Whether this is a training's only process, or the first of those that `accelerate launch` started."""
    return process_number() == 0


def processes(device: str = "auto") -> int:
    """Number of processes that train one model together: those that `accelerate launch` started."""
    need("accelerate", "train")
    from accelerate import PartialState  # type: ignore[import-untyped, unused-ignore]

    return int(PartialState(cpu=torch_device(device).type == "cpu").num_processes)


def check_alone(device: str, recipe: str, trainer: str) -> None:
    """Refuse several processes for what is measured after the trainings, which recipe `trainer` makes."""
    if processes(device) > 1:
        raise ValueError(
            f"{recipe} reads maps in one process: train with accelerate launch and {trainer}, and then "
            "start it alone, with the same --out"
        )


def be_quiet() -> None:
    """Leave what is said in this process to the recipe: transformers reports errors alone."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def one_thread() -> None:
    """Prepare a process that works beside others."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def leave_memory(device: str) -> None:
    """Leave a GPU's memory that this process keeps, but does not use, to others that work beside it."""
    if torch_device(device).type == "cuda":
        torch.cuda.empty_cache()


def process_number() -> int:
    """Which of a training's processes this is; 0 for the first or only one."""
    return int(os.environ.get("RANK", "0"))


def wait_for_everyone() -> None:
    """Wait for the other processes of a training, if there are any."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()


def hardware(device: str) -> str:
    """Description of the hardware that a run on that device uses."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass  # not Linux
    cpu = f"CPU {cpu}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}; {cpu}" if torch_device(device).type == "cuda" else cpu


def versions() -> dict[str, str]:
    """Versions of the installed packages that can affect a number."""
    packages = (
        "torch", "transformers", "accelerate", "tokenizers", "torch-geometric", "numba", "numpy", "scipy",
        "sacrebleu",
    )  # fmt: skip
    installed = {"python": platform.python_version(), "overt": overt.__version__}
    for package in packages:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def progress_bar(console: Console) -> Progress:
    """A progress bar with description, count and remaining time."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console)


class DivergedError(ValueError):
    """A training's loss is not a finite number.

    Attributes:
        updates: how many there were when it was seen.
    """

    def __init__(self, message: str, updates: int) -> None:
        super().__init__(message)
        self.updates = updates

    def __reduce__(self) -> tuple[Any, ...]:  # another process may have raised it
        return type(self), (str(self), self.updates)


class Run:
    """The training of one model, which resumes from `folder`/checkpoints if it was interrupted.

    Args:
        model: the model.
        folder: folder of the run; it contains a folder of checkpoints during training.
        steps: number of optimizer steps.
        checkpoints: number of checkpoints; an interruption loses at most the steps since the last one.
        seed: random seed of the batch order and of dropout.
        data: training examples.
        collate: makes a batch of examples.
        console: console for progress.
        name: description in the progress bar.
        on_step: called before each step with its number.
        device: "cpu", "cuda", or "auto": the GPU if there is one.
        evaluation: examples for `trainer.evaluate`.
        callbacks: further callbacks of the Trainer.
        loss: the Trainer's `compute_loss_func`; by default the model computes its loss.
        over: checkpoint's step → whether training had ended there, before `steps`.
        in_order: take ready-made batches in the order of `data`, rather than examples in a random one.
        pause: seconds that lie between two checkpoints at least, so that a short training has none. Only
            where a single process trains: the clocks of several would not agree.
        optimizer: of the model's parameters, in place of the Trainer's.
        schedule: of the optimizer's learning rate, in place of the Trainer's.
        graphs: on a GPU, replay each update's passes as a CUDA graph (`GraphedLoss`), unless several
            processes train; only with `in_order`, and without autocast, `loss` and accumulated gradients.
        arguments: further arguments of the Hugging Face `TrainingArguments`.
    """

    def __init__(
        self,
        model: nn.Module,
        folder: Path,
        *,
        steps: int,
        checkpoints: int,
        seed: int,
        data: Any,
        collate: Callable[[Any], Any],
        console: Console,
        name: str,
        on_step: Callable[[int], object] | None = None,
        device: str = "auto",
        evaluation: Any = None,
        callbacks: Sequence[Any] = (),
        loss: Callable[..., Tensor] | None = None,
        over: Callable[[int], bool] = lambda _: False,
        in_order: bool = False,
        pause: float = 0.0,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: torch.optim.lr_scheduler.LambdaLR | None = None,
        graphs: bool = False,
        **arguments: Any,
    ) -> None:
        from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

        self.model, self.steps, self.over = model, steps, over
        self.checkpoints = folder / "checkpoints"
        self.seconds: list[float] = []
        self.progress = progress = progress_bar(console)
        task = progress.add_task(name, total=steps)
        seconds = self.seconds
        without = {"bf16", "fp16", "gradient_accumulation_steps", "label_smoothing_factor"}
        if graphs and (not in_order or loss is not None or any(arguments.get(name) for name in without)):
            raise ValueError(
                f"graphs must be with in_order=True, without loss and {', '.join(sorted(without))}"
            )
        self.replayed = replayed = None
        if graphs and torch_device(device).type == "cuda" and processes(device) == 1:
            self.replayed = replayed = GraphedLoss(model)

        class StepTimer(TrainerCallback):
            """Calls `on_step`, measures the time of each step and shows progress."""

            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                del args, control, kwargs
                progress.update(task, completed=state.global_step)
                self.saved = time.perf_counter()

            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                del args, control, kwargs
                if on_step is not None:
                    on_step(state.global_step)
                self.began = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                del args, kwargs
                now = time.perf_counter()
                seconds.append(now - self.began)
                progress.update(task, completed=state.global_step)
                if control.should_save and now - self.saved < pause:
                    control.should_save = False
                elif control.should_save:
                    self.saved = now

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
                del args, control, kwargs
                if logs and "loss" in logs:
                    if not math.isfinite(float(logs["loss"])):
                        raise DivergedError(
                            f"{folder}: the training diverged: its loss is {logs['loss']} after "
                            f"{state.global_step:,} updates; a lower learning rate may help, with --fresh",
                            state.global_step,
                        )
                    progress.update(task, description=f"{name}, {describe_losses(logs)}")

        class OrderedTrainer(Trainer):
            """Takes the examples in their order, and does not count operations, which takes time."""

            def floating_point_ops(self, inputs: Any) -> int:
                del inputs
                return 0

            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
                if replayed is None:
                    return super().training_step(model, inputs, num_items_in_batch)
                model.train()
                return replayed(self._prepare_inputs(inputs))

            def _get_train_sampler(self, train_dataset: Any = None) -> Any:
                examples: Any = self.train_dataset if train_dataset is None else train_dataset
                return torch.utils.data.SequentialSampler(examples)

        arguments.setdefault("logging_steps", max(1, steps // 10))
        if in_order:  # one ready-made batch at a time
            arguments |= {"per_device_train_batch_size": 1, "remove_unused_columns": False}
        training_arguments = TrainingArguments(
            output_dir=str(self.checkpoints),
            max_steps=steps,
            save_steps=max(1, steps // checkpoints),
            save_total_limit=1,
            logging_nan_inf_filter=False,  # it would wait for the GPU at every step
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            use_cpu=torch_device(device).type == "cpu",
            dataloader_pin_memory=False,
            **arguments,
        )
        if in_order and training_arguments.n_gpu > 1:
            training_arguments._n_gpu = 1  # a ready-made batch is one example, not to be spread over GPUs
        self.trainer: Trainer = (OrderedTrainer if in_order else Trainer)(
            model,
            training_arguments,
            data_collator=collate,
            train_dataset=data,
            eval_dataset=evaluation,
            callbacks=[overt.LossLog(), StepTimer(), *callbacks],
            compute_loss_func=loss,
            optimizers=(optimizer, schedule),
        )
        self.trainer.remove_callback(PrinterCallback)

    def train(self) -> None:
        """Train to the end, from the last checkpoint if there is one."""
        from transformers.trainer_utils import get_last_checkpoint

        self.checkpoints.mkdir(exist_ok=True)
        for folder in self.checkpoints.iterdir():
            if not _whole(folder / "trainer_state.json"):
                shutil.rmtree(folder)  # incomplete, because the run was killed; the previous one exists
        last: str | None = get_last_checkpoint(str(self.checkpoints))  # type: ignore[no-untyped-call]
        step = 0 if last is None else int(last.rsplit("-", 1)[1])
        if last is not None and (step >= self.steps or self.over(step)):  # trained but not tested
            self._load(Path(last) / "model.safetensors")
            self.trainer.state = self.trainer.state.load_from_json(str(Path(last) / "trainer_state.json"))
        else:
            try:
                with self.progress:
                    self.trainer.train(resume_from_checkpoint=last)
            finally:
                if self.replayed is not None:
                    self.replayed.clear()

    def _load(self, path: Path) -> None:
        """Load the weights of a checkpoint.

        safetensors' `load_model` refuses LSTMs on a GPU, whose weights are parts of one block of memory.
        """
        from safetensors.torch import load_file

        stored = load_file(path)
        self.model.load_state_dict(stored, strict=False)  # fixed position embeddings are not saved
        named = list(self.model.named_parameters(remove_duplicate=False))  # tied weights are saved once
        loaded = {id(value) for name, value in named if name in stored}
        absent = [name for name, value in named if value.requires_grad and id(value) not in loaded]
        if absent:
            raise ValueError(f"{path.parent} lacks the weights of {absent[0]}: delete it")

    @property
    def step_ms(self) -> float | None:
        """Median milliseconds per step; None if an earlier run took all steps."""
        return 1000 * statistics.median(self.seconds) if self.seconds else None


def describe_losses(logs: Mapping[str, float]) -> str:
    """The losses of a log as a phrase: the task loss and, separately, the KL if there is one."""
    if "kl" not in logs or "task_loss" not in logs:  # the latter where the model does not compute the loss
        return f"loss {float(logs['loss']):.3f}"
    return f"task {logs['task_loss']:.3f}, KL {logs['kl']:.1f} × {logs['kl_weight']:g}"


def _whole(path: Path) -> bool:
    """Whether a checkpoint is complete: its state is written last."""
    try:
        json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return True


def train_classifier(
    model: AgreementClassifier,
    folder: Path,
    examples: Sequence[E],
    collate: Collate[E],
    *,
    batch: int,
    seed: int,
    **run: Any,
) -> dict[str, Any]:
    """Train on batches of similar length and move the model to the CPU; return its size and step time."""
    training = Run(
        model,
        folder,
        seed=seed,
        data=batches(examples, batch, seed),
        collate=lambda ready: collate(ready[0]),
        on_step=lambda step: model.step.fill_(step),
        per_device_train_batch_size=1,  # one ready-made batch
        remove_unused_columns=False,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        weight_decay=0.01,
        **run,
    )
    training.train()
    model.cpu()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_ms": training.step_ms,
    }


def times(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch_of: Callable[[int], dict[str, Tensor]],
    device: torch.device,
    updates: int,
    half: bool = False,
    graphs: bool = False,
) -> list[float]:
    """Milliseconds of updates of a model, after one that is not timed; making a batch does not count.

    Args:
        model: takes a batch as keyword arguments and returns the loss by that name.
        optimizer: of its parameters.
        batch_of: number of an update → its batch.
        device: where the model is.
        updates: how many to time.
        half: whether to run in bfloat16 on a GPU.
        graphs: whether to replay CUDA graphs on a GPU, as in `Run`; not with `half`.
    """
    if half and graphs:
        raise ValueError("graphs must be without half")
    replayed = GraphedLoss(model) if graphs and device.type == "cuda" else None
    seconds = []
    for update in range(updates + 1):
        batch = batch_of(update)
        began = time.perf_counter()
        inputs = {name: value.to(device) for name, value in batch.items()}
        if replayed is not None:
            replayed(inputs)
        else:
            with torch.autocast(device.type, torch.bfloat16, enabled=half and device.type == "cuda"):
                loss = model(**inputs)["loss"]
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return [1000 * each for each in seconds[1:]]
