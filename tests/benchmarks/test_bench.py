"""`splitveil bench` measures every surrogate, and says which ratios got worse than those of an earlier file."""

import copy
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_device import nobody_waits

from benchmarks.bench import BASE, in_turns, random_images, steps, steps_of
from benchmarks.bench import command as bench_command
from benchmarks.bench.alone import alone, without_banks
from benchmarks.bench.command import plan_of
from benchmarks.bench.steps import SHAPES, Given, configs
from benchmarks.bench.table import TITLES, got_worse
from benchmarks.bench.timing import QUICK, QUICK_IMAGES, Setting, compare, speedup
from splitveil.__main__ import main
from splitveil.compute.pick_device import processor
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages
from splitveil.registry import SURROGATES, UserError
from splitveil.runs import read_json, write_json
from splitveil.surrogates import build
from splitveil.training.build import build_parts

CPU = torch.device("cpu")
WITHOUT_CUDA = ("step", "floor", "loop", "refresh", "sklearn")


@pytest.mark.slow
def test_every_surrogate_has_its_cost_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "bench.json"
    main(["bench", "--device", "cpu", "--quick", "--out", str(out), "--batches", "32", "--classes", "4,40"])
    printed, table = capsys.readouterr().out, read_json(out)
    cells = {(row["what"], row["variant"], row["batch"], row["classes"]) for row in table["rows"]}
    for name in SURROGATES.names():
        assert f"\n {name} " in printed
        assert {(what, name, 32, c) for what in ("step", "loop") for c in (4, 40)} <= cells
        if build(name, dim=4, classes=2, sigma=0.1, image=(1, 8, 8)).refresh_every:
            assert ("refresh", name, 32, 4) in cells
    assert {what for what, *_ in cells} == set(WITHOUT_CUDA)
    for row in table["rows"]:
        low, high = row["quartiles"]
        assert 0 < low <= row["ratio"] <= high and row["ms"] > 0 and row["base_ms"] > 0 and row["baseline"]
    assert {"claim", "command", "commit", "device", "torch", "threads", "model"} <= set(table)
    assert "medians [quartiles]" in printed and str(out) in printed


def test_each_kind_of_row_has_a_title_and_a_measurement() -> None:
    assert TITLES.keys() == bench_command.MEASURE.keys()


def test_works_take_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    taken = in_turns({name: lambda name=name: order.append(name) for name in "abc"}, 3, CPU)
    assert [len(spent) for spent in taken.values()] == [3, 3, 3]
    assert "".join(order) == "cab" + "abc" + "bca" + "cab"


def test_ratios_are_those_of_a_round() -> None:
    taken, base = [2.0, 40.0, 8.0], [1.0, 10.0, 2.0]
    assert compare(taken, base, 2) == {"ratio": 4.0, "quartiles": [3.0, 4.0], "ms": 4000.0, "base_ms": 1000.0}
    assert compare(taken, base, 1, 0.5)["ratio"] == 2.0
    assert speedup(base, taken)["ratio"] == 4.0
    assert speedup(base, taken)["ms"] == 2000.0


def test_given_batches_come_again_and_again_and_nobody_waits_for_them() -> None:
    batches = [(torch.full((2, 3), float(i)), torch.tensor([i, i + 1])) for i in range(3)]
    given = Given(batches)
    for i in (0, 1, 2, 0, 1):
        x, y = given.next()
        assert torch.equal(x, batches[i][0]) and torch.equal(y, batches[i][1])
    given = Given([(x.to("meta"), y.to("meta")) for x, y in batches])
    with nobody_waits():
        given.next()


def test_steps_on_given_batches_train() -> None:
    config = configs("small")["rate"]
    task = random_images(64, SHAPES["small"], 4)
    parts = build_parts(config, task, CPU)
    before = copy.deepcopy(parts.model.state_dict())
    steps_of(config, parts, list(DeviceImages(task, CPU).shuffled(16, 0, 0, AugmentConfig())), 3, CPU)()
    assert parts.cem is not None and parts.cem.steps == 3 and parts.cem.skipped == 0
    assert any(not torch.equal(value, before[name]) for name, value in parts.model.state_dict().items())


