"""What is installed is pinned, what is pinned is locked, and the bill of materials says what is there. Scripts are in .ci/."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lock, sbom = script("lock"), script("sbom")


def locked() -> dict[str, tuple[str, list[str]]]:
    """Versions and hashes by name, from requirements.lock."""
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    entries = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {entry[0].split("==")[0]: (entry[0].split("==")[1], entry[1:]) for entry in entries}


def test_everything_that_is_pinned_is_locked_but_torch() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    assert "torch==" in constraints
    found = {name: version for name, (version, _) in locked().items()}
    assert found == lock.pinned(constraints), "run `make lock`"
    assert "torch" not in found


def test_every_locked_package_has_the_hash_of_a_wheel() -> None:
    for name, (_, found) in locked().items():
        assert found, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in found), name


def test_what_builds_splitveil_is_the_locked_version() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert required == [f"setuptools=={locked()['setuptools'][0]}"]


PAGE = """
    <a href="../files/some_thing-1.0-py3-none-any.whl#sha256=aa">a</a> <a href="some_thing-1.0.tar.gz#sha256=bb">b</a>
    <a href="some_thing-1.1-py3-none-any.whl#sha256=cc">c</a>
    <a href="some_thing-1.0-cp311-cp311-manylinux_2_28_aarch64.whl#sha256=dd">d</a>
    <a href="some_thing-1.0-cp310-cp310-manylinux_2_28_x86_64.whl#sha256=ee">e</a>
    <a href="some_thing-1.0-cp39-abi3-macosx_11_0_arm64.whl#sha256=ff">f</a>
    <a href="some_thing-1.0-pp311-pypy311_pp73-win_amd64.whl#sha256=gg">g</a>
    <a href="some_thing_else-1.0-py3-none-any.whl#sha256=hh">h</a>
    <a href="some_thing-1.0-1-cp314-cp314t-win_amd64.whl#sha256=ii">i</a>
"""


def test_the_hashes_are_those_of_the_version_s_wheels_that_a_supported_python_can_use() -> None:
    assert lock.hashes(PAGE, "Some.Thing", "1.0") == ["aa", "dd", "ff", "ii"]
    with pytest.raises(SystemExit, match="no wheel of some-thing 2"):
        lock.hashes(PAGE, "some-thing", "2")


def test_torch_comments_and_empty_lines_are_not_locked() -> None:
    assert lock.pinned("# text\n\nnumpy==2.0  # why\nTorch==3\n") == {"numpy": "2.0"}


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip in this environment")
def test_pip_refuses_a_wheel_that_is_not_the_locked_one(tmp_path: Path) -> None:
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    (tmp_path / "lock").write_text(lock.entry("thing", "1.0", ["0" * 64]) + "\n")
    command = f"-m pip install --require-hashes --no-index --no-deps --dry-run --find-links {tmp_path} -r {tmp_path}/lock"
    refused = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True)
    assert refused.returncode != 0
    assert "DO NOT MATCH THE HASHES" in refused.stderr


def test_the_bill_of_materials_has_what_cyclonedx_asks_for_and_every_package_that_is_needed() -> None:
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    bill = sbom.bill(moment)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    assert re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bill["serialNumber"])
    assert bill["metadata"]["timestamp"] == "2026-01-01T00:00:00+00:00"
    versions = {each["name"]: each["version"] for each in bill["components"]}
    assert versions.keys() >= {"torch", "numpy", "pillow", "safetensors", "matplotlib", "markupsafe"}  # the last by jinja2
    assert not versions.keys() & {"splitveil", "pytest", "ruff"}
    assert all(version == metadata.version(name) for name, version in versions.items())
    references = {each["bom-ref"] for each in (*bill["components"], bill["metadata"]["component"])}
    assert {each["ref"] for each in bill["dependencies"]} == references
    assert {need for each in bill["dependencies"] for need in each["dependsOn"]} < references
    assert all(set(each) >= {"type", "name", "version", "purl"} for each in bill["components"])
    assert json.dumps(sbom.bill(moment)) == json.dumps(bill)
