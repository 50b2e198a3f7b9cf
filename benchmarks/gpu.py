"""Fused kernels on a GPU against baselines; writes results/gpu.md and results/gpu.json.

Times are medians of forward and backward passes in bfloat16. "device" is the time of the same work replayed
as a CUDA graph, or for baselines the sum of its kernels' times: it excludes the host's share. Memory is the
peak above inputs and incoming gradients. Baselines (`gpu_rivals.py`) are checked against the kernels before
they are timed; a baseline that fails in any way is left out, and the report says why.

Each table is a part, measured in one process. Parts in gpu.json from the same device, versions and code are
kept; parts with rows that were skipped for lack of time are measured again in full.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.testing import do_bench

import overt
from gpu_forms import (
    AS_CHOSEN,
    DEVICE,
    DTYPE,
    MASKED,
    Case,
    Form,
    MismatchError,
    Shape,
    check,
    forms_of,
    groups_of,
    lengths_of,
    outputs_and_gradients,
)
from gpu_models import GROUPS, Trained, base_model, step_of, trained_forms
from gpu_report import Measurements, Note, Row, kept_before, put, report, resumed, to_measure
from gpu_rivals import Way

Run = Callable[[], object]

ROOT = Path(__file__).parent.parent
WARMING = 180.0  # seconds after which compiling in advance is stopped
LOSS_TOLERANCE = 0.15  # of a model's first loss, under dropout


@dataclass(frozen=True)
class Part:
    """A table: one attention, or, without a shape, a model's training step.

    `expected` is the number of seconds on an H200 if everything must be compiled, including profiling.
    """

    shape: Shape | None
    padded: bool
    expected: float

    @property
    def where(self) -> str:
        return f"{self.shape or 'training step'}{', padded' if self.padded else ''}"


PARTS = {
    "attention-512": Part((16, 12, 512, 64), False, 150.0),
    "attention-2048": Part((4, 16, 2048, 64), False, 125.0),
    "step": Part(None, False, 110.0),
    "attention-512-padded": Part((16, 12, 512, 64), True, 110.0),
    "step-padded": Part(None, True, 110.0),
    "attention-2048-padded": Part((4, 16, 2048, 64), True, 110.0),
    "attention-8192": Part((1, 16, 8192, 64), False, 85.0),
}
PROFILING = 9.0  # seconds per part, at the end
WARM = 0.4  # share of a part's expected time if everything was compiled in advance


# --- Measuring ---


def timed(run: Run, rep: int = 100) -> list[float]:
    """Milliseconds: the median, the 10th and the 90th percentile."""
    return [float(ms) for ms in do_bench(run, warmup=25, rep=rep, quantiles=[0.5, 0.1, 0.9])]


def milliseconds(run: Run) -> float:
    return timed(run)[0]


def replayed(run: Run) -> Run:
    """The same work, recorded as a CUDA graph."""
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def profiled(run: Run, repeats: int = 5) -> tuple[float, list[str]]:
    """The sum of the kernels' times, in milliseconds, and their names."""
    from torch.profiler import ProfilerActivity, profile

    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    events = seen.key_averages()
    total = float(sum(event.self_device_time_total for event in events))
    return total / repeats / 1e3, [str(event.key) for event in events]


def backend_of(kernels: list[str]) -> str:
    """Which of sdpa's backends ran, by its kernels' names."""
    names = " ".join(kernels).lower()
    for part, backend in (
        ("cudnn", "cuDNN"),
        ("fmha_cutlass", "memory-efficient"),
        ("mem_eff", "memory-efficient"),
        ("flash_fwd", "FlashAttention-2"),
        ("flash", "FlashAttention"),
        ("fmha", "memory-efficient"),
    ):
        if part in names:
            return backend
    return "plain operations"


def peak_mebibytes(run: Run) -> float:
    run()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


