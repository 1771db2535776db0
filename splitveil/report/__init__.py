"""Report: run folders to one HTML file that anybody can open, offline, with tables, pictures and figures.

    write_report([Path("runs/demo/bottleneck"), Path("runs/demo/gaussian")], Path("runs/demo/report.html"))

The first folder is what the others are compared with. Each section is a panel of its own in panels/, and page.py puts them into
report.html. facts.py reads and words, figures.py and pictures.py help panels to draw; nothing is computed that `evaluate` has not
measured.
"""

from importlib.util import find_spec
from pathlib import Path

from splitveil.evaluation.comparable import check_comparable
from splitveil.files.folder import PATIENCE, locked, write_atomically
from splitveil.manifest import changing
from splitveil.registry import UserError


def check_packages() -> None:
    """Say what the report needs and is not installed; a run says it before the training, not after."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UserError(f"the report needs {' and '.join(missing)}: pip install 'splitveil[report]'")


def write_report(folders: list[Path], out: Path, anyway: bool = False) -> Path:
    """Write the report of evaluated runs to `out` and return it; runs that do not compare are refused, or set apart `anyway`."""
    check_packages()
    from splitveil.report.facts import read_runs
    from splitveil.report.page import page

    runs = read_runs(folders)
    if not anyway:
        check_comparable([run.summary for run in runs])
    data = page(runs).encode()
    if (out.parent / "schema.json").exists():  # the report of one run lies in its folder, and its manifest lists it
        with locked(out.parent, PATIENCE), changing(out.parent) as step:
            step.write(out.name, data, come_from=("summary.json",))
    else:
        write_atomically(out, data)
    return out
