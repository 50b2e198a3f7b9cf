"""Fresh interpreters that have torch and transformers, and nothing of Overt."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

SERVER = """
import io, json, os, sys, traceback
import torch, transformers.modeling_utils, transformers.models.bert.modeling_bert
assert "overt" not in sys.modules
for line in sys.stdin:
    reading, writing = os.pipe()
    if os.fork() == 0:  # what it imports, installs and registers ends with it
        sys.stdout = out = io.StringIO()
        failed = ""
        try:
            exec(json.loads(line), {"__name__": "__main__"})
        except BaseException:
            failed = traceback.format_exc()
        with os.fdopen(writing, "w") as pipe:
            json.dump([out.getvalue(), failed], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        print(pipe.read(), flush=True)
    os.wait()
"""


@cache
def _server() -> Any:
    """A process that has imported what takes seconds, and forks for each request."""
    here = Path(__file__).parent
    path = f"{here}:{here.parent / 'src'}:{here.parent / 'docs' / 'examples'}"
    server = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SERVER],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # without requests it ends
    return server


def fresh(code: str) -> tuple[str, str]:
    """What a fresh interpreter prints, and the traceback it ends with, if any."""
    server = _server()
    server.stdin.write(json.dumps(code) + "\n")
    server.stdin.flush()
    printed, failed = json.loads(server.stdout.readline())
    return printed.strip(), failed
