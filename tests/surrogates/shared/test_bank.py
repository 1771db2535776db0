import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitveil.surrogates import build
from splitveil.surrogates.shared.bank import Bank, bank_for

YES = torch.tensor(True)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.integers(1, 5), classes=st.integers(1, 4))
def test_it_holds_the_last_features_of_every_class(data: st.DataObject, size: int, classes: int) -> None:
    bank, kept = Bank(1, classes, size), {c: [] for c in range(classes)}
    number = 0
    for labels in data.draw(st.lists(st.lists(st.integers(0, classes - 1), min_size=1, max_size=9), max_size=4)):
        z = torch.arange(number, number + len(labels)).float().unsqueeze(1)
        bank.push(z, torch.tensor(labels), YES)
        for value, label in zip(z.flatten().tolist(), labels):
            kept[label].append(value)
        number += len(labels)
    rows, known = bank.recall(torch.arange(classes).unsqueeze(1), torch.arange(-1, size + 1).expand(classes, -1))
    features = rows[:-1].view(*known.shape, 1)
    assert rows[-1] == 0
    for c in range(classes):
        newest = kept[c][: -size - 1 : -1]
        assert known[c].tolist() == [False] + [True] * len(newest) + [False] * (size + 1 - len(newest))
        assert features[c].flatten().tolist() == [0, *newest, *[0] * (size + 1 - len(newest))]


def test_neither_a_skipped_step_nor_a_row_that_is_not_finite_enters() -> None:
    bank = Bank(2, 2, 3)
    bank.push(torch.ones(2, 2), torch.tensor([0, 1]), torch.tensor(False))
    bank.push(torch.tensor([[1.0, torch.nan], [2.0, 2.0], [torch.inf, 0.0]]), torch.tensor([0, 0, 1]), YES)
    rows, known = bank.recall(torch.arange(2).unsqueeze(1), torch.arange(3).expand(2, -1))
    assert known.tolist() == [[1, 0, 0], [0, 0, 0]]
    assert rows[0].tolist() == [2, 2]
    assert torch.isfinite(bank.rows).all()


def test_a_bank_comes_unasked_only_where_batches_hold_few_of_a_class() -> None:
    assert [bank_for(*needs) for needs in [(64, 10, 392), (512, 100, 392), (None, 10, 8), (None, 100, 8)]] == [0, 0, 0, 16]
    assert bank_for(256, 1000, 2**17) == 2  # what it holds is bounded


@pytest.mark.parametrize("name", ["uniform", "rate", "gated"])
def test_a_bank_that_nobody_asked_for_is_said(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(name, dim=3, classes=200, sigma=0.1, bank=0).bank is None
    assert build(name, dim=3, classes=200, sigma=0.1, bank=4).bank is not None
    assert capsys.readouterr().err == ""
    assert build(name, dim=3, classes=200, sigma=0.1).bank is not None
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("warning: a batch holds 0.64 samples of each of the 200 classes")
    assert said.endswith("set the surrogate's bank to choose how many, 0 for none")
