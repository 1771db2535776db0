"""Every claim under results/ has its fields, and a claim that lacks one is refused."""

from pathlib import Path

import pytest

from splitveil.evaluation.claims import check_claim, digest
from splitveil.files.folder import read_json
from splitveil.registry import UserError

CLAIMS = sorted((Path(__file__).parents[2] / "results").glob("*.json"))


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: path.stem)
def test_a_claim_says_what_produced_it(path: Path) -> None:
    claim = read_json(path)
    check_claim(claim, str(path))
    assert claim["rows"]
    assert {row["seed"] for row in claim["rows"]} == set(claim["seeds"])
    assert all(0 <= row["accuracy"] <= 1 and 0 <= row["mse"] <= 1 and len(row["ci95"]) == 2 for row in claim["rows"])
    assert all(row["ci95"][0] <= row["mse"] <= row["ci95"][1] for row in claim["rows"])


def test_there_are_claims() -> None:
    assert CLAIMS


def test_a_claim_without_its_seeds_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="field 'schema'"):
        check_claim({}, "results/x.json")


def test_one_digest_stands_for_itself_and_several_for_their_set() -> None:
    assert digest(["a", "a"]) == "a"
    assert digest(["a", "b"]) == digest(["b", "a"]) != digest(["a", "c"])
