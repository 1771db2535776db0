"""The benchmark of surrogates covers every one that is registered, and its loop over classes computes the same loss."""

import importlib.util
from pathlib import Path

import pytest

from splitveil.registry import SURROGATES
from splitveil.runs import read_json

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "surrogate_cost.py"


def test_every_surrogate_has_its_cost_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("surrogate_cost", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    out = tmp_path / "cost.json"
    script.main(["--quick", "--out", str(out), "--batches", "32", "--classes", "4", "40", "--images", "320"])
    printed, table = capsys.readouterr().out, read_json(out)
    cells = {(row["what"], row["variant"], row.get("batch"), row["classes"]) for row in table["rows"]}
    for name in SURROGATES.names():
        assert f"\n{name} " in printed
        assert {(what, name, 32, c) for what in ("step", "loop") for c in (4, 40)} <= cells
        if SURROGATES[name].make({"dim": 4, "classes": 2, "sigma": 0.1}).refresh_every:
            assert ("refresh", name, None, 4) in cells
    assert all(row["ratio"] > 0 for row in table["rows"] if row["what"] != "refresh")
    assert {"claim", "command", "commit", "device", "torch", "threads"} <= set(table)
