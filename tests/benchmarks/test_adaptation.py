"""The benchmark of adaptation: its table, from lines whose shares are known."""

import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks.adaptation import POISONS, VARIANTS, Results, config_of, lines_in, points, table
from splitveil.registry import UserError
from splitveil.runs import write_json

FOLDER = Path(benchmarks.__file__).parent

ACCURACY = {"none": 0.5, "all": 0.7, "kept": 0.65, "reset": 0.6, "all descent": 0.7, "kept descent": 0.65, "message": 0.65}


def lines_of(seed: int) -> dict:
    def line(accuracy: float) -> dict:
        return {"accuracy": accuracy, "second_half": accuracy, "kept": 0.39, "after": accuracy}

    found = {f"{seed}/noise/5/{variant}": line(ACCURACY[variant]) for variant in VARIANTS}
    found |= {f"{seed}/poison/{kind}/{how}": line(0.79 - 0.01 * seed) for kind in POISONS for how in ("mixed", "burst")}
    return found | {f"{seed}/poison/no poison/mixed": line(0.8)}


def test_the_table_tells_the_share_of_the_gap_and_what_poison_moved(capsys: pytest.CaptureFixture[str]) -> None:
    table(lines_of(0) | lines_of(1))
    out = capsys.readouterr().out
    assert "| noise/5 | 50.00 | 70.00 | 65.00 | 60.00 | 70.00 | 65.00 | 65.00 | 39.0 |" in out
    assert "gap 20.00, of it kept 0.75, reset 0.50" in out
    assert "| one class, mixed | -1.50 | -2.00 | -1.50 | -2.00 |" in out


def test_seeds_have_folders_of_their_own() -> None:
    assert [config_of(seed, Path("data")).name for seed in (0, 1)] == ["seed0", "seed1"]


def test_lines_of_other_settings_are_refused_and_those_of_the_same_are_not_made_twice(tmp_path: Path) -> None:
    path = tmp_path / "lines-0.json"
    made = []
    for settings in ({"images": 100, "weights": "a"}, {"images": 100, "weights": "a", "attacked": 50}, {"images": 100}):
        Results(path, settings).add("0/clean/0/none", lambda: made.append(1) or {"accuracy": 0.5})
        Results(path, settings).add(f"0/{len(settings)}", dict)
    assert made == [1]
    for changed, said in (
        ({"images": 200, "weights": "a"}, "images: 100, not 200"), ({"images": 100, "weights": "b"}, "weights: a, not b"),
        ({"attacked": 60}, "attacked: 50, not 60"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=f"was made with other settings \\({said}\\); choose another --out"):
            Results(path, changed)


def test_a_file_that_tells_no_settings_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "lines-0.json", {"0/clean/0/none": {"accuracy": 0.5}})
    with pytest.raises(UserError, match="does not say with which settings it was made"):
        Results(tmp_path / "lines-0.json", {"images": 100})


def test_a_table_is_over_seeds_of_the_same_settings(tmp_path: Path) -> None:
    paths = [tmp_path / f"lines-{seed}.json" for seed in range(3)]
    for seed, images in enumerate((100, 100, 200)):
        Results(paths[seed], {"images": images, "weights": str(seed)}).add(f"{seed}/clean/0/none", dict)
    assert set(lines_in(paths[:2])) == {"0/clean/0/none", "1/clean/0/none"}
    with pytest.raises(UserError, match="images: 200, not 100"):
        lines_in(paths)


@pytest.mark.parametrize(("value", "told"), [
    (-2.4249999999999994, "-2.43"), (0.17499999999999924, "+0.18"), (0.175, "+0.18"), (-1e-15, "+0.00"), (-0.004, "+0.00"),
    (-0.1666, "-0.17"), (1.0, "+1.00"),
])  # fmt: skip
def test_a_tie_is_rounded_away_from_zero(value: float, told: str) -> None:
    assert points(value) == told


def test_the_poison_on_the_page_is_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    table(json.loads((FOLDER / "measured" / "adaptation.json").read_text()))
    printed = capsys.readouterr().out.split("| poison |")[1].splitlines()[2:]
    page = (FOLDER.parent / "docs" / "adaptation.md").read_text().split("| poison |")[1].splitlines()[2:]

    def numbers(lines: list[str]) -> list[list[str]]:
        rows = [line.replace("−", "-").replace("*", "").split("|")[2:-1] for line in lines[: 2 * len(POISONS)]]
        return sorted([cell.strip() for cell in row] for row in rows)

    assert numbers(page) == numbers(printed)
