"""Kills: between two writes, played in this process, and of real processes at any moment."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest


class Killed(BaseException):
    """Stands in for a kill -9: nothing catches it."""


def die_at(patch: pytest.MonkeyPatch, k: int, moment: str, removals: bool = False) -> None:
    """From here on the process dies "before", or "after", its k-th rename (or removal), counted from 0."""
    left = k

    def dying(act: Callable[..., Any]) -> Callable[..., None]:
        def act_and_die(*args: Any, **options: Any) -> None:
            nonlocal left
            if left == 0 and moment == "before":
                raise Killed
            act(*args, **options)
            left -= 1
            if left < 0:
                raise Killed

        return act_and_die

    patch.setattr(os, "replace", dying(os.replace))
    if removals:
        patch.setattr(Path, "unlink", dying(Path.unlink))


SERVER = """
import json, os, signal, sys, time
import torch, torch._dynamo
from splitveil.cli import commands
from splitveil.__main__ import main
for line in sys.stdin:
    arguments, limit = json.loads(line)
    began = time.monotonic()
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        main(arguments)
        os._exit(0)
    pid = status = 0
    while not pid and (limit is None or time.monotonic() < began + limit):
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.0005)
    if not pid:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), time.monotonic() - began]), flush=True)
"""


class Server:
    """Forks a process for each command line, after torch is imported, and kills it after a while if asked."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.ask: IO[str] = process.stdin
        self.hear: IO[str] = process.stdout

    def run(self, arguments: list[str], limit: float | None = None) -> tuple[int, float]:
        """Return the exit code (-9 if killed) and the seconds it took."""
        self.ask.write(json.dumps([arguments, limit]) + "\n")
        self.ask.flush()
        code, seconds = json.loads(self.hear.readline())
        return code, seconds


@contextmanager
def serving(before: str = "") -> Iterator[Server]:
    """A server whose commands find what the lines `before` have changed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"{before}\n{SERVER}"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        server = Server(process)
        yield server
        server.ask.close()
