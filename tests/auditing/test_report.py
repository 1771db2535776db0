import gc
import re
from pathlib import Path
from typing import Any

import pytest
from small_net import attacker, private, trained_net

import splitveil
from splitveil.evaluation.audit_folder import is_audit
from splitveil.evaluation.summary import read_summary
from splitveil.evaluation.verdict import verdict
from splitveil.registry import UserError
from splitveil.report import write_report
from splitveil.testing import assert_leakage


def audited(**given: Any) -> Any:
    usual: dict[str, Any] = {"private": private(), "attacker": attacker(), "attacks": ["mean_image", "ridge"]}
    return splitveil.audit(trained_net(), "stem", **usual | given)


def test_it_is_saved_read_back_asserted_on_and_shown(tmp_path: Path) -> None:
    report = audited(name="release")
    folder = report.save(tmp_path / "audit")
    assert is_audit(folder) and read_summary(folder) == report.summary
    assert {path.name for path in folder.iterdir()} == {"schema.json", "audit.json", "manifest.json", "attacks", "summary.json"}
    assert_leakage(folder, mse_above=0.0, accuracy_above=0.1)
    with pytest.raises(AssertionError, match="release: mse is"):
        assert_leakage(folder, mse_above=0.5)
    page = report.html(tmp_path / "audit.html").read_text()
    assert "release" in page and "ridge" in page and "Normalised, cut after stem" in page
    assert write_report([folder], tmp_path / "again.html").read_text() == page


def test_an_audit_stands_beside_another_that_has_no_accuracy(tmp_path: Path) -> None:
    folders = [audited().save(tmp_path / "a"), audited(private=private()[0]).save(tmp_path / "b")]
    page = write_report(folders, tmp_path / "both.html", anyway=True).read_text()
    assert re.search(r"\bnan\b", page, re.IGNORECASE) is None


def test_a_temporary_folder_goes_with_its_report() -> None:
    report = audited(attacks=["mean_image"])
    folder = report.folder
    assert folder.exists()
    del report
    gc.collect()
    assert not folder.exists()


def test_a_folder_that_holds_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    report = audited(attacks=["mean_image"])
    for write in (report.save, lambda folder: audited(folder=folder, attacks=["mean_image"])):
        with pytest.raises(UserError, match="exists and holds no audit; name a new folder"):
            write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    report.save(tmp_path / "audit")
    assert (audited(attacks=["ridge"]).save(tmp_path / "audit") / "attacks" / "ridge-0").exists()
    assert not (tmp_path / "audit" / "attacks" / "mean_image-0").exists()


def test_the_verdict_is_that_of_the_summary_and_an_own_list_of_attacks_gives_no_green_light() -> None:
    report = audited()
    assert report.verdict == verdict(report.summary)
    assert report.verdict.grade in ("exposed", "not established")
    assert str(report.verdict) in repr(report) and len(repr(report)) < 400


def test_without_a_number_there_is_no_worst_case() -> None:
    report = audited(attacks=[])
    with pytest.raises(UserError, match="no attack gave a number"):
        _ = report.worst_case
