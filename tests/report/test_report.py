"""Reports of hand-written run folders: nothing is trained here."""

import base64
import hashlib
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from summaries import summary

from splitveil.attacks.threat import ThreatModel
from splitveil.config import Config
from splitveil.evaluation.attack_folder import read_attack
from splitveil.evaluation.audit_folder import KIND
from splitveil.evaluation.evaluate import wilson
from splitveil.evaluation.flags import Evidence, raised
from splitveil.evaluation.summary import AttackRecord, AttackResult, EdgeAlone, Part, read_summary, to_json, write_summary
from splitveil.evaluation.worst_case import worst_case
from splitveil.metrics.cost import Latency
from splitveil.registry import UserError
from splitveil.report import page, panels, write_report
from splitveil.report.facts import distinct_labels, faced, read_runs, small, without_paths
from splitveil.report.panels.inside import inside, quantities
from splitveil.report.panels.trade_off import front
from splitveil.report.pictures import LARGEST, grids, strip
from splitveil.runs import Run, read_tensors, write_json, write_tensors

Maker = Callable[..., Path]
CEILING = 0.06


def images(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def write_attack(folder: Path, name: str, mse: float, shape: tuple[int, ...], test: int) -> AttackResult:
    """An attack as `attack_folder.write_attack` leaves it; returns its part of the summary."""
    spread = np.linspace(0.9, 1.1, 40)
    folder.mkdir(parents=True)
    np.savez(folder / "rows.npz", mse=mse * spread, ssim=0.5 * spread, psnr=-10 * np.log10(mse * spread))
    original = images(test, shape)
    rebuilt = original.float().mul(0.5).byte()
    write_tensors(
        folder / "samples.safetensors", {"index": torch.arange(len(original)), "original": original, "rebuilt": rebuilt}
    )
    record = AttackRecord(
        attack=name, method=name, seed=0, options={}, weights_sha256="w", threat=ThreatModel(), n_images=40, seconds=3.25
    )  # fmt: skip
    write_json(folder / "attack.json", to_json(record))
    return read_attack(folder, CEILING)


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """make(name, …) writes the folder of an evaluated run; `attacks` maps names to their MSE."""

    def write(
        name: str = "plain", attacks: dict[str, float] | None = None, accuracy: float = 0.9, sigma: float | None = None,
        shape: tuple[int, ...] = (4, 1, 16, 16), test: int = 1, folder: str | None = None,
        lines: list[dict[str, Any]] | None = None, **changes: Any,
    ) -> Path:  # fmt: skip
        run = Run.create(tmp_path / (folder or f"run{len(list(tmp_path.iterdir()))}"), Config(name=name))
        attacks = {"mean_image": CEILING, "ridge": 0.01} if attacks is None else attacks
        rows = {a: write_attack(run.folder / "attacks" / f"{a}-0", a, mse, shape, test) for a, mse in attacks.items()}
        for epoch in range(20):
            run.append_metrics({"epoch": epoch, "loss": 1 / (epoch + 1), "accuracy": accuracy, "bits": None, "cem_steps": 0})
        for line in lines or []:
            run.append_metrics(line)
        found = {
            "accuracy": accuracy, "accuracy_ci95": wilson(round(1000 * accuracy), 1000), "ceiling_mse": CEILING,
            "sigma": sigma, "bits": None if sigma is None else 72.4, "config_sha256": run.config_sha256,
            "splits": {"test": Part(1000, f"test{test}")}, "flags": raised(Evidence(rows, CEILING)),
        }  # fmt: skip
        write_summary(run.folder, summary(name, *rows.values(), **found | changes))
        return run.folder

    return write


class Page(HTMLParser):
    """The text of table rows, the addresses, and the tags of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.in_cell = False
        self.feed(html)
        self.rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "xlink:href", "action")]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[-1][-1] += data


def html_of(folders: list[Path], out: Path) -> str:
    return write_report(folders, out / "report.html").read_text(encoding="utf-8")


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.DOTALL)).split())


def test_a_report_is_one_file_that_loads_nothing(make: Maker, tmp_path: Path) -> None:
    folders = [make("plain"), make("noisy", {"ridge": 0.02}, sigma=0.3)]
    html = html_of(folders, tmp_path / "out")
    page = Page(html)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.html"]
    assert page.addresses
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.addresses)
    assert not {"link", "iframe", "object", "embed", "base"} & set(page.tags)
    assert page.tags.count("script") == 1
    ours = re.findall("<script>(.*?)</script>", html, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(ours.encode()).digest()).decode()
    assert f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'\"" in html
    assert "http://" not in html
    assert "https://" not in html
    assert not re.search(r"url\((?!#)|@import", html)
    assert len(page.ids) == len(set(page.ids))
    assert {address[1:] for address in page.addresses if address[0] == "#"} <= set(page.ids)


def test_no_path_of_the_machine_gets_into_the_report(make: Maker, tmp_path: Path) -> None:
    folder = make()
    config = folder / "config.toml"
    config.write_text(config.read_text().replace('[data]\nname = "fashion"', '[data]\nname = "folder"\npath = "/home/ann/faces"'))
    html = html_of([folder], tmp_path)
    assert "…/faces" in html
    assert "/home" not in html
    assert str(tmp_path) not in html


@pytest.mark.parametrize(
    "path", ["/home/ann/faces", "~/faces", "C:\\\\Users\\\\ann\\\\faces", "C:/ann/faces/", "file:///ann/faces"]
)
def test_only_the_last_part_of_an_absolute_path_is_shown(path: str) -> None:
    assert without_paths(f'path = "{path}"\nname = "a/b"') == 'path = "…/faces"\nname = "a/b"'
    assert without_paths(f'auxiliary = "folder:{path}"') == 'auxiliary = "…/faces"'


def test_the_tables_say_what_the_summaries_say(make: Maker, tmp_path: Path) -> None:
    folders = [make("plain"), make("noisy", {"mean_image": CEILING, "ridge": 0.0234}, accuracy=0.866, sigma=0.3)]
    page = Page(html_of(folders, tmp_path))
    for run in read_runs(folders):
        s, best = run.summary, run.summary.strongest
        assert best is not None
        low, high = (f"{100 * bound:.1f}" for bound in s.accuracy_ci95)
        grade, bits = run.verdict.grade, "∞" if s.bits is None else "72"
        assert [s.name, grade, f"{100 * s.accuracy:.1f}", best.attack, small(best.mse), f"{best.ssim:.3f}"] in page.rows
        assert [s.name, low, high, f"{best.psnr:.1f}", f"{best.mse / CEILING:.2f}"] in page.rows
        assert [s.name, "bottleneck", "–" if s.sigma is None else "0.3", "–", "–", bits] in page.rows
        assert [best.attack, *map(small, best.mse_ci95)] in [row[:3] for row in page.rows]
    assert ["plain", "7 160", "1 474 560", "8 × 8 × 8", "2 048", "7 160", "1 474 560"] in page.rows


def test_the_row_of_an_attack_holds_its_own_numbers(make: Maker, tmp_path: Path) -> None:
    """SSIM in the row of the strongest attack used to be the highest of any attack."""
    folder = with_judges(
        make, "plain", {"decoder": {"ssim": 0.4}, "ridge": {"ssim": 0.6}}, attacks={"decoder": 0.01, "ridge": 0.02}
    )
    rows = Page(html_of([folder], tmp_path)).rows
    assert ["decoder", "0.0100", "0.400"] in [row[3:6] for row in rows]
    assert ["decoder", "0.0100", "0.17", "0.400"] in [row[:4] for row in rows]
    assert ["ridge", "0.0200", "0.33", "0.600"] in [row[:4] for row in rows]


def test_no_table_has_more_than_seven_columns_and_every_cell_says_its_title_and_one_number(make: Maker, tmp_path: Path) -> None:
    judged = {"recognised": 0.5, "more": {f"metric{i}": 0.1 for i in range(9)}, "identity_cosine": 0.5}
    rows = {"a": {"mse": np.full(40, 0.1), "ssim": np.full(40, 0.5), "psnr": np.full(40, 20.0)}}
    folder = with_judges(
        make, "full", {"ridge": judged}, recognised_original=0.8, worst_case=worst_case(rows), sigma=0.3,
        probes={"class": {"majority": 0.1, "linear": 0.5, "mlp": 0.6}},
    )  # fmt: skip
    html = html_of([folder], tmp_path)
    page = Page(html)
    assert page.rows
    assert max(map(len, page.rows)) <= 7
    numbers = re.findall(r'<td class="n" data-label="([^"]+)">([^<]*)</td>', html)
    assert len(numbers) == html.count('<td class="n"')
    assert all(re.fullmatch(r"[^ ]*( s| min)?|\d+( × \d+)*", unescape(value)) for _, value in numbers), numbers


def test_a_folder_of_an_audit_has_a_page_without_training(make: Maker, tmp_path: Path) -> None:
    nan = float("nan")
    folder = make("audit", accuracy=0.5, accuracy_ci95=(nan, nan), cost={}, variance_histogram=(0,) * 50)
    write_summary(folder, replace(read_summary(folder), accuracy=nan))
    for name in ("config.toml", "metrics.jsonl"):
        (folder / name).unlink()
    write_json(folder / "audit.json", {"name": "audit", "what": "a function"})
    write_json(folder / "schema.json", {"schema": 1, "kind": KIND})
    html = html_of([folder], tmp_path)
    found = Page(html)
    for missing in ("trade-off", "curves", "inside", "variance", "cost"):
        assert missing not in found.ids
    assert {"headline", "flags", "pictures", "attacks", "granted", "origin"} <= set(found.ids)
    assert "ridge, the strongest of 2 attacks. " in text_of(html)
    assert ["audit", "exposed", "–", "ridge"] in [row[:4] for row in found.rows]
    assert "nan" not in re.sub(r'src="[^"]*"', "", html.lower())


def test_the_edge_alone_is_shown_where_it_was_measured_and_where_it_reaches_the_whole_the_page_says_so(
    make: Maker, tmp_path: Path
) -> None:
    old = text_of(html_of([make("old")], tmp_path))
    assert "The edge alone" not in old
    timed = {"latency": Latency(0.1234, 1, "a <CPU>"), "edge_alone": EdgeAlone(0.62, 100, 67_000)}
    weak, deep = make("weak", **timed), make("deep", **timed | {"edge_alone": EdgeAlone(0.99, 100, 67_000)})
    html = html_of([weak, deep], tmp_path)
    rows = {row[0]: row[1:] for row in Page(html).rows if len(row) == 5 and row[1] == "0.123 ms"}
    assert rows["weak"][2:] == ["62.0", "67 000"] and rows["deep"][2] == "99.0"
    told = text_of(html)
    assert "deep: the cloud adds nothing that" in told and "weak: the cloud adds nothing" not in told
    assert "on 1 thread of the computer that evaluated (a <CPU>)" in told


def test_the_contents_list_every_section_in_order(make: Maker, tmp_path: Path) -> None:
    html = html_of([make()], tmp_path)
    listed = re.findall(r'<li><a href="#([\w-]+)">', html)
    assert listed == re.findall(r'<h2 id="([\w-]+)">', html)
    assert listed[:3] == ["headline", "flags", "pictures"]


def test_the_verdict_on_each_run_stands_before_all_else(make: Maker, tmp_path: Path) -> None:
    html = html_of([make("a"), make("b", {})], tmp_path)
    text = text_of(html.partition("<body>")[2])
    assert text.startswith("What can somebody on the wire see? exposed a A listener gets the images")
    assert "not established b What a listener gets is not established: no attack gave a number." in text
    assert text.index("not established b") < text.index("At a glance")
    assert "The attacks are somebody's own list and not a whole suite." in text


def test_the_image_that_leaks_most_and_the_one_in_the_middle_can_be_compared_closely(make: Maker, tmp_path: Path) -> None:
    folder = make(attacks={"ridge": 0.01})
    html = html_of([folder], tmp_path)
    errors = 0.01 * np.linspace(0.9, 1.1, 40)
    for i in (0, 2):  # of the four samples that such an old folder kept
        assert f"ridge, MSE {small(errors[i])}, SSIM" in html
    assert "Two of 4 test images" in html
    assert Page(html).tags.count("input") == 2

    samples = read_tensors(folder / "attacks" / "ridge-0" / "samples.safetensors")[0]
    marked = {"index": torch.tensor([0, 20]), "original": samples["original"][:2] + 0, "rebuilt": samples["rebuilt"][:2] + 0}
    new = samples | {f"marked_{name}": value for name, value in marked.items()}
    write_tensors(folder / "attacks" / "ridge-0" / "samples.safetensors", new)
    html = html_of([folder], tmp_path)
    assert f"ridge, MSE {small(errors[20])}, SSIM" in html
    assert "Two of 40 test images" in html


def test_tau_is_spoken_of_only_where_it_is_drawn(make: Maker, tmp_path: Path) -> None:
    assert "τ" not in html_of([make("rate", sigma=0.3)], tmp_path)
    assert "τ" in html_of([make("gated", sigma=0.3, tau=0.01)], tmp_path)
    assert "left of σ²" not in html_of([make("plain")], tmp_path)


def test_what_defences_guarantee_is_shown_where_they_do(make: Maker, tmp_path: Path) -> None:
    rows = [
        {"releases": 1, "epsilon": 10.0, "delta": 1e-5, "bits": 0.7216},
        {"releases": 64, "epsilon": 1280.0, "delta": 1e-5, "bits": 46.18},
    ]
    private = make("private", defences=("bottleneck", "local_dp"), reports=({}, {"guarantees": rows, "exact": True}))
    html = html_of([make("plain"), make("noisy", reports=({},)), private], tmp_path)
    assert "What the defences guarantee" in text_of(html)
    page = Page(html)
    assert ["private"] in page.rows
    assert ["local_dp", "1", "10", "1e-05", "0.722"] in page.rows
    assert ["local_dp", "64", "1280", "1e-05"] in [row[:4] for row in page.rows]
    assert "Not for" not in text_of(html)
    older = make("older", defences=("local_dp",), reports=({"guarantees": rows},))
    assert "Not for older: evaluated when noise was made of floating point numbers" in text_of(html_of([older], tmp_path))
    assert "What the defences guarantee" not in text_of(html_of([make("other")], tmp_path))


def test_the_verdict_names_the_run_that_leaks_least_and_its_price(make: Maker, tmp_path: Path) -> None:
    text = text_of(html_of([make("plain", {"ridge": 0.01}), make("noisy", {"ridge": 0.03}, accuracy=0.85)], tmp_path))
    assert "noisy leaks least, at a cost of 5.0 points of accuracy against plain (85.0 % against 90.0 %)" in text
    assert "3.0 times the error of the strongest on plain (MSE 0.0300 against 0.0100). That is 50 % of the error" in text


def test_a_difference_within_the_noise_is_said_to_be(make: Maker, tmp_path: Path) -> None:
    text = text_of(html_of([make("plain", {"ridge": 0.01}), make("noisy", {"ridge": 0.0101})], tmp_path))
    assert "noisy leaks least, at the accuracy of plain (90.0 %)" in text
    assert "1.01 times the error of the strongest on plain (MSE 0.0101 against 0.0100; the 95 % intervals overlap)" in text


def test_weights_trained_further_than_measured_are_marked(make: Maker, tmp_path: Path) -> None:
    folder = make()
    write_tensors(folder / "weights" / "last.safetensors", {"w": torch.zeros(1)})
    assert "plain has been trained further since it was measured" in text_of(html_of([folder], tmp_path))


def test_a_first_run_that_leaks_least_is_said_to(make: Maker, tmp_path: Path) -> None:
    text = text_of(html_of([make("noisy", {"ridge": 0.03}), make("plain", {"ridge": 0.01})], tmp_path))
    assert "No other run leaks less than noisy, the first." in text
    assert (
        "The best reconstruction of what it sends has an MSE of 0.0300, 50 % of the error of an attacker who sees nothing. "
        in text
    )


def test_a_single_run_has_a_report(make: Maker, tmp_path: Path) -> None:
    text = text_of(html_of([make()], tmp_path))
    assert (
        "Against plain the best reconstruction has an MSE of 0.0100, 17 % of the error of an attacker who sees nothing." in text
    )
    assert "ridge, the strongest of 2 attacks" in text
    assert "No flags raised." in text


def test_a_run_that_was_not_attacked_has_a_report_that_says_so(make: Maker, tmp_path: Path) -> None:
    html = html_of([make(attacks={})], tmp_path)
    assert "No attack was run, so this report cannot say what leaks." in text_of(html)
    assert "<img" not in html
    both = text_of(html_of([make("plain"), make("bare", {})], tmp_path))
    assert "bare was not attacked" in both


def test_a_new_panel_is_shown_at_its_place_because_its_files_lie_there(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(Path(page.__file__).parent, tmp_path / "report")
    folder, runs = tmp_path / "report" / "panels", [make("a<b")]
    monkeypatch.setattr(page, "HERE", tmp_path / "report")
    monkeypatch.setattr(panels, "__path__", [*panels.__path__, str(folder)])
    (folder / "plain.html").write_text("{# place 95: made up #}\n<p>plain {{ runs[0].label }}</p>\n")
    (folder / "counted.html").write_text("{# place 96: made up #}\n<p>{{ runs|length }} of {{ count }}</p>\n")
    (folder / "counted.py").write_text("def context(runs):\n    return {'count': 7} if len(runs) == 1 else None\n")
    html = html_of(runs, tmp_path / "out")
    variance, new, cost = (
        html.index(text) for text in ('<h2 id="variance">', "<p>plain a&lt;b</p>\n\n<p>1 of 7</p>", '<h2 id="cost">')
    )
    assert variance < new < cost
    assert "of 7" not in html_of([*runs, make()], tmp_path / "out")
    (folder / "plain.html").write_text("<p>nowhere</p>")
    with pytest.raises(ValueError, match=r"first line of panels/plain.html must give its place: \{# place 40"):
        html_of(runs, tmp_path / "out")


def test_markup_in_names_is_shown_and_not_obeyed(make: Maker, tmp_path: Path) -> None:
    name = '<b onclick="x()">&"$\\alpha$\''
    html = html_of([make(name, {"ridge": 0.01}), make("</style><script>x()</script>", {"ridge": 0.02}), make("漢字")], tmp_path)
    page = Page(html)
    assert "b" not in page.tags
    assert page.tags.count("script") == 1  # ours
    assert name in text_of(html)
    assert len(re.findall(r"<text[^>]*>[^<]*\$\\alpha\$", html)) == 1  # in the scatter, as it stands


def test_a_run_without_summary_is_refused_with_the_command(make: Maker, tmp_path: Path) -> None:
    folder = make()
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match=f"{folder} has no summary.json; run `splitveil attack {folder}` and `splitveil evaluate"):
        write_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one run folder"):
        write_report([], tmp_path / "report.html")


def test_missing_packages_are_named_with_the_remedy(make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitveil.report.find_spec", lambda name: None if name == "jinja2" else importlib.util.find_spec(name))
    with pytest.raises(UserError, match=r"needs jinja2: pip install 'splitveil\[report\]'"):
        write_report([make()], tmp_path / "report.html")


def test_runs_on_different_test_images_are_neither_ranked_nor_put_under_the_same_originals(make: Maker, tmp_path: Path) -> None:
    folders = [make("a", {"ridge": 0.01}), make("b", {"ridge": 0.02}, test=2), make("c", {"ridge": 0.03})]
    with pytest.raises(UserError, match=r"b does not compare with a: other test images .*, or with --anyway"):
        write_report(folders, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    text = text_of(write_report(folders, tmp_path / "report.html", anyway=True).read_text(encoding="utf-8"))
    assert "These runs were tested on different images, so they are not ranked." in text
    assert "leaks least" not in text
    found = grids([(run, run.summary.attacks["ridge"]) for run in read_runs(folders)])
    assert [[row.run.label for row in grid.rows] for grid in found] == [["a", "c"], ["b"]]


def test_runs_whose_attackers_had_other_images_are_not_ranked_and_the_page_says_why(make: Maker, tmp_path: Path) -> None:
    test = Part(1000, "test1")
    folders = [
        make(name, splits={"test": test, "auxiliary": Part(images, name * 8)}) for name, images in (("a", 800), ("b", 4500))
    ]
    text = text_of(write_report(folders, tmp_path / "report.html", anyway=True).read_text(encoding="utf-8"))
    assert "These runs do not compare, so they are not ranked." in text
    assert (
        text.count("b does not compare with a: other images of the attacker (4500 images, sha256 bbbbbbbb, not 800 images") == 1
    )
    assert "No other run leaks less" not in text


@pytest.mark.parametrize("attacks", [{"mean_image": CEILING}, {"mean_image": CEILING, "ridge": float("nan")}])
def test_a_run_that_met_only_a_weak_attack_is_not_said_to_leak_least(
    make: Maker, tmp_path: Path, attacks: dict[str, float]
) -> None:
    text = text_of(html_of([make("a"), make("b", attacks, flags=())], tmp_path))
    assert "These runs did not face the same attacks, so they are not ranked." in text
    assert "leaks least" not in text


def test_raised_flags_come_with_why_and_what_to_do(make: Maker, tmp_path: Path) -> None:
    text = text_of(html_of([make(attacks={"mean_image": CEILING, "ridge": 0.08})], tmp_path))
    assert "beaten-by-mean plain ridge: MSE 0.0800" in text
    assert "do train it longer" in text
    assert "why the attack failed" in text
    assert "metric-ceiling" in text


def test_numbers_that_are_none_leave_gaps_and_dashes(make: Maker, tmp_path: Path) -> None:
    nan = float("nan")
    lines = [
        {"epoch": 5, "loss": nan, "accuracy": nan, "bits": nan},
        {"epoch": 6, "loss": float("inf"), "cem_loss": nan},
    ]
    folder = make(attacks={"ridge": nan, "decoder": 0.02}, lines=lines, bits=nan, flags=())
    page = html_of([folder], tmp_path)
    assert "decoder, the strongest of 2 attacks" in text_of(page)
    assert "ridge against plain gave no number" in text_of(page)
    shown = page.partition('<section aria-labelledby="origin"')[0]
    assert not re.search(r"\bnan\b|\binf\b", re.sub(r'src="[^"]*"', "", shown), re.IGNORECASE)


def diagnostics(**values: Any) -> list[dict[str, Any]]:
    """Lines of 20 epochs, CEM acting from the third on."""
    logged = {f"cem_{name}": value for name, value in values.items()}
    return [{"epoch": epoch, "loss": 1.0, "accuracy": 0.9} | (logged if epoch > 1 else {}) for epoch in range(20)]


def test_what_a_surrogate_logged_about_itself_is_drawn_with_what_it_should_look_like(make: Maker, tmp_path: Path) -> None:
    lines = diagnostics(effective_samples=0.8, gate_mean=0.5, gate_closed=0.0, overflow=0.0, excess=-0.1)
    html = html_of([make("plain"), make("gated", lines=lines)], tmp_path)
    assert html.count(">Inside the surrogate</h2>") == 1
    assert re.findall(r'aria-label="([^"]*) over the epochs, of gated"', html) == [
        "Effective samples", "Gates, mean", "Loss − loss with equal weights",
    ]  # fmt: skip
    text = text_of(html)
    assert "near 1: all samples count; below 0.25 (dashed) the alarm trips" in text
    assert "Zero throughout, as it should be, and not drawn: gates, closed; samples without a place." in text


def test_a_run_without_a_surrogate_has_nothing_inside(make: Maker, tmp_path: Path) -> None:
    assert "Inside the surrogate" not in html_of([make("plain")], tmp_path)


def test_gates_that_closed_are_drawn_though_they_are_zero(make: Maker) -> None:
    drawn, well = inside(read_runs([make(lines=diagnostics(gate_mean=0.0, slots_alive=0.0, collapsed=0.0))]))
    assert [title for title, _, _ in drawn] == ["Gates, mean", "Slots in use"]
    assert well == ["Collapsed attention"]


def test_every_diagnostic_can_be_drawn_and_says_what_it_should_look_like(make: Maker) -> None:
    lines = diagnostics(**{key: -0.25 if key == "excess" else 0.25 for key in quantities()})
    lines[4] |= dict.fromkeys((f"cem_{key}" for key in quantities()), float("nan"))
    drawn, well = inside(read_runs([make(lines=lines)]))
    assert [title for title, _, _ in drawn] == [quantity.title for quantity in quantities().values()]
    assert well == []
    assert all(len(text) > 20 for _, text, _ in drawn)


def test_an_epoch_written_twice_by_a_resumed_run_counts_once(make: Maker) -> None:
    (run,) = read_runs([make(lines=[{"epoch": 3, "loss": 0.5, "accuracy": 0.1}])])
    assert [line["epoch"] for line in run.curves] == list(range(20))
    assert run.curves[3]["accuracy"] == 0.1


def test_twelve_runs_of_one_name_are_told_apart(make: Maker, tmp_path: Path) -> None:
    folders = [make("same", {"ridge": 0.01 + 0.002 * i}, folder=f"run{i}") for i in range(12)]
    page = Page(html_of(folders, tmp_path))
    assert len({row[0] for row in page.rows if row[:2] != ["run", "verdict"] and len(row) == 6 and row[3:4] == ["ridge"]}) == 12


def test_names_that_repeat_get_their_seed_and_then_a_number() -> None:
    assert distinct_labels([summary("a", seed=seed) for seed in (0, 1, 1)]) == [
        "a, seed 0", "a, seed 1", "a, seed 1 (2)",
    ]  # fmt: skip
    assert distinct_labels([summary("a"), summary("b")]) == ["a", "b"]


@pytest.mark.parametrize("shape", [(4, 1, 16, 16), (3, 3, 16, 20), (2, 4, 8, 8), (1, 3, 300, 200)])
def test_a_strip_holds_the_pictures_side_by_side(shape: tuple[int, ...]) -> None:
    import base64
    import io

    from PIL import Image

    original = images(0, shape)
    row = strip(original)
    picture = Image.open(io.BytesIO(base64.b64decode(row.uri.partition(",")[2])))
    assert picture.size == (row.width, row.height)
    if shape[1] in (1, 3) and max(shape[2:]) <= LARGEST:
        last = np.asarray(picture)[:, -shape[3] :, :-1]  # without its alpha
        assert (last == original[-1].permute(1, 2, 0).numpy()).all()
    assert row.height == min(shape[2], LARGEST)


def test_the_front_keeps_what_nothing_beats() -> None:
    assert front([(1, 1), (2, 0), (0, 2), (0.5, 0.5), (2, 0)]) == [2, 0, 1, 4]


def test_the_same_runs_give_the_same_bytes(make: Maker, tmp_path: Path) -> None:
    folders = [make("a"), make("b")]
    assert html_of(folders, tmp_path / "1") == html_of(folders, tmp_path / "2")


def test_the_worst_case_has_a_table_and_what_was_skipped_is_said(make: Maker, tmp_path: Path) -> None:
    spread = np.linspace(0.9, 1.1, 40)
    rows = {name: {"mse": mse * spread, "ssim": 0.5 * spread, "psnr": 20 * spread} for name, mse in (("a", 0.008), ("b", 0.02))}
    new = make("new", worst_case=worst_case(rows), skipped={"decoder-mask": "there is no <mask> to know"})
    html = html_of([make("old"), new], tmp_path)
    page = Page(html)
    (worst,) = (row for row in page.rows if row[:2] == ["new", "0.0080"])
    assert worst == ["new", "0.0080", "0.500", "20.0", "0.0073", "0.545", "a"]
    assert "new: a 100.0 %" in text_of(html)  # b is nowhere the lowest
    assert "Skipped: decoder-mask against new (there is no <mask> to know)." in text_of(html)


def with_judges(make: Maker, name: str, found: dict[str, dict[str, Any]], **changes: Any) -> Path:
    """A run whose attacks have what judges and probes found."""
    folder = make(name, **changes)
    before = read_summary(folder)
    attacks = {name: replace(attack, **found.get(name, {})) for name, attack in before.attacks.items()}
    write_summary(folder, replace(before, attacks=attacks))
    return folder


def test_what_is_still_recognised_stands_beside_the_errors_and_old_runs_have_a_dash(make: Maker, tmp_path: Path) -> None:
    found = {"mean_image": {"recognised": 0.1}, "ridge": {"recognised": 0.654}}
    new = with_judges(make, "new", found, recognised_original=0.87)
    page = Page(html_of([new, make("old"), make("bare", {})], tmp_path))
    glance = {row[0]: row for row in reversed(page.rows) if len(row) == 7}  # the first table's
    assert glance["run"][6] == "still recognised, %"
    assert [glance[name][6] for name in ("new", "old", "bare")] == ["65.4", "–", "–"]
    assert ["mean_image", "10.0"] in [[row[0], row[4]] for row in page.rows if len(row) == 7]
    assert ["new", "87.0"] in [[row[0], row[5]] for row in page.rows if len(row) == 6]
    assert "still recognised" not in html_of([make("alone")], tmp_path).lower()


def test_a_run_without_a_judge_says_why(make: Maker, tmp_path: Path) -> None:
    text = text_of(html_of([make("faces", no_judge="no judge of classes: there are none")], tmp_path))
    assert "faces: no judge of classes: there are none." in text


def test_what_probes_told_has_a_panel_with_what_is_sent_and_what_the_strongest_attack_rebuilds(
    make: Maker, tmp_path: Path
) -> None:
    sent, rebuilt = ({"majority": 0.1, "linear": value, "mlp": value + 0.05} for value in (0.8, 0.6))
    found = {
        "mean_image": {"probes": {"class": {"majority": 0.1, "linear": 0.1, "mlp": 0.1}}},
        "ridge": {"probes": {"class": rebuilt}},
    }
    new = with_judges(make, "new", found, probes={"class": sent, "identity": sent})
    html = html_of([make("old"), new], tmp_path)
    rows = Page(html).rows
    assert ["new"] in rows
    assert ["what is sent", "class", "10.0", "80.0", "85.0"] in rows
    assert ["what is sent", "identity", "10.0", "80.0", "85.0"] in rows
    assert ["what ridge rebuilds", "class", "10.0", "60.0"] in [row[:4] for row in rows]
    assert "what mean_image rebuilds" not in html
    assert "What can still be told" not in html_of([make("other")], tmp_path)


def test_who_is_on_the_image_is_shown_where_somebody_is(make: Maker, tmp_path: Path) -> None:
    who = {
        "identity_cosine": 0.71,
        "identity_others": 0.05,
        "same_image": 0.4,
        "same_identity": 0.3,
        "same_identity_original": 0.9,
    }
    faces = with_judges(make, "faces", {"ridge": who})
    html = html_of([make("plain"), faces], tmp_path)
    assert html.count('<h2 id="people">Who is on the image</h2>') == 1
    assert ["ridge", "0.71", "0.05", "40.0", "30.0", "90.0"] in [row[:6] for row in Page(html).rows]
    assert "Who is on the image" not in html_of([make("other")], tmp_path)


def test_an_attack_of_before_its_images_could_be_chosen_is_the_same_attack(make: Maker) -> None:
    new = with_judges(make, "new", {"ridge": {"options": {"auxiliary": "same distribution"}}})
    audit = with_judges(make, "audit", {"ridge": {"options": {"auxiliary": "same set"}}})
    old, same, other = (faced(run) for run in read_runs([make("old"), new, audit]))
    assert old == same != other


CUT_WORDS = """<script>addEventListener("load", () => {
  const cut = [];
  for (const cell of document.querySelectorAll("td, th")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) for (const word of texts.currentNode.data.matchAll(/[\\w+]+/g)) {
      const range = document.createRange();
      range.setStart(texts.currentNode, word.index);
      range.setEnd(texts.currentNode, word.index + word[0].length);
      if (word[0].length < 40 && new Set([...range.getClientRects()].map(box => Math.round(box.top))).size > 1) cut.push(word[0]);
    }
  }
  const wide = document.documentElement.scrollWidth > innerWidth ? ["wider than the page"] : [];
  document.body.innerHTML = "<pre>" + [...cut, ...wide].join(" ") + "</pre>";
})</script></body>"""
"""Leaves nothing on a page but the words (digests aside) that its tables cut in two."""


@pytest.mark.parametrize("width", [1280, 840, 801, 700, 500])
def test_no_table_cuts_a_word_or_is_wider_than_the_page(make: Maker, tmp_path: Path, width: int) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs chromium")
    html = html_of([make("bottleneck"), make("gaussian+cem")], tmp_path)
    html = re.sub(r"<meta http-equiv=[^>]*>", "", html).replace("<details", "<details open").replace("</body>", CUT_WORDS)
    (tmp_path / "looked_at.html").write_text(html, encoding="utf-8")
    words = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --dump-dom"
    seen = subprocess.run(
        [browser, *words.split(), f"--user-data-dir={tmp_path / 'browser'}", f"--window-size={width},3000",
         (tmp_path / "looked_at.html").as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert re.findall(r"<pre>(.*?)</pre>", seen.stdout) == [""]
