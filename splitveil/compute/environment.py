"""The software and hardware that made a number; it goes into every run folder and every claim."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

from splitveil.compute.pick_device import processor


@cache  # a process keeps the code that it began with, even if the source tree changes later
def git_commit() -> str | None:
    """The commit of the source tree, with "-dirty" where it was changed; None for an installed package."""
    here = Path(__file__)

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # a virtual environment may lie in somebody else's repository
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def measuring() -> dict[str, Any]:
    """The splitveil that is running."""
    from splitveil import __version__

    return {"splitveil": __version__, "commit": git_commit()}


def environment(device: torch.device) -> dict[str, Any]:
    """The software and hardware that made the numbers. It holds no host name, user, path or environment variable."""
    return {
        **measuring(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
