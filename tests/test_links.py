"""Every relative link in every page leads to a file, and its anchor to a heading of it; README leads to every page."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "docs", "examples", "recipes", "splitveil", "tests")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])


def prose(page: Path) -> str:
    """What a reader sees of a page as text: without blocks of code."""
    return re.sub(r"^(```+).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings; a heading that comes again gets -1, -2 and so on."""
    found, seen = set[str](), Counter[str]()
    for heading in re.findall(r"^#{1,6} +(.+?)\s*#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def links(page: Path) -> list[str]:
    """The relative links of a page, with their anchors. The network is not asked about the others."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    targets = re.findall(r"\]\(\s*([^)\s]+)", text) + re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def broken(page: Path, root: Path) -> list[str]:
    """The relative links of a page that lead nowhere, or out of root."""
    found = list[str]()
    for target in links(page):
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        lost = not there.exists() or not there.is_relative_to(root)
        if lost or (anchor and (there.suffix != ".md" or anchor not in anchors(there))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_and_its_anchor_lead_somewhere(page: Path) -> None:
    assert not broken(page, ROOT)


def test_every_page_is_at_most_two_clicks_from_the_readme() -> None:
    reached = {ROOT / "README.md"}
    for _ in range(2):
        pages = {page for page in reached if page.suffix == ".md"}
        reached |= {(page.parent / target.partition("#")[0]).resolve() for page in pages for target in links(page)}
    assert not {page.relative_to(ROOT).as_posix() for page in {*PAGES} - reached}


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    root = tmp_path / "clone"
    root.mkdir()
    (tmp_path / "outside.md").write_text("# Outside\n")
    (root / "there.md").write_text("# What `x` *is*, and [why](page.md)\n```\n# no heading\n```\n## Twice\n## Twice\n")
    (root / "page.md").write_text(
        "[good](there.md) [good](there.md#what-x-is-and-why) [good](there.md#twice-1) [good](#here) [`good`](there.md)\n"
        "[good](https://example.org/x#y) `[code](nowhere)`\n\n```\n[code](nowhere.md)\n```\n# Here\n[ref]: gone.md\n"
        "[bad](nowhere.md) ![bad](nowhere.png) [bad](there.md#no-heading) [bad](#there)\n"
        "[bad](there.md#twice-2) [bad](../outside.md)\n"
    )
    bad = ["nowhere.md", "nowhere.png", "there.md#no-heading", "#there", "there.md#twice-2", "../outside.md", "gone.md"]
    assert broken(root / "page.md", root) == bad
