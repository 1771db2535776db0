from pathlib import Path

import pytest

from splitveil.evaluation.audit_folder import AuditConfig, AuditFolder, is_audit
from splitveil.evaluation.suites import suite
from splitveil.registry import UserError
from splitveil.runs import read_json, write_json


def config(**changed: object) -> AuditConfig:
    return AuditConfig(**{"name": "a", "seed": 0, "attacks": suite("quick"), "what": "net", "channel": ("gaussian",)} | changed)  # type: ignore[arg-type]


def test_it_says_what_was_audited_and_how(tmp_path: Path) -> None:
    AuditFolder.create(tmp_path / "audit", config(notes=("Mind this.",)))
    told = read_json(tmp_path / "audit" / "audit.json")
    assert (told["what"], told["channel"], told["notes"]) == ("net", ["gaussian"], ["Mind this."])
    assert [attack["name"] for attack in told["attacks"]][:2] == ["mean_image", "class_mean"]
    assert is_audit(tmp_path / "audit")


def test_a_run_and_a_folder_of_something_else_are_no_audits(tmp_path: Path) -> None:
    write_json(tmp_path / "schema.json", {"schema": 1, "kind": "splitveil run"})
    assert not is_audit(tmp_path) and not is_audit(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists and holds no audit"):
        AuditFolder.create(tmp_path, config())


def test_other_settings_have_another_digest() -> None:
    assert config().sha256 == config().sha256
    assert len({each.sha256 for each in (config(), config(seed=1), config(attacks=suite("standard")), config(channel=()))}) == 4
