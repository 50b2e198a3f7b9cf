"""Fresh interpreters that have torch and transformers, and nothing of Overt."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SERVER = """
import json, os, signal, sys, traceback
import torch, transformers.modeling_utils, transformers.models.bert.modeling_bert
assert "overt" not in sys.modules
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that end are forgotten at once
for line in sys.stdin:
    code, variables, place = json.loads(line)
    process = os.fork()
    if process:
        print(process, flush=True)
        continue
    # What this one imports, installs and registers ends with it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(variables)
    for number, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{place}.{end}", os.O_WRONLY | os.O_CREAT), number)
    failed = ""
    try:
        exec(code, {"__name__": "__main__"})
    except BaseException:
        failed = traceback.format_exc()
    sys.stdout.flush()
    with open(f"{place}.part", "w") as file:
        file.write(failed)
    os.rename(f"{place}.part", f"{place}.end")
    os._exit(0)
"""


_numbers = count()


@dataclass(frozen=True)
class Child:
    """A fresh interpreter at work."""

    process: int
    place: Path

    def printed(self, end: str = "out") -> str:
        """What it printed so far; `end="err"` for its errors."""
        path = self.place.with_suffix(f".{end}")
        return path.read_text() if path.exists() else ""

    def ended(self, seconds: float = 300.0) -> str:
        """Wait for its end; the traceback it ends with, if any."""
        limit, path = time.monotonic() + seconds, self.place.with_suffix(".end")
        while not path.exists():
            try:
                os.kill(self.process, 0)
            except ProcessLookupError:
                if not path.exists():
                    return f"it died\n{self.printed('err')}"
            if time.monotonic() > limit:
                os.kill(self.process, 9)
                return f"it took more than {seconds} seconds\n{self.printed('err')}"
            time.sleep(0.02)
        return path.read_text()


@cache
def _server() -> tuple[Any, Path]:
    """A process that has imported what takes seconds, and forks for each request; a folder for answers."""
    here, folder = Path(__file__).parent, TemporaryDirectory(prefix="fresh")
    path = f"{here}:{here.parent / 'src'}:{here.parent / 'docs' / 'examples'}"
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(folder.cleanup)
    atexit.register(server.communicate)  # without requests it ends
    return server, Path(folder.name)


def start(code: str, **variables: str) -> Child:
    """A fresh interpreter that runs code, with more environment variables."""
    server, folder = _server()
    place = folder / str(next(_numbers))
    server.stdin.write(json.dumps([code, variables, str(place)]) + "\n")
    server.stdin.flush()
    return Child(int(server.stdout.readline()), place)


def fresh(code: str) -> tuple[str, str]:
    """What a fresh interpreter prints, and the traceback it ends with, if any."""
    child = start(code)
    failed = child.ended()
    return child.printed().strip(), failed


def start_pair(code: str) -> list[Child]:
    """Two fresh interpreters that the Trainer, and accelerate under it, take for processes of one training.

    They know of each other by the variables that torchrun sets.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start(code, RANK=rank, LOCAL_RANK=rank, **world) for rank in "01"]
