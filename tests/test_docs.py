"""Pages of docs/ have a row for every option, their tables agree with results/, and the program understands their commands."""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

import splitveil
from benchmarks.bench.table import costs
from splitveil.__main__ import COMMANDS
from splitveil.adaptation import AdapterConfig
from splitveil.cli.arguments import parse
from splitveil.distillation import DistillationConfig
from splitveil.registry import ATTACKS, SURROGATES

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "surrogates"
COMPARISON, COST = PAGES / "comparison.md", PAGES / "cost.md"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # they import each other
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SURROGATES.names())
def test_every_surrogate_has_a_page_with_a_row_for_every_option_and_no_other(name: str) -> None:
    table = (PAGES / f"{name}.md").read_text().split("## Options")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(SURROGATES[name].config))


@pytest.mark.parametrize("name", SURROGATES.names())
def test_a_plain_default_stands_in_the_row_of_its_option(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    for field in dataclasses.fields(SURROGATES[name].config):
        if field.default is not None:
            told = str(field.default).lower() if isinstance(field.default, bool | str) else None
            values = field.default if isinstance(field.default, tuple) else (field.default,)
            told = told or ", ".join(f"{value:g}" for value in values)
            assert f"| `{field.name}` | {told} |" in page


def test_the_page_on_adaptation_has_a_row_for_every_option_with_its_default() -> None:
    table = (ROOT / "docs" / "adaptation.md").read_text().split("## Options")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    told = {True: "true", False: "false", None: "none"}
    options = {each.name: each.default for each in dataclasses.fields(AdapterConfig)}
    assert rows == {
        name: told[value] if value in (None, True, False) and not isinstance(value, float) else f"{value:g}"
        for name, value in options.items()
    }


def test_the_comparison_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((ROOT / "results" / "surrogates_fashion.json").read_text())
    assert benchmark("surrogates", monkeypatch).markdown(results["comparison"]) in COMPARISON.read_text()


def test_the_table_of_attention_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = json.loads((ROOT / "benchmarks" / "measured" / "attention_stability.json").read_text())
    assert benchmark("attention_stability", monkeypatch).markdown(measured["rows"]) in (ROOT / "docs" / "findings.md").read_text()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_costs_are_those_measured(device: str) -> None:
    measured = json.loads((ROOT / "benchmarks" / "measured" / f"surrogate_cost_{device}.json").read_text())
    assert costs(measured["rows"], measured["images"]) in COST.read_text()


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_links_to_is_there_and_what_it_tells_to_type_is_understood(
    page: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / target).exists(), target
    lines = re.findall(r"^    splitveil (.*)$", text, re.MULTILINE)
    assert lines
    for line in lines:
        command, *arguments = line.split()
        assert command in COMMANDS
        if command in ("run", "train"):
            parse(arguments)


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in PAGES.glob("*.png")}
    pages = "".join(page.read_text() for page in PAGES.glob("*.md"))
    assert all(f"]({name})" in pages for name in sizes)  # a page need not have one
    assert max(sizes.values()) < 60_000


@pytest.mark.parametrize("part", ["every", "paper"])
def test_the_tables_of_defences_are_what_the_results_say(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((ROOT / "results" / "tables_fashion.json").read_text())
    page = (ROOT / "docs" / "defences" / "README.md").read_text()
    assert benchmark("tables", monkeypatch).markdown(results["lines"], part) in page


@pytest.mark.parametrize("data", ["fashion", "cifar10"])
def test_the_table_of_the_standard_suite_is_the_one_of_the_results(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((ROOT / "results" / f"suite_{data}.json").read_text())
    page = (ROOT / "docs" / "attacks" / "README.md").read_text()
    assert benchmark("suites", monkeypatch).markdown(results["lines"]) in page


def test_the_table_of_releases_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = json.loads((ROOT / "benchmarks" / "measured" / "releases_linear_cpu.json").read_text())
    page = (ROOT / "docs" / "defences" / "keyed_noise.md").read_text()
    assert benchmark("releases", monkeypatch).markdown(measured) in page


def test_the_table_of_cifar_10_is_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    results = json.loads((ROOT / "results" / "cifar10.json").read_text())
    page = (ROOT / "docs" / "defences" / "README.md").read_text()
    assert benchmark("paper", monkeypatch).markdown(results["lines"]) in page


@pytest.mark.parametrize("name", ATTACKS.names())
def test_every_attack_has_a_page_with_a_row_for_every_option_and_no_other(name: str) -> None:
    pages = ROOT / "docs" / "attacks"
    rows = re.findall(r"^\| `(\w+)` \|", (pages / f"{name}.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(field.name for field in dataclasses.fields(ATTACKS[name].config))


def test_the_table_of_teachers_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = json.loads((ROOT / "benchmarks" / "measured" / "distillation.json").read_text())
    assert benchmark("distillation", monkeypatch).markdown(measured) in (ROOT / "docs" / "distillation.md").read_text()


def test_the_page_of_teachers_has_a_row_for_every_option_and_no_other() -> None:
    page = (ROOT / "docs" / "distillation.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", page.split("## Options")[1].split("\n## ")[0], re.MULTILINE)
    fields = [(field.name, field.default) for field in dataclasses.fields(DistillationConfig)]
    assert rows == [(name, "" if value is None else value if isinstance(value, str) else f"{value:g}") for name, value in fields]


def test_the_page_of_the_api_is_what_the_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = made.page()
    assert (ROOT / "docs" / "api.md").read_text(encoding="utf-8") == page, "run `python docs/make_api.py`"
    for name in splitveil.__all__:
        assert re.search(rf"^### splitveil\.{name}(\.build)?$", page, re.MULTILINE), name
