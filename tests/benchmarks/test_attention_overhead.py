import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import attention_overhead
from benchmarks.bench.operations import operations_of


def test_operations_are_those_that_compute_something_and_a_backward_pass_counts() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    assert operations_of(lambda: x.T.unsqueeze(0).detach()) == 0
    assert operations_of(lambda: x.detach() + 1) == 1
    assert operations_of(lambda: torch.autograd.grad(2 * x.sum(), x)) == 2 + 2  # 1 to start from, and a product


def test_a_file_is_kept_after_each_surrogate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, kept = tmp_path / "found.json", []

    def measured(setting: attention_overhead.Setting, surrogate: str) -> list[dict[str, object]]:
        kept.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return [
            {
                "surrogate": surrogate,
                "options": "off",
                "ratio": 1.0,
                "quartiles": [1.0, 1.0],
                "ms": 2.0,
                "operations": 5,
                "more": 0,
            }
        ]

    monkeypatch.setattr(attention_overhead, "measured", measured)
    monkeypatch.setattr(sys, "argv", ["attention_overhead", "--out", str(out)])
    attention_overhead.main()
    assert kept == [0, 1]
    found = json.loads(out.read_text())
    assert [row["surrogate"] for row in found["rows"]] == ["gated", "slots"]
    assert (found["device"], found["model"], found["torch"]) == ("cpu", "small", torch.__version__)


@pytest.mark.parametrize(
    ("surrogate", "most"),
    [
        ("gated", {"stats": 52, "monitor": 130, "capped": 86, "floor": 40, "all": 225}),
        ("slots", {"stats": 53, "monitor": 155, "capped": 92, "floor": 55, "all": 260}),
    ],
)
def test_the_options_of_attention_start_few_operations(surrogate: str, most: dict[str, int]) -> None:
    """On a GPU that is what they cost. They started two to three times as many when each layer was seen by itself."""
    setting = attention_overhead.Setting(torch.device("cpu"), "small", 32, 10, False, 1, 2, 1, 100)
    counts = attention_overhead.operations(setting, surrogate)
    assert {name: counts[name] - counts["off"] for name, bound in most.items() if counts[name] - counts["off"] > bound} == {}
