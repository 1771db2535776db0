from typing import Any

import pytest
import torch
from torch import Tensor

from splitveil.statistics.clustering import kmeans
from splitveil.surrogates import build
from splitveil.surrogates.shared.auto import AT_ONCE, Auto, steadied

D = 24


def features(*k: int, seed: int = 0, n: int = 120) -> tuple[Tensor, Tensor]:
    """A class for each number, with that many modes, far apart."""
    generator = torch.Generator().manual_seed(seed)
    x = [10 * torch.eye(8, D)[torch.arange(n) % modes] + 0.3 * torch.randn(n, D, generator=generator) for modes in k]
    return torch.cat(x), torch.arange(len(k)).repeat_interleave(n)


def test_a_number_changes_when_two_votes_in_a_row_say_so() -> None:
    chosen, before, now = torch.tensor([[0, 0, 3], [3, 3, 3], [3, 5, 5], [3, 5, 4]]).T
    assert steadied(chosen, before, now).tolist() == [3, 3, 5, 3]


def test_over_refreshes_it_follows_a_lasting_change_and_no_other() -> None:
    auto, numbers = Auto(2, 16), []
    for k in [(2, 4), (3, 4), (2, 4), (3, 4), (3, 5), (3, 5)]:
        at_most, _ = auto.look(*features(*k), None)
        numbers.append(at_most.tolist())
    assert numbers == [[2, 4], [2, 4], [2, 4], [2, 4], [3, 4], [3, 5]]


def test_a_class_whose_number_changed_starts_from_the_vote_and_others_from_what_they_have() -> None:
    auto = Auto(2, 16)
    _, start = auto.look(*features(2, 4), None)
    assert (start.weight > 0).sum(1).tolist() == [2, 4]
    kept = start._replace(centre=start.centre + 1)
    auto.look(*features(3, 4), kept)
    at_most, start = auto.look(*features(3, 4), kept)
    assert at_most.tolist() == [3, 4]
    assert (start.weight > 0).sum(1).tolist() == [3, 4]
    assert torch.equal(start.centre[1], kept.centre[1])
    assert not torch.equal(start.centre[0], kept.centre[0])


def test_many_classes_vote_in_turns_after_the_first_refresh() -> None:
    classes = 2 * AT_ONCE + 3
    auto, everyone = Auto(classes, 16), set(range(classes))
    device = torch.device("cpu")
    assert set(auto.who_votes(classes, device).tolist()) == everyone
    voted: list[int] = []
    for turn in range(1, 4):
        auto.turn.fill_(turn)
        now = auto.who_votes(classes, device).tolist()
        assert 0 < len(now) <= AT_ONCE
        voted += now
    assert sorted(voted) == sorted(everyone)


def test_a_class_that_appears_later_is_voted_on_then() -> None:
    auto = Auto(3, 16)
    x, y = features(2, 4)
    assert auto.look(x, y, None)[0].tolist() == [2, 4, 0]
    x, y = features(2, 4, 5)
    assert auto.look(x, y, None)[0].tolist() == [2, 4, 5]


@pytest.mark.parametrize(("name", "option"), [("kmeans", "clusters"), ("gmm", "components"), ("slots", "slots")])
def test_surrogates_keep_as_many_clusters_as_there_are_modes_in_shapes_that_stay(name: str, option: str) -> None:
    torch.manual_seed(0)
    surrogate: Any = build(name, dim=D, classes=3, sigma=0.1, **{option: "auto"})
    shape = surrogate.weight.shape
    for k in [(1, 2, 6), (1, 4, 6), (1, 4, 6)]:
        surrogate.refresh(*features(*k))
        assert surrogate.weight.shape == shape
    assert (surrogate.weight > 0).sum(1).tolist() == [1, 4, 6]
    assert torch.allclose(surrogate.weight.sum(1), torch.ones(3))


def test_a_resumed_surrogate_goes_on_with_its_numbers() -> None:
    first, second = (build("kmeans", dim=D, classes=2, sigma=0.1, clusters="auto") for _ in range(2))
    for surrogate in (first,):
        surrogate.refresh(*features(2, 4))
        surrogate.refresh(*features(3, 4))  # the first vote for another number
    second.load_state_dict(first.state_dict())
    for surrogate in (first, second):
        surrogate.refresh(*features(3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values()))
    assert second.auto.chosen.tolist() == [3, 4]


@pytest.mark.parametrize(("name", "option"), [("kmeans", "clusters"), ("gmm", "components"), ("slots", "slots")])
def test_with_a_number_nothing_is_voted_on_and_nothing_more_is_saved(
    name: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitveil.surrogates.shared.auto.vote", None)
    surrogate: Any = build(name, dim=D, classes=2, sigma=0.1, **{option: 3})
    surrogate.refresh(*features(2, 4))
    assert surrogate.weight.shape == (2, 3)
    assert not any("auto" in key for key in surrogate.state_dict())


def test_a_limit_that_no_class_reaches_changes_no_bit() -> None:
    x, y = features(2, 4)
    found = []
    for at_most in (None, torch.tensor([5, 5])):
        torch.manual_seed(0)
        found.append(kmeans(x, y, 2, 5, members=8, tries=3, at_most=at_most))
    assert all(torch.equal(a, b) for a, b in zip(*found))
