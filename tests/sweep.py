"""Try `attach` on every model type of the installed transformers (`make families`).

Two worker processes judge one type after another (`zoo.checks.judge`); one that takes too long or dies is
replaced, and the type gets the blame. Verdicts are kept as they come, so an interrupted run goes on where it
was, as long as neither the library nor these checks have changed. At the end they are written to
`results/families.json`, which two runs can be compared by (`--diff`), and into `docs/support.md`. Types that
fail at their first forward pass alone go into the table by which `attach` refuses them (`refusals.json`);
workers judge as if that were empty, so that what it says is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import selectors
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zoo.table import VERDICTS, Record, differences, page, refusals_of, write_page

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "overt" / "attaching" / "refusals.json"
SECONDS = 90  # of a processor's time for one type; ten times that by the clock, for whatever sleeps
MEMORY = 8 << 30  # bytes that a worker may ask for


def key() -> str:
    """Of all that verdicts depend on: the library, these checks, versions."""
    spec = find_spec("overt")
    assert spec is not None
    assert spec.origin is not None
    here = Path(__file__).parent
    asked = [here / "zoo" / f"{name}.py" for name in ("settings", "models", "inputs", "checks")]
    library = Path(spec.origin).parent
    files = [*library.rglob("*.py"), *asked]  # refusals.json is what comes of it
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{digest.hexdigest()[:16]} {' '.join(f'{k} {v}' for k, v in versions().items())}"


def versions() -> dict[str, str]:
    """Of what verdicts depend on."""
    names = {name: version(name).split("+")[0] for name in ("transformers", "torch")}
    return {**names, "python": platform.python_version()}


def work() -> None:
    """What a worker does: types come in line by line, news of them goes out as JSON."""
    import resource
    import warnings

    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a family prints is no news
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    from overt.attaching import refusals
    from zoo.checks import judge

    refusals.refusals = dict  # what the table says is to be found anew
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        kind = line.strip()
        record = judge(
            kind, lambda *said: print(json.dumps({"stage": said[0], "so far": said[1:]}), file=out)
        )
        print(json.dumps({"kind": kind, "record": record}), file=out)


class Worker:
    """A process that judges types, replaced when it hangs or dies."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.input, self.output = self.process.stdin, self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self.kind, self.stage, self.since, self.used, self.rest = "", "start", time.monotonic(), 0.0, b""
        self.so_far: list[Record] = []

    def give(self, kind: str) -> None:
        self.kind, self.stage, self.since, self.used = kind, "start", time.monotonic(), self._processor()
        self.so_far = []
        self.input.write(kind.encode() + b"\n")
        self.input.flush()

    def news(self) -> list[dict[str, Any]] | None:
        """What it said since, or None if it is gone."""
        try:
            read = os.read(self.output.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        if not read:
            return None
        *lines, self.rest = (self.rest + read).split(b"\n")
        return [json.loads(line) for line in lines]

    def spent(self) -> float:
        """Seconds of a processor's time since its type came, or a tenth of the clock's, whichever is more."""
        return max(self._processor() - self.used, (time.monotonic() - self.since) / 10)

    def _processor(self) -> float:
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # no Linux, or it is gone
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.input, self.output):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def lost(worker: Worker, what: str) -> Record:
    """The record of a type that took its worker down."""
    if worker.so_far:
        return {**worker.so_far[0], "notes": [f"{what}, as other attentions were tried"]}
    early = worker.stage in ("start", "build")
    reason = what if early else f"{what} ({worker.stage})"
    return {"verdict": "could not be built" if early else "WRONG", "reason": reason}