@triton.jit  # type: ignore[untyped-decorator]
def _exponentials(out, TURNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    x = (tl.program_id(0) * 256 + tl.arange(0, 256)).to(tl.float32) * 1e-6
    for _ in tl.static_range(TURNS):
        x = tl.exp2(-x)
    tl.store(out + tl.program_id(0) * 256 + tl.arange(0, 256), x)


def ceilings() -> dict[str, float]:
    """Bytes, floating-point operations and special functions per second, as measured here."""
    source = torch.randn(2**28, device=DEVICE, dtype=DTYPE)
    to = torch.empty_like(source)
    copied = milliseconds(lambda: to.copy_(source))
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    product = milliseconds(lambda: a @ b)
    out = torch.empty(2**22, device=DEVICE)
    turns = 128
    special = milliseconds(lambda: _exponentials[(2**22 // 256,)](out, TURNS=turns))
    return {
        "bytes_per_s": 2 * source.numel() * 2 / copied * 1e3,
        "flops_per_s": 2 * 8192**3 / product * 1e3,
        "special_per_s": 2**22 * turns / special * 1e3,
    }


# --- The run ---


@dataclass
class Session:
    """A run's measurements so far, and what remains to be profiled, which slows the host down for good."""

    measurements: Measurements
    options: argparse.Namespace
    date: str
    code: str
    until: float
    way: Way = "narrow"  # the first way of `gpu_rivals.plain_lse` that compiles
    rows: dict[str, list[Row]] = field(default_factory=dict)  # of the part being measured
    later: dict[str, list[tuple[Row, Run]]] = field(default_factory=dict)
    models: list[Trained] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    missing: int = 0

    @property
    def compiles(self) -> bool:
        return not self.options.no_compiled

    def leave_out(self, where: str, form: str, reason: str) -> None:
        print(f"LEFT OUT, {where}: {form}: {reason}", flush=True)
        self.rows.setdefault("left_out", []).append({"where": where, "form": form, "reason": reason})

    def late(self, where: str, form: str) -> bool:
        if time.monotonic() < self.until:
            return False
        self.missing += 1
        self.leave_out(where, form, "the time for this run was up (--minutes)")
        return True

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[list[tuple[Row, Run]]]:
        """A part of the run: if it fails, the others still run, and the report is written."""
        start, self.rows, self.missing = time.monotonic(), {}, 0
        later: list[tuple[Row, Run]] = []
        try:
            yield later
        except Exception as error:
            traceback.print_exc()
            self.missing += 1
            self.leave_out(PARTS[name].where, "the rest of it", error_line(error))
        free()
        note = {
            "date": self.date,
            "code": self.code,
            "settings": settings_of(name, self.options),
            "ceilings": self.ceilings,
            "seconds": time.monotonic() - start,
            "missing": self.missing,
            "profiled": not later,
        }
        if put(self.measurements, name, self.rows, note):
            # Rows were copied: later results must be written into the report's rows.
            rows = {
                row["form"]: row
                for row in self.measurements["attention"] + self.measurements["model"]
                if row["part"] == name
            }
            self.later[name] = [(rows[row["form"]], run) for row, run in later]
        self.measurements["way"] = self.way
        print(f"--- {name}: {note['seconds']:.0f} s", flush=True)
        report(self.measurements, self.options.out, show=False)


def settings_of(name: str, options: argparse.Namespace) -> Note:
    """The settings, besides code, that determine what a part measures."""
    settings: Note = {"compiles": not options.no_compiled, "quick": options.quick}
    if PARTS[name].shape is not None:
        return {**settings, "rep": options.rep}
    model = {
        "batch": options.batch,
        "length": options.length,
        "layers": options.layers,
        "repeats": options.repeats,
    }
    return {**settings, **model}


def code_of() -> str:
    """Hash of the code that is measured: kernels, their callers, and baselines."""
    files = [*(ROOT / "src/overt/mechanisms").rglob("*.py"), *(ROOT / "benchmarks").glob("gpu_*.py")]
    files = [file for file in files if file.name != "gpu_report.py"]
    parts = [f"{file.relative_to(ROOT)}\n{file.read_text()}" for file in sorted(files)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def error_line(error: BaseException) -> str:
    """The first lines of an error and of its cause."""
    lines, cause = [], error.__cause__
    for exception in (error,) if cause is None else (error, cause):
        first = (str(exception).strip().splitlines() or [""])[0]
        lines.append(f"{type(exception).__name__}: {first[:300]}")
    return "; from ".join(lines)


def free() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def measure_form(
    session: Session,
    case: Case,
    form: Form,
    references: dict[str, dict[str, Tensor]],
    later: list[tuple[Row, Run]],
) -> Row:
    start = time.monotonic()
    row: Row = {
        "shape": list(case.shape),
        "padded": case.padded,
        "group": form.group,
        "form": form.title,
        "name": form.name,
        "kind": form.kind,
        "device_ms": None,
        "backend": None,
    }
    row["difference"] = check(case, form, references)
    row["peak_mib"] = peak_mebibytes(form.run)
    row["ms"], row["low_ms"], row["high_ms"] = timed(form.run, session.options.rep)
    if form.kind != "rival":
        try:
            row["device_ms"] = timed(replayed(form.run), session.options.rep)[0]
        except Exception as error:
            print(f"{form.title} cannot be replayed: {error}", flush=True)
    if row["device_ms"] is None or form.name == AS_CHOSEN:
        later.append((row, form.run))
    row["seconds"] = time.monotonic() - start
    return row


def measure_attention(session: Session, part: Part, later: list[tuple[Row, Run]]) -> None:
    assert part.shape is not None
    case, references = Case(part.shape, part.padded, session.way), dict[str, dict[str, Tensor]]()
    groups = groups_of(part.shape, part.padded, session.options.quick)
    for first in (form for group in groups for form in forms_of(case, group, session.compiles)):
        form: Form | None = first
        while form is not None:
            if form.kind == "rival" and session.late(part.where, form.title):
                break
            try:
                row = measure_form(session, case, form, references, later)
            except Exception as error:
                if not isinstance(error, MismatchError | torch.OutOfMemoryError):
                    traceback.print_exc(limit=-1)
                again = "" if form.instead is None else "trying another way; "
                session.leave_out(part.where, form.title, again + error_line(error))
                form = form.instead
                free()
                continue
            if form is not first and form.way is not None:
                session.way = form.way
                case.way = form.way
            session.rows.setdefault("attention", []).append(row)
            print(row, flush=True)
            break
        free()


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def batch_of(options: argparse.Namespace, padded: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens, labels, and a mask that is False at padding."""
    batch, length = options.batch, options.length
    torch.manual_seed(0)
    ids = torch.randint(5, 30000, (batch, length), device=DEVICE)
    labels = torch.arange(batch, device=DEVICE) % 2
    if not padded:
        return ids, labels, None
    lengths = lengths_of(batch, length).to(DEVICE)
    return ids, labels, torch.arange(length, device=DEVICE) < lengths.unsqueeze(1)


def first_steps(
    form: Trained, data: tuple[Tensor, Tensor, Tensor | None], losses: dict[str, float]
) -> tuple[Callable[[], Tensor], float, float]:
    """A model's training step, its first loss, compared with ours, and peak memory."""
    step = step_of(form, *data)
    loss = float(step())
    if form.kind == "ours":
        losses[form.group] = loss
    elif form.kind == "rival" and not abs(loss - losses[form.group]) <= LOSS_TOLERANCE:
        raise MismatchError(f"the first loss is {loss:.3f}, that of ours {losses[form.group]:.3f}")
    for _ in range(2):
        step()
    return step, loss, peak_mebibytes(step)


def measure_model(session: Session, part: Part, later: list[tuple[Row, Run]]) -> None:
    """Forms take turns, so that other load on the host affects all of them."""
    options, data, where, padded = (
        session.options,
        batch_of(session.options, part.padded),
        part.where,
        part.padded,
    )
    if not session.models:
        base = base_model(options.layers)
        for group in GROUPS:
            session.models += trained_forms(base, group, session.compiles, session.way)
    steps: dict[str, Callable[[], Tensor]] = {}
    rows: dict[str, Row] = {}
    losses: dict[str, float] = {}
    for form in session.models:
        if form.kind == "rival" and session.late(where, form.title):
            continue
        start, result = time.monotonic(), None
        while result is None:
            try:
                result = first_steps(form, data, losses)
            except Exception as error:
                if not isinstance(error, MismatchError | torch.OutOfMemoryError):
                    traceback.print_exc(limit=-1)
                more = form.carried is not None and form.carried.other_way()
                session.leave_out(
                    where, form.title, ("trying another way; " if more else "") + error_line(error)
                )
                form.model.zero_grad(set_to_none=True)
                free()
                if not more:
                    break
        if result is None:
            continue
        step, loss, peak = result
        steps[form.title] = step
        rows[form.title] = {
            "shape": [options.batch, options.length],
            "padded": padded,
            "group": form.group,
            "form": form.title,
            "name": form.name,
            "kind": form.kind,
            "peak_mib": peak,
            "first_loss": loss,
            "backend": None,
            "device_ms": None,
            "seconds": time.monotonic() - start,
        }
        print(rows[form.title], flush=True)
        free()
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(options.repeats):
        for name, step in steps.items():
            if turn >= 5 and seen[name][-1] > 100.0:  # slow forms, whose times vary less, get fewer turns
                continue
            synchronize()
            start = time.perf_counter()
            step()
            synchronize()
            seen[name].append(1e3 * (time.perf_counter() - start))
    for name, times in seen.items():
        row = rows[name]
        row |= {"ms": statistics.median(times), "low_ms": min(times), "high_ms": max(times)}
        row["turns"] = len(times)
        session.rows.setdefault("model", []).append(row)
        print(name, times[:3], row["ms"], flush=True)
        if row["kind"] == "plain":
            later.append((row, steps[name]))


def profile_later(session: Session) -> None:
    """Device times of baselines, and sdpa's backends; last, since profiling slows the host down for good."""
    for name, later in session.later.items():
        start = time.monotonic()
        for row, run in later:
            try:
                total, kernels = profiled(run)
            except Exception as error:
                left = {"where": "profiling", "form": row["form"], "reason": error_line(error), "part": name}
                session.measurements["left_out"].append(left)
                continue
            if row["device_ms"] is None:
                row["device_ms"] = total
            free()
            if row["name"] in (AS_CHOSEN, MASKED):
                row["backend"] = backend_of(kernels)
                if row["kind"] == "plain":
                    row["kernels"] = [
                        name for name in kernels if "sdpa" in name or "fmha" in name or "flash" in name
                    ]
        session.measurements["parts"][name]["profiled"] = True
        session.measurements["parts"][name]["profiling_seconds"] = time.monotonic() - start
        report(session.measurements, session.options.out, show=False)
        print(f"--- profiling {name}: {time.monotonic() - start:.0f} s", flush=True)


# --- Compiling in advance ---


def jobs_of(names: list[str], options: argparse.Namespace) -> list[tuple[str, str]]:
    """Parts and their groups, in the order in which parts are measured."""
    jobs = []
    for name in names:
        part = PARTS[name]
        groups = GROUPS if part.shape is None else groups_of(part.shape, part.padded, options.quick)
        jobs += [(name, group) for group in groups if group != "plain"]
    return jobs


def compile_job(name: str, group: str, options: argparse.Namespace) -> None:
    """Run compiled forms once, to fill the compilers' caches on disk."""
    part, way = PARTS[name], options.way
    if part.shape is not None:
        case = Case(part.shape, part.padded, way)
        for first in forms_of(case, group, not options.no_compiled):
            form: Form | None = first if first.compiles else None
            while form is not None:
                try:
                    for quiet in (True, False):
                        outputs_and_gradients(case, form, quiet)
                    break
                except Exception as error:  # reported again when it is measured
                    print(f"compiling {name}, {form.title}: {error_line(error)}", flush=True)
                    form = form.instead
            free()
        return
    data = batch_of(options, part.padded)
    for trained in trained_forms(base_model(2), group, not options.no_compiled, way):
        more = trained.compiles
        while more:
            try:
                step_of(trained, *data)()
                break
            except Exception as error:
                print(f"compiling {name}, {trained.title}: {error_line(error)}", flush=True)
                more = trained.carried is not None and trained.carried.other_way()
        free()


def compile_share(options: argparse.Namespace) -> None:
    """Run a process's share of all jobs, `--share NUMBER/COUNT`."""
    number, count = (int(x) for x in options.share.split("/"))
    for name, group in jobs_of(options.parts, options)[number::count]:
        start = time.monotonic()
        try:
            compile_job(name, group, options)
        except Exception as error:
            print(f"compiling {name}, {group}: {error_line(error)}", flush=True)
        free()
        print(f"compiled {name}, {group}: {time.monotonic() - start:.0f} s", flush=True)


def compile_all(names: list[str], session: Session) -> None:
    """Fill the compilers' caches with several processes at once; the rest is compiled later."""
    options, start = session.options, time.monotonic()
    count = min(options.processes, len(jobs_of(names, options)))
    if count < 2:
        return
    command = [sys.executable, __file__, "--parts", ",".join(names), "--way", session.way]
    command += ["--batch", str(options.batch), "--length", str(options.length)]
    command += ["--no-compiled"] * options.no_compiled + ["--quick"] * options.quick
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    children = [
        subprocess.Popen([*command, "--share", f"{number}/{count}"], env=environment)
        for number in range(count)
    ]
    for child in children:
        try:
            child.wait(timeout=max(0.0, start + WARMING - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=10.0)
            if child.poll() is None:
                child.kill()
                child.wait()
    print(f"--- compiling in {count} processes: {time.monotonic() - start:.0f} s", flush=True)


# --- The command ---


def names_of(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(unknown)}; parts are {', '.join(PARTS)}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=names_of, default=list(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--fresh", action="store_true", help="measure all parts again, even complete ones")
    parser.add_argument("--resume", action="store_true", help="keep parts even if the code has changed")
    parser.add_argument("--no-compiled", action="store_true", help="skip compiled baselines")
    parser.add_argument("--quick", action="store_true", help="few forms and repeats, 2 layers")
    parser.add_argument("--batch", type=int, default=16, help="of the whole model")
    parser.add_argument("--length", type=int, default=512, help="of the whole model")
    parser.add_argument("--layers", type=int, default=12, help="of the whole model")
    parser.add_argument("--repeats", type=int, default=30, help="steps of the whole model")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds for which a form is repeated")
    parser.add_argument(
        "--minutes",
        type=float,
        default=9.0,
        help="time limit; parts and baselines that do not fit are skipped",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=max(1, min(8, (os.cpu_count() or 1) // 2)),
        help="parallel processes for compiling in advance; 1 for none",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--way", default="narrow", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rep, options.repeats, options.layers = 20, 5, 2
    return options


def measure(session: Session, names: list[str]) -> None:
    """Measure the parts that fit into the time limit; the first part in any case."""
    measurements, options = session.measurements, session.options
    deadline = session.until  # for everything measured before profiling
    measurements["ceilings"] = session.ceilings = ceilings()
    free()
    compile_all(names, session)
    share = WARM if options.processes > 1 else 1.0
    for name in names:
        part = PARTS[name]
        before = measurements["parts"].get(name)
        if name != names[0] and time.monotonic() + share * part.expected > deadline:
            print(f"--- {name}: no time left; run the command again", flush=True)
            if before is None and not any(row.get("part") == name for row in measurements["left_out"]):
                reason = "the time for this run was up (--minutes)"
                row = {"where": part.where, "form": "all of it", "reason": reason, "part": name}
                measurements["left_out"].append(row)
            continue
        with session.part(name) as later:
            (measure_model if part.shape is None else measure_attention)(session, part, later)
    profile_later(session)


def main() -> None:
    options = arguments()
    if not torch.cuda.is_available():
        raise SystemExit("bench-gpu needs a CUDA device; torch finds none")
    import transformers

    torch._dynamo.config.recompile_limit = 64  # one function is compiled for many shapes
    # A compiled kernel's variants must be timed here, not by processes that share the GPU.
    torch._inductor.config.autotune_local_cache = False
    if options.share is not None:
        compile_share(options)
        return
    start, code = time.monotonic(), code_of()
    new: Measurements = {
        "command": "make bench-gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "overt": overt.__version__,
        "rep": options.rep,
        "layers": options.layers,
        "way": "narrow",
        "ceilings": {},
        "parts": {},
        "attention": [],
        "model": [],
        "left_out": [],
    }
    measurements = resumed(kept_before(options.out), new)
    settings = {name: settings_of(name, options) for name in options.parts}
    chosen = to_measure(measurements, settings, None if options.resume else code, options.fresh)
    print(
        f"kept: {[name for name in measurements['parts'] if name not in chosen]}; to measure: {chosen}",
        flush=True,
    )
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    until = start + 60.0 * options.minutes - PROFILING * len(chosen)
    session = Session(measurements, options, date, code, until, measurements["way"])
    try:
        if chosen:
            measure(session, list(chosen))
    finally:
        measurements["seconds"] = time.monotonic() - start
        report(measurements, options.out)
    print(f"{measurements['seconds']:.0f} s; {len(measurements['left_out'])} left out", flush=True)
    if again := to_measure(measurements, settings, None if options.resume else code):
        print(f"run the command again for {', '.join(again)}", flush=True)


if __name__ == "__main__":
    main()
