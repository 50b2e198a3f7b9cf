"""How much weight of the KL a pretrained model tolerates: fine-tunes one with `Bayesian` at several weights.

Two stages, on CoLA, MRPC and SST-2. The first holds out a tenth of the training rows and chooses: the largest
weight above 0 whose mean paired difference from plain attention is at least −1 point on every task, and under
which no seed's predictions are all of one class; if none passes, the smallest. The second trains plain
attention, no KL, the chosen weight and weight 1 with other seeds, and reports on the development rows; it
does not choose again. Runs are parallel; each is saved as soon as it finishes, so that an interrupted
benchmark resumes where it stopped. Writes results/kl_weight.json and results/kl_weight.md.

`--gradients` measures instead the size of the KL's gradient relative to the task's, by length, before
training.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor

import overt
from overt import _check
from overt._files import write_whole
from overt.data.glue import TASKS, Row, load
from overt.recipes._runs import check_model
from overt.recipes._training import hardware, torch_device, versions

RESULTS = Path(__file__).parent.parent / "results"
WEIGHTS = (0.0, 0.003, 0.01, 0.03, 0.1, 1.0)
STEPS = {"CoLA": 800, "MRPC": 460, "SST-2": 1000}
BATCH, LEARNING_RATE, WARMUP, LONGEST = 32, 1e-4, 0.06, 128
CHOOSING, REPORTING = (0, 1, 2), (10, 11, 12, 13, 14)  # seeds
ALLOWED = -1.0  # points
SAMPLES, SAMPLED = 20, 256  # posterior samples per example; examples that are sampled
PLAIN, OFFICIAL = "plain", "official, "


class Job(NamedTuple):
    """One training run. `form` is "plain", a weight of the KL, or "official, " and a weight."""

    stage: str
    task: str
    form: str
    seed: int


class Place(NamedTuple):
    """The model, data, device and steps of all jobs."""

    model: str
    data: Path
    device: str
    steps: dict[str, int]


def mechanism_of(form: str) -> overt.Bayesian | None:
    """The mechanism that a form attaches; current defaults except for the weight."""
    if form == PLAIN:
        return None
    if form.startswith(OFFICIAL):
        return overt.Bayesian(preset="official", kl_weight=float(form.removeprefix(OFFICIAL)))
    return overt.Bayesian(kl_weight=float(form))


@functools.cache
def rows_of(data: Path, task: str) -> tuple[list[Row], list[Row]]:
    splits = load(task, data)
    return splits.train, splits.dev[task]


def parts_of(data: Path, job: Job) -> tuple[list[Row], list[Row]]:
    """Training and evaluation rows. For choosing, a tenth is held out, a different one for each seed."""
    train, dev = rows_of(data, job.task)
    if job.stage == "report":
        return train, dev
    rows = list(train)
    Random(job.seed).shuffle(rows)
    held = len(rows) // 10
    return rows[held:], rows[:held]


def encode(rows: list[Row], tokenizer: Any) -> list[dict[str, Any]]:
    texts = [list(column) for column in zip(*(row.texts for row in rows), strict=True)]
    codes = tokenizer(*texts, truncation=True, max_length=LONGEST)
    return [
        {**{key: values[place] for key, values in codes.items()}, "labels": row.label}
        for place, row in enumerate(rows)
    ]


def run(job: Job, place: Place) -> dict[str, Any]:
    """Fine-tune and evaluate one form."""
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    start = time.perf_counter()
    tokenizer: Any = AutoTokenizer.from_pretrained(place.model)
    train, test = parts_of(place.data, job)
    transformers.set_seed(job.seed)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        place.model, num_labels=2, dtype=torch.float32
    )
    mechanism = mechanism_of(job.form)
    if mechanism is not None:
        overt.attach(model, mechanism, seed=job.seed)
    steps = place.steps[job.task]
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),  # nothing is saved
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=128,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="linear",
        warmup_steps=round(WARMUP * steps),
        save_strategy="no",
        logging_steps=max(1, steps // 8),
        logging_nan_inf_filter=False,  # it would wait for the GPU at every step
        report_to="none",
        disable_tqdm=True,
        seed=job.seed,
        use_cpu=torch_device(place.device).type == "cpu",
        dataloader_pin_memory=False,
    )
    collator = transformers.DataCollatorWithPadding(tokenizer)
    trainer = Trainer(
        model,
        arguments,
        data_collator=collator,
        train_dataset=encode(train, tokenizer),
        callbacks=[overt.LossLog()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    row = {**job._asdict(), **evaluate(model.eval(), encode(test, tokenizer), collator, job.task)}
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    row["train_task"] = logs[-1].get("task_loss", logs[-1]["loss"])
    row["train_kl"] = logs[-1].get("kl")
    row["seconds"] = time.perf_counter() - start
    return row


@torch.no_grad()
def evaluate(model: Any, test: list[dict[str, Any]], collator: Any, task: str) -> dict[str, Any]:
    """The score in points of 100, whether all predictions are equal, the KL, spreads and maps' entropy."""
    random = hasattr(model, "overt_state")
    test = sorted(test, key=lambda row: len(row["input_ids"]))
    predicted: list[int] = []
    losses, kls = [], []
    for batch in batches(test, collator, model.device):
        size = len(batch["labels"])
        if random:
            with overt.with_kl(model):
                output = model(**batch)
            kls.append(size * float(overt.kl(model)))
        else:
            output = model(**batch)
        losses.append(size * float(output.loss))
        predicted += output.logits.argmax(dim=-1).tolist()
    labels = [row["labels"] for row in test]
    score = accuracy if "accuracy" in TASKS[task].metrics else matthews
    sampled = test[:: max(1, len(test) // SAMPLED)][:SAMPLED]
    if not random:
        model.set_attn_implementation("eager")
    entropies, spreads, shared = [], [], []
    for batch in batches(sampled, collator, model.device):
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        maps = model(**inputs, output_attentions=True).attentions
        entropies.append(flatness(torch.stack(maps), inputs["attention_mask"]))
        if random:
            drawn = overt.posterior(model, inputs, SAMPLES, rows=1280)
            assert isinstance(drawn, overt.Posterior)
            assert drawn.mutual_information is not None
            spreads.append(drawn.spread[:, 1])
            shared.append(drawn.mutual_information)
    return {
        "score": 100.0 * float(score(labels, predicted)),
        "collapsed": len(set(predicted)) == 1,
        "rows": len(test),
        "nll": sum(losses) / len(test),
        "kl": sum(kls) / len(test) if random else None,
        "flatness": float(torch.cat(entropies).mean()),
        "spread": float(torch.cat(spreads).mean()) if random else None,
        "mutual_information": float(torch.cat(shared).mean()) if random else None,
    }


def accuracy(labels: list[int], predicted: list[int]) -> float:
    return statistics.fmean(label == guess for label, guess in zip(labels, predicted, strict=True))


def matthews(labels: list[int], predicted: list[int]) -> float:
    """Correlation of two columns of 0 and 1; 0 if one is constant."""
    if len(set(labels)) < 2 or len(set(predicted)) < 2:
        return 0.0
    return statistics.correlation(labels, predicted)


def batches(
    rows: list[dict[str, Any]], collator: Any, device: Any, size: int = 64
) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(rows), size):
        ready = collator(rows[start : start + size])
        yield {key: value.to(device) for key, value in ready.items()}


def flatness(maps: Tensor, mask: Tensor) -> Tensor:
    """Entropy of attention rows relative to uniform rows, per example: mean over layers, heads, queries.

    maps is (layers, batch, heads, query, key), mask (batch, key), 1 at tokens.
    """
    entropy = torch.special.entr(maps.double()).sum(dim=-1).mean(dim=(0, 2))  # (batch, query)
    lengths = mask.sum(dim=-1)
    relative: Tensor = (entropy * mask).sum(dim=-1) / lengths / lengths.double().log()
    return relative


# --- Both stages ---


def jobs_of(stage: str, tasks: list[str], chosen: float | None) -> list[Job]:
    """The training runs of a stage, longest first."""
    if stage == "choose":
        forms, seeds = [PLAIN, *(f"{weight:g}" for weight in WEIGHTS)], list(CHOOSING)
    else:
        assert chosen is not None
        weights = dict.fromkeys((0.0, chosen, 1.0))
        forms, seeds = (
            [PLAIN, *(f"{weight:g}" for weight in weights), f"{OFFICIAL}{chosen:g}"],
            list(REPORTING),
        )
    order = sorted(tasks, key=lambda task: -STEPS[task])
    return [Job(stage, task, form, seed) for task in order for seed in seeds for form in forms]


def runs_of(rows: list[dict[str, Any]], stage: str, task: str, form: str) -> dict[int, dict[str, Any]]:
    """Runs by seed."""
    return {
        row["seed"]: row for row in rows if (row["stage"], row["task"], row["form"]) == (stage, task, form)
    }


def differences(rows: list[dict[str, Any]], stage: str, task: str, form: str) -> list[float]:
    """Score minus that of plain attention, by seed."""
    ours, plain = runs_of(rows, stage, task, form), runs_of(rows, stage, task, PLAIN)
    return [ours[seed]["score"] - plain[seed]["score"] for seed in sorted(ours) if seed in plain]


def passes(rows: list[dict[str, Any]], tasks: list[str], form: str) -> bool:
    """Whether a weight passes the rule on every task."""
    gained = [statistics.fmean(differences(rows, "choose", task, form)) for task in tasks]
    collapsed = any(
        row["collapsed"] for task in tasks for row in runs_of(rows, "choose", task, form).values()
    )
    return not collapsed and min(gained) >= ALLOWED


def choose(rows: list[dict[str, Any]], tasks: list[str]) -> tuple[float, bool]:
    """The weight that the rule chooses, and whether it passes."""
    passing = [weight for weight in WEIGHTS if weight > 0.0 and passes(rows, tasks, f"{weight:g}")]
    return (max(passing), True) if passing else (min(weight for weight in WEIGHTS if weight > 0.0), False)


def work(job: Job, place: Place) -> dict[str, Any]:
    try:
        return run(job, place)
    except torch.OutOfMemoryError as error:  # too many in parallel: the next run tries again
        return {**job._asdict(), "error": str(error)[:200]}


def measure(jobs: list[Job], place: Place, results: dict[str, Any], out: Path, processes: int) -> None:
    """Run the remaining jobs in parallel, and save each result as it arrives."""
    done = {Job(row["stage"], row["task"], row["form"], row["seed"]) for row in results["runs"]}
    todo = [job for job in jobs if job not in done]
    if not todo:
        return
    results["hardware"] = hardware(place.device)
    results["versions"] = versions()
    print(f"{len(todo)} of {len(jobs)} training runs to go, {processes} in parallel", flush=True)
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(todo))) as pool:
        turns = pool.imap_unordered(functools.partial(work, place=place), todo)
        for count, row in enumerate(turns, start=1):
            left = (time.perf_counter() - start) / count * (len(todo) - count)
            name = f"{row['stage']}, {row['task']}, {row['form']}, seed {row['seed']}"
            if "error" in row:
                print(f"{name}: {row['error']}", flush=True)
                continue
            results["runs"].append(row)
            write_whole(out / "kl_weight.json", json.dumps(results, indent=1) + "\n")
            remark = " (all one class)" if row["collapsed"] else ""
            print(f"{name}: {row['score']:.1f}{remark}; {left:.0f} s to go", flush=True)


