"""Whatever is attacked, evaluated, edited or stopped, in any order: a gate that held still holds while its reason lies there."""

import hashlib
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gated import small_suites, stopped_at, train_tiny
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from in_process import exit_code
from safetensors.torch import load, save

from splitveil.evaluation.attack_folder import read_rows, weights_digest
from splitveil.manifest import changing
from splitveil.registry import ATTACKS, UserError
from splitveil.runs import Run, read_json
from splitveil.testing import assert_leakage

METHODS = ("mean_image", "class_mean", "nearest", "ridge")
LIMITS = (0.0, 0.03, 1.0)
"""One that every attack keeps, one that none keeps, and one between the strong and the weak, or near it."""
NAMES = st.lists(st.sampled_from(METHODS), min_size=1, max_size=2, unique=True)
THEN = st.sampled_from(["evaluate", "evaluate", "judge what is written"])
SUITES = {"quick": {"mean_image", "class_mean"}, "standard": {"mean_image", "class_mean", "ridge", "mask"}}


class Gate(RuleBasedStateMachine):
    """A run under all commands that attack and evaluate it, and what its folder says by itself."""

    trained: Path
    outcomes: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.outcomes["machines"] += 1
        # Beside the trained run: its judges, which learn for a second, lie there.
        self.folder = self.trained.with_name(f"{self.outcomes['machines']}")
        shutil.copytree(self.trained, self.folder)
        self.weights = [self.path.read_bytes()]
        self.weights.append(save({k: v * 1.5 if v.is_floating_point() else v for k, v in load(self.weights[0]).items()}))
        self.begun: set[str] = set()
        self.asked: set[str] = set()
        """Attacks on the run's own list that were asked for and stopped."""
        self.held: set[tuple[float, str]] = set()
        """Limits that were broken, each with the digest of a finished attack that broke it alone."""
        self.before: dict[str, float] = {}

    @property
    def path(self) -> Path:
        return self.folder / "weights" / "last.safetensors"

    def lying(self) -> dict[str, float]:
        """The mean MSE of each finished attack on the weights that lie there now, by the digest of its attack.json."""
        weights, found = weights_digest(self.folder), {}
        for path in self.folder.glob("attacks/*/attack.json"):
            if read_json(path)["weights_sha256"] == weights:
                found[hashlib.sha256(path.read_bytes()).hexdigest()] = float(read_rows(path.parent)["mse"].mean())
        return found

    def worst(self) -> float:
        """The mean over images of the lowest MSE that any of them reached."""
        weights, files = weights_digest(self.folder), self.folder.glob("attacks/*/attack.json")
        rows = [read_rows(path.parent)["mse"] for path in files if read_json(path)["weights_sha256"] == weights]
        return float(np.min(rows, axis=0).mean()) if rows else float("nan")

    def finished(self) -> set[str]:
        """Which attacks were finished, or skipped, on these weights, by their names."""
        weights, tables = weights_digest(self.folder), map(read_json, self.folder.glob("attacks/*/*.json"))
        return {table["attack"] for table in tables if table["weights_sha256"] == weights}

    @initialize(names=st.sampled_from(["mean_image", "mean_image,ridge"]), manifest=st.sampled_from([False, False, True]))
    def attack_at_first(self, names: str, manifest: bool) -> None:
        """A manifest refuses other weights and edits that nobody listed: the gate must also hold without its help."""
        self.has_manifest = manifest
        if not manifest:
            (self.folder / "manifest.json").unlink()
        assert exit_code("attack", self.folder, "--attacks", names, "--only") == 0

    @rule(names=NAMES, only=st.booleans(), then=THEN)
    def attack_by_name(self, names: list[str], only: bool, then: str) -> None:
        assert exit_code("attack", self.folder, "--attacks", ",".join(names), *["--only"] * only) == 0
        self.judge_by_every_limit(then)

    @rule(strong=st.sampled_from(["ridge", "nearest"]), only=st.booleans(), then=THEN)
    def stop_an_attack_that_was_asked_for(self, strong: str, only: bool, then: str) -> None:
        """Its list was begun, as an attack before it is finished: nothing but an edit of the list takes it off again."""
        with stopped_at(strong):
            assert exit_code("attack", self.folder, "--attacks", f"mean_image,{strong}", *["--only"] * only) in (0, 130)
        self.asked.add(strong)
        self.judge_by_every_limit(then)

    @rule(passes=st.integers(1, 3), then=THEN)
    def attack_with_options(self, passes: int, then: str) -> None:
        assert exit_code("attack", self.folder, "--attacks", "ridge", "--attacks.0.passes", str(passes)) == 0
        self.judge_by_every_limit(then)

    @rule(name=st.sampled_from(sorted(SUITES)), stop=st.booleans(), then=THEN)
    def attack_by_suite(self, name: str, stop: bool, then: str) -> None:
        with stopped_at("ridge") if stop else nullcontext():
            assert exit_code("attack", self.folder, "--suite", name) in ((0, 130) if stop else (0,))
        self.begun.add(name)
        self.judge_by_every_limit(then)

    @rule(then=THEN)
    def attack_with_all_that_is_remembered(self, then: str) -> None:
        assert exit_code("attack", self.folder) == 0
        self.judge_by_every_limit(then)

    @rule(names=NAMES, label=st.sampled_from(["", "ridge", "nearest"]), attack=st.booleans(), then=THEN)
    def edit_the_list(self, names: list[str], label: str, attack: bool, then: str) -> None:
        """Also with a weak attack under the name of a strong one."""
        run = Run.open(self.folder)
        weak = (ATTACKS["mean_image"].config(label=label),) if label else ()
        Run.create(self.folder, replace(run.config, attacks=(*weak, *(ATTACKS[name].config() for name in names))))
        self.asked.clear()
        if attack:
            assert exit_code("attack", self.folder) == 0
        self.judge_by_every_limit(then)

    @rule(which=st.integers(0, 1), then=THEN)
    def put_weights_in_place(self, which: int, then: str) -> None:
        if self.has_manifest:
            with changing(self.folder) as step:
                step.write("weights/last.safetensors", self.weights[which])
        else:
            self.path.write_bytes(self.weights[which])
        self.before = {}
        self.judge_by_every_limit(then)

    @precondition(lambda self: not self.has_manifest)  # which would tell of it
    @rule(data=st.data(), then=THEN)
    def delete_the_summary_or_an_attack(self, data: st.DataObject, then: str) -> None:
        doomed = data.draw(st.sampled_from(["summary.json", *sorted(p.name for p in self.folder.glob("attacks/*/"))]))
        (self.folder / "summary.json").unlink(missing_ok=True)
        if doomed != "summary.json":
            shutil.rmtree(self.folder / "attacks" / doomed)
            self.before = {}
            self.asked.clear()  # who deletes what was run begins the list anew
        self.judge_by_every_limit(then)

    @rule(limit=st.sampled_from(LIMITS), suite=st.sampled_from(["", "", "quick"]))
    def judge(self, limit: float, suite: str) -> None:
        code = exit_code("evaluate", self.folder, "--fail-if", f"mse<{limit}", *(["--suite", suite] if suite else []))
        assert code in (0, 3)
        self.hold(limit, code == 0, suite)

    def judge_by_every_limit(self, then: str) -> None:
        """By the summary that is written now, or by the one of before."""
        if then == "evaluate":
            assert exit_code("evaluate", self.folder) in (0, 2)
        for limit in LIMITS:
            try:
                assert_leakage(self.folder, mse_above=limit)
                passed = True
            except (AssertionError, UserError):
                passed = False
            self.hold(limit, passed)

    def hold(self, limit: float, passed: bool, suite: str = "") -> None:
        lying = self.lying()
        self.outcomes["passed" if passed else "failed"] += 1
        if not passed:
            self.held |= {(limit, digest) for digest, mse in lying.items() if mse < limit}
            return
        assert not {(limit, digest) for digest in lying} & self.held
        assert not self.worst() < limit  # NaN: a summary may be all that is left
        largest = suite or max(self.begun, key=lambda name: len(SUITES[name]), default="")
        assert SUITES.get(largest, set()) | self.asked <= self.finished()

    @invariant()
    def no_finished_attack_is_lost(self) -> None:
        lying = self.lying()
        assert self.before.keys() <= lying.keys()
        self.before = lying

    def teardown(self) -> None:
        shutil.rmtree(self.folder)


@pytest.mark.slow
def test_a_gate_that_held_still_holds(pictures: Path, tmp_path: Path) -> None:
    Gate.trained, Gate.outcomes = train_tiny(pictures, tmp_path / "tiny"), Counter()
    with small_suites():
        run_state_machine_as_test(Gate, settings=settings(
            max_examples=30, stateful_step_count=8, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],  # to shrink a failure takes minutes
        ))  # fmt: skip
    assert min(Gate.outcomes["passed"], Gate.outcomes["failed"]) > 5, Gate.outcomes