def row_of(what: str, ratio: float, low: float, high: float, variant: str = "rate") -> dict[str, Any]:
    return {"what": what, "variant": variant, "batch": 128, "classes": 10, "ratio": ratio, "quartiles": [low, high]}


@pytest.mark.parametrize("what", ["step", "refresh", "together", "memory"])
def test_a_cost_that_rose_is_worse_and_one_that_may_be_noise_is_not(what: str) -> None:
    before = [row_of(what, 1.0, 0.9, 1.1)]
    assert len(got_worse([row_of(what, 1.4, 1.25, 1.5)], before)) == 1
    assert got_worse([row_of(what, 1.4, 1.15, 1.9)], before) == []
    assert got_worse([row_of(what, 0.5, 0.4, 0.6)], before) == []


@pytest.mark.parametrize("what", ["captured", "loop", "sklearn", "floor"])
def test_a_gain_that_fell_is_worse_and_one_that_may_be_noise_is_not(what: str) -> None:
    before = [row_of(what, 6.0, 5.0, 7.0)]
    assert len(got_worse([row_of(what, 4.0, 3.0, 4.9)], before)) == 1
    assert got_worse([row_of(what, 4.0, 3.0, 5.1)], before) == []
    assert got_worse([row_of(what, 9.0, 8.0, 9.5)], before) == []


def test_only_the_same_measurement_is_compared() -> None:
    assert got_worse([row_of("step", 9.0, 9.0, 9.0)], [row_of("step", 1.0, 1.0, 1.0, variant="gmm")]) == []


@pytest.mark.parametrize(("now", "code", "said"), [
    ([1.1], 0, "0 of 1 ratios got more than 20% worse"),
    ([2.0, 2.0], 3, "1 of 1 ratios got more than 20% worse\n  step rate (batch 128, classes 10): 2 [1.8, 2.2], was 1"),
    ([2.0, 1.1], 0, "0 of 1 ratios"),
], ids=["as before", "worse, and worse again", "worse once"])  # fmt: skip
def test_a_ratio_that_is_worse_twice_ends_the_command_with_code_3(
    now: list[float], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert code_against(now, processor(), tmp_path, monkeypatch) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("before", "said"), [("another CPU", "of another CPU"), (None, "of an unknown CPU")])
