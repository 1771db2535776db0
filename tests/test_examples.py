"""Every file of examples/ runs, with fewer images than it has by default."""

import importlib.util
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from summaries import attack_result, summary, worst_of
from torch import nn

from splitveil.__main__ import main as splitveil
from splitveil.evaluation.summary import write_summary
from splitveil.split_model import SplitModel

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL: dict[str, dict[str, Any]] = {
    "own_model": {"images": 200, "private": 60, "epochs": 1}, "own_data": {"images": 150, "private": 60},
    "tensors_only": {"images": 200}, "adapt": {"images": 300, "streamed": 200, "attacked": 120, "epochs": 1},
}  # fmt: skip


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_by_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "ci_gate", "serve"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_an_example_runs_and_says_what_it_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example(name).main(**SMALL[name])
    out = capsys.readouterr().out
    if name == "adapt":
        assert "accuracy" in out and "is in place" in out and out.count("refused: ") == 3
        return
    assert any(line.startswith(("exposed: ", "not established: ", "traces: ", "hidden: ")) for line in out.splitlines())
    if name == "own_model":
        assert (tmp_path / "audit" / "summary.json").exists()
        assert "What can somebody on the wire see?" in (tmp_path / "audit.html").read_text(encoding="utf-8")


def test_the_gate_of_ci_lets_a_good_release_pass_and_stops_a_leak_and_an_evaluation_with_gaps(tmp_path: Path) -> None:
    gate = example("ci_gate")
    judged = {"recognised": 0.1, "recognised_original": 0.9, "residual_share": 0.8}
    good = summary("release", attack_result(**judged), suite="quick", worst_case=worst_of(), recognised_original=0.9)
    write_summary(tmp_path, good)
    gate.test_the_release_leaks_no_more_than_agreed(tmp_path)
    gate.test_the_verdict_is_established(tmp_path)
    write_summary(tmp_path, summary("leak", attack_result(**judged), suite="quick", worst_case=worst_of(ssim=0.7)))
    with pytest.raises(AssertionError, match=r"leak: ssim is 0.7 \(worst case over 2 attacks\), which is ssim>=0.65"):
        gate.test_the_release_leaks_no_more_than_agreed(tmp_path)
    write_summary(tmp_path, summary("own list", attack_result(**judged | {"ssim": 0.1}), worst_case=worst_of()))
    with pytest.raises(AssertionError, match="somebody's own list"):
        gate.test_the_verdict_is_established(tmp_path)


def test_a_device_and_a_cloud_talk_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "small", "--model.width", "4", "--defences", "bottleneck,gaussian", "--train.epochs", "1"]
    splitveil(["train", *words, "--splits.task", "200", "--name", "tiny", "--runs", str(tmp_path)])
    example("serve").main(str(tmp_path / "tiny"), images=70)
    told = capsys.readouterr().out
    assert re.search(r"accuracy [01]\.\d{3} over the wire, 2,0\d\d bytes an image", told)  # z has 512 numbers


@pytest.mark.parametrize(
    "body",
    [b"", b"pickle", save({"x": torch.zeros(1)}), save({"z": torch.zeros(1, 3)}), save({"z": torch.full((1, 2), torch.nan)})],
    ids=["nothing", "no safetensors", "no z", "another shape", "not finite"],
)
def test_a_cloud_answers_a_message_that_is_no_z_with_400_and_goes_on(body: bytes) -> None:
    model = SplitModel(nn.Identity(), nn.Linear(2, 3), (2,), (2,))
    with example("serve").cloud_server(model) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            urllib.request.urlopen(address, data=body)
        refused.value.close()
        with urllib.request.urlopen(address, data=save({"z": torch.zeros(5, 2)})) as answer:
            assert load(answer.read())["logits"].shape == (5, 3)
        server.shutdown()
