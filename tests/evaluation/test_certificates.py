"""Certificates of a channel: which there are, what each assumes, and which of several noises counts."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from splitveil.channel import Noisy
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages
from splitveil.defences import build
from splitveil.evaluation import certificates as texts
from splitveil.evaluation.certificates import certificates
from splitveil.evaluation.summary import Certificate
from splitveil.registry import DEFENCES
from splitveil.split_model import SplitModel


def image_set(n: int, seed: int) -> DeviceImages:
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 1, 4, 4), dtype=np.uint8)
    return DeviceImages(ImageSet(pixels, np.arange(n) % 2, ("a", "b", "c")), torch.device("cpu"))


def test_a_channel_with_noise_and_a_guarantee_has_all_certificates_and_one_without_has_none() -> None:
    test, prior = image_set(40, 0), image_set(100, 1)
    clean = test.take(slice(None)).flatten(1)[:, :5]
    defence = build("local_dp", mechanism="laplace", epsilon=1.0, delta=1e-5, clip="norm", bound=1.0)
    found = certificates([Noisy(clean, 0.5)], test, prior, [{}, defence.report((1, 4))], releases=(1, 16))
    kinds = {(row.name, row.unit, row.holds_for) for row in found}
    assert {("rate", "bits", 16), ("known set", "bits", 1), ("known set", "MSE", 1), ("paper", "MSE", 16)} <= kinds
    assert {("local dp", "epsilon", 4), ("local dp", "bits", 1), ("fano", "MSE", 1)} <= kinds
    assert all(row.assumptions and np.isfinite(row.value) and row.value >= 0 for row in found)
    assert [row.name for row in found if not row.proved] == ["paper", "paper"]
    paper = next(row for row in found if row.name == "paper")
    assert paper.per_class is not None and np.isnan(paper.per_class[2])
    assert paper.value == pytest.approx(np.mean(paper.per_class[:2]))
    assert certificates([], test, prior, [{}]) == []


def test_of_two_noises_the_one_that_certifies_more_counts() -> None:
    test, prior = image_set(30, 0), image_set(60, 1)
    clean = test.take(slice(None)).flatten(1)
    weak, strong = Noisy(clean, 0.01), Noisy(clean, 2.0)
    both, alone = (certificates(noisy, test, prior, [], (1,)) for noisy in ([weak, strong], [strong]))
    assert [row.value for row in both] == pytest.approx([row.value for row in alone], rel=0.1)


PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"
NAMED = {
    texts.FRESH: "fresh", texts.REAL: "arithmetic", texts.EXACT: "arithmetic", texts.SAMPLE: "sample", texts.THIS_SET: "this set",
    texts.BLOCKS: "blocks", texts.SAME_CODE: "same code", texts.GAUSSIAN_PRIOR: "gaussian prior",
}  # fmt: skip


def short(assumption: str) -> str:
    """The name that the page gives an assumption."""
    if assumption.startswith("Noise and sums are whole steps of a grid"):
        return "whole steps"
    return "delta" if assumption.startswith("It may be exceeded with probability delta") else NAMED[assumption]


def all_certificates(exact: bool) -> list[Certificate]:
    test, prior = image_set(40, 0), image_set(100, 1)
    private = build("local_dp", bound=1.0)
    private.attach(SplitModel(nn.Identity(), nn.Identity(), (5,), (5,)))
    noisy = Noisy(test.take(slice(None)).flatten(1)[:, :5], 0.5, exact)
    reports = [private.report((1,)), build("finite_code", levels=(2, 2)).report()]
    return certificates([noisy], test, prior, reports, releases=(1,), sent=test.labels[:, None])


@pytest.mark.parametrize("exact", [False, True])
def test_the_page_on_guarantees_has_every_certificate_with_just_what_it_assumes(exact: bool) -> None:
    rows = re.findall(r"^\| `([\w ]+)`, (\w+) \| .* \| ([\w ,]+) \| (yes|no) \|$", PAGE.read_text(), re.MULTILINE)
    found = all_certificates(exact)
    assert all((texts.EXACT in row.assumptions) == exact for row in found if row.name in ("rate", "known set", "paper"))
    made = [(row.name, row.unit, ", ".join(map(short, row.assumptions)), "yes" if row.proved else "no") for row in found]
    assert sorted(set(made)) == sorted(rows)


def test_a_finite_code_certifies_its_bits_for_any_number_of_releases_and_the_error_of_the_best_answer_to_each_code() -> None:
    test, prior = image_set(40, 0), image_set(100, 1)
    x, code = test.take(slice(None)).flatten(1).double(), test.take(slice(None))[:, 0, 0, :1] > 0.5
    found = certificates([], test, prior, [build("finite_code", levels=(2, 2)).report()], sent=code)
    assert [(row.name, row.unit, row.holds_for) for row in found] == [
        ("finite code", unit, n) for n in (1, 16) for unit in ("bits", "MSE")
    ]
    parts = [x[code[:, 0] == one] for one in (False, True)]
    best = sum(float((part - part.mean(0)).square().sum()) for part in parts) / x.numel()
    assert [row.value for row in found] == pytest.approx([2, best, 2, best])
    assert all(row.proved for row in found)


def test_the_page_on_guarantees_has_every_assumption_in_full() -> None:
    page = PAGE.read_text()
    assert all(f"| {text} |" in page for text in NAMED)


@pytest.mark.parametrize("name", DEFENCES.names())
def test_the_page_on_guarantees_names_every_defence_that_guarantees_something_and_what_it_reports(name: str) -> None:
    rows = build(name).report().get("guarantees", [])
    assert all(f"`{word}`" in PAGE.read_text() for row in rows for word in (name, *row))


def test_a_private_certificate_says_with_what_probability_its_noise_is_not_exact() -> None:
    found = next(row for row in all_certificates(True) if row.name == "local dp")
    assert "except with a probability of 1e-18 that noise alone decides" in found.assumptions[1]  # 5 entries of 2^-62