def sweep(kinds: list[str], part: Path, workers: int, seconds: float) -> dict[str, Record]:
    """A record of each type. Those already in `part` are taken from there, others are added to it."""
    known = read_part(part)
    todo = [kind for kind in kinds if kind not in known]
    total, begun, spent = len(todo), time.monotonic(), 0
    selector = selectors.DefaultSelector()
    pool: list[Worker] = []

    def start() -> None:
        worker = Worker()
        pool.append(worker)
        selector.register(worker.output, selectors.EVENT_READ, worker)

    def drop(worker: Worker) -> None:
        selector.unregister(worker.output)
        pool.remove(worker)
        worker.end()

    def note(worker: Worker, record: Record) -> None:
        nonlocal spent
        record["seconds"] = round(worker._processor() - worker.used, 1)
        known[worker.kind] = record
        with part.open("a") as file:
            file.write(json.dumps([worker.kind, record], ensure_ascii=False) + "\n")
        spent += 1
        passed = time.monotonic() - begun
        left = passed / spent * (total - spent)
        print(
            f"{spent:4}/{total}  {left / 60:5.1f} minutes left  {record['seconds']:6.1f} s  "
            f"{worker.kind}: {record['verdict']}  {record['reason'][:100]}",
            flush=True,
        )
        worker.kind = ""

    queue = iter(todo)
    for _ in range(min(workers, total)):
        start()
    try:
        while pool:
            for chosen, _ in selector.select(timeout=1.0):
                worker: Worker = chosen.data
                said = worker.news()
                if said is None:
                    if not worker.kind:
                        raise RuntimeError("a worker does not start; see `python tests/sweep.py --worker`")
                    note(worker, lost(worker, "the process died"))
                    drop(worker)
                    if spent < total:
                        start()
                    continue
                for one in said:
                    worker.stage = one.get("stage", worker.stage)
                    worker.so_far = one.get("so far", [])
                    if "record" in one:
                        note(worker, one["record"])
                    if "record" in one or "ready" in one:
                        following = next(queue, None)
                        if following is None:
                            drop(worker)
                            break
                        worker.give(following)
            for worker in pool:
                if worker.kind and worker.spent() > seconds:
                    note(worker, lost(worker, f"it took longer than {seconds:.0f} s"))
                    drop(worker)
                    start()
    finally:
        for worker in pool:
            worker.end()
    return {kind: known[kind] for kind in kinds}


def read_part(part: Path) -> dict[str, Record]:
    """What an earlier run of the same code has found; a file of other code is begun anew."""
    mine = key()
    if part.exists():
        first, *rest = part.read_text().splitlines() or [""]
        if first == mine:
            return dict(json.loads(line) for line in rest)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_text(mine + "\n")
    return {}


def count(results: dict[str, Record]) -> dict[str, int]:
    return {verdict: sum(record["verdict"] == verdict for record in results.values()) for verdict in VERDICTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "families.json")
    parser.add_argument("--page", type=Path, help="also write the table into this file")
    parser.add_argument(
        "--table", action="store_true", help="also write the library's table of types that attach refuses"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit for one type")
    parser.add_argument("--only", nargs="+", metavar="TYPE", help="these types; prints, writes nothing")
    parser.add_argument(
        "--diff", type=Path, metavar="OTHER", help="compare --out with another run, run nothing"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    if options.diff:
        old, new = (json.loads(path.read_text())["types"] for path in (options.diff, options.out))
        print("\n".join(differences(old, new)) or "no verdict changed")
        return 0
    from zoo.models import model_types

    part = ROOT / "runs" / f"{options.out.stem}.jsonl"
    if options.only:
        part = part.with_name("families-only.jsonl")
        part.unlink(missing_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; run it again to resume"))
    begun = time.monotonic()
    results = sweep(options.only or model_types(), part, options.workers, options.seconds)
    minutes = f"{(time.monotonic() - begun) / 60:.1f} minutes"
    if options.only:
        print(f"{count(results)}, {minutes}")
        print(json.dumps(results, indent=1, ensure_ascii=False))
        return 0
    for record in results.values():
        record.pop("seconds", None)  # two runs of the same code are the same file
    table = json.loads(TABLE.read_text()) if options.table else {"types": {}}
    table = refusals_of(results, table["types"], versions()["transformers"])
    if options.table:
        TABLE.write_text(json.dumps(table, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    counts = count(results)  # with the types that the table refuses
    print(f"{counts}, {minutes}")
    document = {"versions": versions(), "counts": counts, "types": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    if options.page:
        write_page(options.page, page(results, versions()))
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
