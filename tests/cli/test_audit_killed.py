"""An audit that is killed at any moment and started again ends like one that is never stopped."""

import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
from in_process import Cli
from killing import Killed, die_at, serving
from small_net import attacker, private

from splitveil.evaluation import judge_network
from splitveil.manifest import NAME, problems

TESTS = Path(__file__).parent.parent
SHORT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})  # where small_net lies
from splitveil.evaluation import judge_network
judge_network.EPOCHS, judge_network.STEPS = 1, 4
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command, but for its folder."""
    file = tmp_path_factory.mktemp("data") / "images.npz"
    (test, test_labels), (images, labels) = private(), attacker()
    np.savez(file, images=images, labels=labels, test_images=test, test_labels=test_labels)
    return f"""
        audit --model small_net:trained_net --at stem --data npz --data.path {file} --defences gaussian
        --attacks mean_image,ridge --device cpu --out
    """.split()


def products(folder: Path) -> dict[str, bytes]:
    """All that an audit leaves, byte for byte; of the time that attacks and the edge took nothing."""
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del found[NAME]  # which has the hashes of files with seconds in them
    return {
        name: re.sub(rb'"(milli)?seconds": [\d.e-]+|\d+(\.\d+)? (s|ms|min)\b', b"", content) for name, content in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_between_any_two_writes_of_an_audit_damages_nothing(
    moment: str, words: list[str], splitveil: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Takes every k in turn: the process dies before, or after, its k-th rename or removal; the same command then ends it."""
    monkeypatch.setattr(judge_network, "EPOCHS", 1)
    monkeypatch.setattr(judge_network, "STEPS", 4)
    assert splitveil(*words, tmp_path / "whole" / "audit").code == 0
    expected, kills = products(tmp_path / "whole" / "audit"), 0
    for k in range(100):
        folder = tmp_path / str(k) / "audit"
        with monkeypatch.context() as patch:
            die_at(patch, k, moment, removals=True)
            try:
                assert splitveil(*words, folder).code == 0
                break
            except Killed:
                kills += 1
        if (folder / NAME).exists():
            assert [line for line in problems(folder) if "came from another" not in line] == [], f"killed {moment} write {k}"
        outcome = splitveil(*words, folder)
        assert outcome.code == 0, f"killed {moment} write {k}: {outcome.err}"
        assert products(folder) == expected, f"killed {moment} write {k}"
        assert problems(folder) == []
    # Manifests: the first, and two for each of five steps. Files: two of the audit, three of each attack, judge, summary, report.
    assert kills >= 22


@pytest.mark.slow
def test_killed_at_any_moment_of_its_life_an_audit_ends_the_same(words: list[str], tmp_path: Path):
    """Kills real processes."""
    draw, killed, moments = random.Random(0), 0, 10
    with serving(SHORT) as server:
        code, seconds = server.run([*words, str(tmp_path / "whole" / "audit")])
        assert code == 0
        for i in range(moments):
            again = [*words, str(tmp_path / str(i) / "audit")]
            code, _ = server.run(again, limit=(i + draw.random()) / moments * seconds)
            killed += code == -signal.SIGKILL
            assert server.run(again)[0] == 0
            assert products(tmp_path / str(i) / "audit") == products(tmp_path / "whole" / "audit")
    assert killed >= moments // 2  # if the machine was busy during the first run, the later ones are faster