def test_what_was_measured_on_another_cpu_is_shown_and_not_judged(
    before: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_against([2.0, 2.0], before, tmp_path, monkeypatch) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 ratios got more than 20% worse" in out and f"Nothing is judged, because that file is {said}:" in out


def code_against(now: list[float], cpu: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code where these ratios are measured one after the other, against 1.0 on a CPU of that name; 0 if it ends well."""
    left = iter(now)

    def measured(setting: Setting, advance: Callable[..., None]) -> list[dict[str, Any]]:
        ratio = next(left)
        numbers = {"ratio": ratio, "quartiles": [0.9 * ratio, 1.1 * ratio], "ms": ratio, "base_ms": 1.0}
        return [setting.row("step", "rate", BASE, numbers)]

    monkeypatch.setitem(bench_command.MEASURE, "step", measured)
    file, out = folder / "before.json", folder / "now.json"
    before: dict[str, Any] = {"device": "cpu", "model": "small", "compile": False, "rows": [row_of("step", 1.0, 0.9, 1.1)]}
    write_json(file, before | ({} if cpu is None else {"processor": cpu}))
    flags = ["--device", "cpu", "--only", "step", "--batches", "128", "--classes", "10"]
    ended: object = 0
    try:
        main(["bench", *flags, "--out", str(out), "--against", str(file)])
    except SystemExit as stop:
        ended = stop.code
    assert next(left, None) is None
    assert read_json(out)["rows"][0]["ratio"] == now[0]
    return ended


@pytest.mark.parametrize(("flags", "said"), [
    ("--device cpu --batch 128", "unknown flag '--batch'; did you mean '--batches'?"),
    ("--device cpu --only stp", "unknown measurement 'stp'; did you mean 'step'?"),
    ("--device cpu --only together", "needs --device cuda"),
    ("--device meta", "must be cpu or cuda"),
    ("--device cpu --model vgg", "did you mean 'vgg11'?"),
    ("--device cpu --batches 128,x", "--batches is '128,x'"),
    ("--device cpu --classes 1", "--classes is '1'"),
    ("--device cpu --device cpu", "--device is there twice"),
    ("--device cpu --out", "--out needs a value"),
    ("--device cpu --against nowhere.json", "nowhere.json is missing"),
])  # fmt: skip
def test_a_mistake_is_said_before_anything_is_measured(flags: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        plan_of(flags.split())


@pytest.mark.parametrize(("change", "said"), [
    ({"device": "NVIDIA H200"}, "measured with --device cuda --model small"),
    ({"model": "vgg11"}, "measured with --device cpu --model vgg11"),
    ({"rows": []}, "no row of what would be measured"),
])  # fmt: skip
def test_another_kind_of_measurement_is_not_compared_with(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    before = {"device": "cpu", "model": "small", "compile": False, "rows": [row_of("step", 1.0, 1.0, 1.0)]}
    write_json(tmp_path / "before.json", before | change)
    with pytest.raises(UserError, match=said):
        plan_of(["--device", "cpu", "--against", str(tmp_path / "before.json")])


def test_what_a_command_line_asks_for() -> None:
    flags = ["--quick", "--batches", "32,64", "--classes=4,40", "--only", "loop,step", "--out", "a.json"]
    plan = plan_of(["--device", "cpu", *flags])
    assert [(what, s.batch, s.classes) for what, s in plan.settings[:4]] == [
        ("step", 32, 4), ("step", 64, 4), ("loop", 32, 4), ("loop", 64, 4),
    ]  # fmt: skip
    assert len(plan.settings) == 8
    setting = plan.settings[0][1]
    assert (setting.rounds, setting.steps, setting.slow_rounds) == QUICK["cpu"] and setting.images == QUICK_IMAGES
    assert not setting.compile and plan_of(["--device", "cpu", "--compile"]).settings[0][1].compile
    everything = {what for what, _ in plan_of(["--device", "cpu"]).settings}
    assert everything == {what for what in WITHOUT_CUDA if what != "sklearn" or importlib.util.find_spec("sklearn")}


def test_random_images_have_all_classes() -> None:
    assert np.bincount(random_images(40, (1, 8, 8), 10).labels).tolist() == [4] * 10


@pytest.mark.parametrize("variant", SURROGATES.names())
def test_the_surrogate_of_one_class_lies_on_the_device_of_all_classes(variant: str) -> None:
    config, meta = configs("small")[variant], torch.device("meta")
    full = build(variant, dim=6, classes=3, sigma=0.1, image=(1, 8, 8)).to(meta)
    without_banks(full)
    own = alone(config, full, 1, sigma=0.1, device=meta)
    places = {name: str(value.device) for name, value in [*own.named_parameters(), *own.named_buffers()]}
    assert set(places.values()) <= {"meta"}, places


def test_runs_that_step_together_are_compared_with_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "RUNS", (2,))
    rows = steps.together_rows(Setting(CPU, "small", 8, 4, False, 1, 1, 1, 8), lambda *_: None)
    assert [row["variant"] for row in rows] == ["undefended x 2", "rate x 2"]
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_every_kind_is_measured_and_every_step_captured(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    flags = ["--device", "cuda", "--model", "small", "--quick", "--batches", "32", "--classes", "4"]
    main(["bench", *flags, "--out", str(out)])
    rows = read_json(out)["rows"]
    assert {row["what"] for row in rows} >= TITLES.keys() - {"sklearn"}
    assert all(row["captured"] for row in rows if row["what"] == "step")
    assert {row["variant"] for row in rows if row["what"] == "captured"} == set(configs("small"))
    assert all(row["ratio"] >= 0.5 for row in rows if row["what"] == "memory")  # the gradient of z is in it


def test_variants_are_those_asked_for_and_the_baseline() -> None:
    plan = plan_of(["--device", "cpu", "--only", "step", "--variants", "kmeans,noise"])
    assert set(steps.asked(plan.settings[0][1])) == {"undefended", "noise", "kmeans"}
    with pytest.raises(UserError, match="unknown variant 'kmean'; did you mean 'kmeans'"):
        plan_of(["--device", "cpu", "--variants", "kmean"])
    with pytest.raises(UserError, match="names no surrogate"):
        plan_of(["--device", "cpu", "--variants", "noise", "--only", "loop"])
