"""summary.json and attack.json: the types, their JSON, and files that older versions wrote (schema_1/, from the demo)."""

import json
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from summaries import attack_result, summary

from splitveil.attacks.threat import ThreatModel
from splitveil.config import Config
from splitveil.evaluation.attack_folder import read_attack
from splitveil.evaluation.summary import (
    SCHEMA,
    Certificate,
    EdgeAlone,
    RaisedFlag,
    Summary,
    attack_record,
    from_json,
    read_summary,
    to_json,
    write_summaries,
    write_summary,
)
from splitveil.metrics.cost import Latency
from splitveil.registry import UserError
from splitveil.report import write_report
from splitveil.runs import Run, read_json, write_json, write_tensors

OLD = Path(__file__).parent / "schema_1"
SINCE = {
    "suite",
    "skipped",
    "worst_case",
    "no_lpips",
    "recognised_original",
    "no_judge",
    "probes",
    "certificates",
    "reports",
}
"""Fields of a summary that the first files of schema 1 did not have."""
SINCE_OF_ATTACKS = {
    "method", "auxiliary_images", "auxiliary_sha256", "held_out", "facts", "probes", "residual_share", "lpips", "recognised",
    "recognised_original", "identity_cosine", "identity_others", "same_image", "same_identity", "same_identity_original",
}  # fmt: skip


def oldest() -> dict[str, Any]:
    """A summary of before these fields."""
    table = {name: value for name, value in read_json(OLD / "summary.json").items() if name not in SINCE}
    for name, row in table["attacks"].items():
        table["attacks"][name] = {key: value for key, value in row.items() if key not in SINCE_OF_ATTACKS}
    return table


def full() -> Summary:
    attack = attack_result("decoder", threat=ThreatModel(True, auxiliary="other", elsewhere="cifar10"), losses=(2.0, 1.0))
    bound = Certificate("rate", 9.5, "bits", 16, ("one", "two"), True, (1.0, 2.0))
    return summary(
        "full", attack, certificates=(bound,), flags=(RaisedFlag("metric-ceiling", "why"),), reports=({"a": [1]},),
        latency=Latency(0.5, 1, "a CPU"), edge_alone=EdgeAlone(0.8, 100, 50),
    )  # fmt: skip


def test_what_is_written_is_read_back_as_it_was(tmp_path: Path) -> None:
    write_summary(tmp_path, full())
    found = read_summary(tmp_path)
    assert found == full()
    assert found.latency is not None and found.latency.milliseconds == 0.5
    assert read_json(tmp_path / "summary.json")["schema"] == SCHEMA
    record = to_json(attack_result())
    assert attack_record(json.loads(json.dumps(record)), "attack.json").threat == ThreatModel()


def test_others_find_the_numbers_where_they_have_always_been(tmp_path: Path) -> None:
    write_summaries(tmp_path, [full(), summary("bare")])
    first, second = read_json(tmp_path / "summary.json")
    assert (first["name"], first["accuracy"], first["attacks"]["decoder"]["mse"]) == ("full", 0.9, 0.05)
    assert second["attacks"] == {}


def test_numbers_that_are_not_finite_survive(tmp_path: Path) -> None:
    nan = float("nan")
    write_summary(tmp_path, summary("a", attack_result("ridge", nan), bits=float("inf")))
    back = read_summary(tmp_path)
    assert back.bits == float("inf") and isnan(back.attacks["ridge"].mse)
    assert back.strongest is None


def test_a_file_of_schema_1_is_read_and_its_threat_model_rebuilt() -> None:
    found, old = from_json(Summary, read_json(OLD / "summary.json"), "x"), read_json(OLD / "summary.json")
    assert {name: attack.threat.describe() for name, attack in found.attacks.items()} == {
        name: row["threat"] for name, row in old["attacks"].items()
    }
    assert found.attacks["mean_image"].threat == ThreatModel(queries=False, channel=False)
    new = json.loads(json.dumps(to_json(found)))
    assert all((row.pop("more"), row.pop("test_sha256")) == ({}, None) for row in new["attacks"].values())  # are new since
    added = {
        "suite_version": None,
        "incomplete": [],
        "unfinished": [],
        "finite_weights": True,
        "measured_by": {},
        "not_checked": {},
        "layout": "",
        "latency": None,
        "edge_alone": None,
    }
    assert {name: new.pop(name) for name in added} == added
    for table in (old, new):
        del table["schema"]
        for row in table["attacks"].values():
            del row["threat"]
    assert new == old


def test_what_an_old_file_lacks_has_its_default() -> None:
    found = from_json(Summary, oldest(), "x")
    assert found.worst_case is found.recognised_original is found.suite is None
    assert (found.skipped, found.probes, found.certificates, found.reports) == ({}, {}, (), ())
    decoder = found.attacks["decoder"]
    assert (decoder.method, decoder.auxiliary_images, decoder.held_out, decoder.facts) == ("decoder", None, (), {})
    assert decoder.recognised is decoder.lpips is decoder.residual_share is None
    assert decoder.threat == ThreatModel()


def test_an_old_attack_is_read_with_options_that_there_were_not_yet_and_that_are_gone(tmp_path: Path) -> None:
    old = read_json(OLD / "attack.json")
    assert attack_record(old, "x").threat.describe() == old["threat"]
    options = {"repeats": 16, "auxiliary": "same set", "an option that is gone": 1}
    assert attack_record(old | {"options": options}, "x").threat == ThreatModel(auxiliary="same set", observations=16)
    write_json(tmp_path / "attack.json", old)
    rows = np.array([0.1, 0.3])
    np.savez(tmp_path / "rows.npz", mse=rows, ssim=rows, psnr=rows)
    assert read_attack(tmp_path, ceiling_mse=0.4).mse_over_ceiling == pytest.approx(0.5)


@pytest.mark.parametrize("age", ["last", "first"])
def test_an_old_run_folder_has_a_report(age: str, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "old", Config(name="gaussian+cem"))
    write_json(run.folder / "summary.json", read_json(OLD / "summary.json") if age == "last" else oldest())
    pixels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)
    for name in ("mean_image", "decoder"):
        write_tensors(run.folder / "attacks" / f"{name}-0" / "samples.safetensors", {"original": pixels, "rebuilt": pixels + 1})
    page = write_report([run.folder], tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Against gaussian+cem the best reconstruction has an MSE of 0.0143" in page
    assert "own images through edge and channel" in page


def test_a_field_of_a_later_version_is_ignored_and_a_later_schema_is_refused() -> None:
    table = json.loads(json.dumps(to_json(full())))
    table["new"] = table["attacks"]["decoder"]["new"] = table["attacks"]["decoder"]["threat"]["new"] = 1
    assert from_json(Summary, table, "x") == full()
    for schema in (SCHEMA + 1, None, 0):
        with pytest.raises(UserError, match=f"runs/a/summary.json has schema {schema}, this splitveil reads 1 to {SCHEMA}"):
            from_json(Summary, table | {"schema": schema}, "runs/a/summary.json")


def test_a_file_without_a_field_that_it_must_have_is_refused_by_name() -> None:
    table = to_json(full())
    del table["accuracy"]
    with pytest.raises(UserError, match=r"runs/a has no 'accuracy'; evaluate the run again"):
        from_json(Summary, table, "runs/a")


def test_flags_are_named_once() -> None:
    twice = tuple(RaisedFlag(flag, detail) for flag, detail in (("b", "1"), ("a", "2"), ("b", "3")))
    assert replace(full(), flags=twice).flag_names == ["a", "b"]