# --- The report ---


def number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}".replace("-", "−")


def interval(gained: list[float]) -> str:
    """The mean of paired differences, with Student's 95 % interval."""
    from scipy import stats

    mean = statistics.fmean(gained)
    half = float(stats.t.ppf(0.975, len(gained) - 1)) * statistics.stdev(gained) / len(gained) ** 0.5
    return f"{number(mean, 2)} ({number(mean - half)} … {number(mean + half)})"


def table(rows: list[dict[str, Any]], stage: str, task: str, forms: list[str]) -> list[str]:
    """Every form of a task in a stage, as Markdown."""
    heads = [
        "weight",
        "score",
        "− plain, by seed",
        "mean (95 %)",
        "one class",
        "KL",
        "KL at 0",
        "spread",
        "flatness",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    zero = runs_of(rows, stage, task, "0")

    def mean(runs: dict[int, dict[str, Any]], name: str) -> float | None:
        values = [row[name] for row in runs.values() if row[name] is not None]
        return statistics.fmean(values) if values else None

    for form in forms:
        runs = runs_of(rows, stage, task, form)
        if not runs:
            continue
        scores = [row["score"] for row in runs.values()]
        gained = [] if form == PLAIN else differences(rows, stage, task, form)
        spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
        collapsed = sum(row["collapsed"] for row in runs.values())
        cells = [
            form,
            f"{number(statistics.fmean(scores))}{spread}",
            ", ".join(f"{'+' if value > 0 else ''}{number(value)}" for value in gained) or "–",
            interval(gained) if len(gained) > 1 else "–",
            f"{collapsed} of {len(runs)}",
            number(mean(runs, "kl"), 2),
            "–" if form == PLAIN or form.startswith(OFFICIAL) else number(mean(zero, "kl"), 2),
            number(mean(runs, "spread"), 3),
            number(mean(runs, "flatness"), 3),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def report(results: dict[str, Any], tasks: list[str], out: Path) -> None:
    rows = results["runs"]
    chosen, passed = choose(rows, tasks)
    how = "the largest that passes" if passed else "none passes; the smallest that was measured"
    lines = [
        "# The weight of the KL",
        "",
        f"`python benchmarks/kl_weight.py --model PATH --data DIR`. {results['hardware']}; "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".",
        "",
        f"The model is {results['model']}, fine-tuned whole in float32: AdamW, learning rate "
        f"{LEARNING_RATE:g} after a warm-up of {WARMUP:.0%} and falling to 0, batches of {BATCH}, "
        + ", ".join(f"{task} {results['steps'][task]} steps" for task in tasks)
        + f". Everything of `Bayesian` but its `kl_weight` is at its default; {OFFICIAL.rstrip(', ')} is "
        '`preset="official"`. Scores are points: 100 × Matthews\' correlation for CoLA, accuracy in % for '
        "the others; ± is the standard deviation of the seeds, and intervals are Student's over seeds, one "
        "by one, not corrected for their number. KL: per example, summed over layers, in "
        f"evaluation. Spread: standard deviation of the predicted probability over {SAMPLES} posterior "
        "samples. Flatness: entropy of attention rows over that of uniform ones.",
        "",
        f"**Chosen: {chosen:g}** ({how}). The rule: mean paired difference from plain attention ≥ "
        f"{ALLOWED:g} point on every task, and no seed with all predictions of one class, over seeds "
        f"{', '.join(map(str, CHOOSING))} on a tenth of the training rows, held out anew for each seed. "
        "Pairs have equal seeds: equal first weights of the head, equal order of batches.",
    ]
    weights = [PLAIN, *(f"{weight:g}" for weight in WEIGHTS)]
    for task in tasks:
        held = next(iter(runs_of(rows, "choose", task, PLAIN).values()))["rows"]
        lines += ["", f"## {task}: {held} rows of train held out", "", *table(rows, "choose", task, weights)]
    reported = [PLAIN, *(f"{weight:g}" for weight in dict.fromkeys((0.0, chosen, 1.0)))]
    for task in tasks:
        runs = runs_of(rows, "report", task, PLAIN)
        if runs:
            size = next(iter(runs.values()))["rows"]
            lines += ["", f"## {task}: the {size} rows of dev, seeds {', '.join(map(str, REPORTING))}", ""]
            lines += table(rows, "report", task, [*reported, f"{OFFICIAL}{chosen:g}"])
    write_whole(out / "kl_weight.md", "\n".join(lines) + "\n")
    print("\n".join(lines))


# --- Sizes of the gradients ---


def gradients(place: Place, out: Path) -> None:
    """Norms of the task's and the KL's gradients for query and key weights, by length, before training."""
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(place.model)
    train, _ = rows_of(place.data, "SST-2")
    text = " ".join(row.texts[0] for row in train[:2000]).split()
    lines = [
        "| tokens | task | KL | KL ÷ task | KL ÷ task at the default weight |",
        "|---:|---:|---:|---:|---:|",
    ]
    transformers.set_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        place.model, num_labels=2, dtype=torch.float32
    )
    overt.attach(model, overt.Bayesian(kl_weight=1.0))
    model.train()
    of_scores = [p for name, p in model.named_parameters() if ".query." in name or ".key." in name]
    for length in (10, 20, 40, 80, 160, 320):
        norms = []
        for turn in range(4):
            chunks = [" ".join(text[(turn * 16 + place) * length :][:length]) for place in range(16)]
            batch = tokenizer(
                chunks, return_tensors="pt", truncation=True, max_length=length, padding="max_length"
            )
            loss = model(**batch, labels=torch.arange(16) % 2).loss
            penalty = overt.penalty(model)
            parts = [loss - penalty, penalty]
            tensors = [torch.autograd.grad(part, of_scores, retain_graph=True) for part in parts]
            norms.append([torch.cat([g.flatten() for g in part]).norm().item() for part in tensors])
        task, kl = (statistics.median(values) for values in zip(*norms, strict=True))
        default = overt.Bayesian().kl_weight
        cells = [str(length), f"{task:.3f}", f"{kl:.3f}", f"{kl / task:.2f}", f"{default * kl / task:.4f}"]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    write_whole(out / "kl_weight_gradients.md", "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--name", help="the model's name in the report; default: the folder's name")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds GLUE's folders")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--processes", type=int, default=4, help="parallel training runs")
    parser.add_argument("--stage", choices=("both", "choose", "report"), default="both")
    parser.add_argument("--tasks", default=",".join(STEPS), help="tasks, separated by commas")
    parser.add_argument("--steps", type=int, help="steps of every training run, for trial runs")
    parser.add_argument("--gradients", action="store_true", help="measure gradients instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        check_model(options.model)
        tasks = options.tasks.split(",")
        for task in tasks:
            _check.one_of("--tasks", task, STEPS)
            rows_of(options.data, task)
        torch_device(options.device)
    except (OSError, ValueError) as error:
        raise SystemExit(f"kl_weight: {error}") from None
    steps = STEPS if options.steps is None else dict.fromkeys(STEPS, options.steps)
    place = Place(options.model, options.data, options.device, steps)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.gradients:
        gradients(place, options.out)
        return
    file = options.out / "kl_weight.json"
    settings = {
        "model": options.name or Path(options.model).name,
        "steps": steps,
        "batch": BATCH,
        "learning_rate": LEARNING_RATE,
    }
    results = json.loads(file.read_text()) if file.exists() else {**settings, "runs": []}
    for name, value in settings.items():
        if results.get(name) != value:
            raise SystemExit(
                f"kl_weight: {file} was measured with {name} {results.get(name)}: choose another --out"
            )
    if options.stage != "report":
        measure(jobs_of("choose", tasks, None), place, results, options.out, options.processes)
    chosen, _ = choose(results["runs"], tasks)
    if options.stage != "choose":
        measure(jobs_of("report", tasks, chosen), place, results, options.out, options.processes)
    report(results, tasks, options.out)


if __name__ == "__main__":
    main()
