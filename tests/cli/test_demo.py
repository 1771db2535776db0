from dataclasses import replace

import pytest

from splitveil.channel import Channel
from splitveil.cli.demo import rows
from splitveil.config import Config
from splitveil.metrics.cost import Cost, cost
from splitveil.models import build_model
from splitveil.registry import ATTACKS, DEFENCES, SURROGATES, UserError


def test_the_first_three_rows_differ_in_nothing_but_their_defence():
    plain, noisy, defended, _ = rows([])
    assert [config.name for config in (plain, noisy, defended)] == ["bottleneck", "gaussian", "gaussian+cem"]
    for config in (noisy, defended):
        assert config.data == plain.data
        assert config.splits == plain.splits
        assert config.model == plain.model
        assert config.train == plain.train
        assert config.seed == plain.seed
        assert config.attacks == plain.attacks
        assert config.defences[0] == plain.defences[0]  # the bottleneck is part of the architecture


def test_a_flag_that_does_not_suit_every_row_is_refused_with_the_row_it_does_not_suit():
    assert all(config.train.epochs == 3 for config in rows(["--train.epochs", "3"]))
    with pytest.raises(UserError, match=r"^row thin\+cem of the demo: .*model\.width.*flags must suit all rows"):
        rows(["--model.width", "8"])
    with pytest.raises(UserError, match=r"^unknown flag '--train\.epoch'"):
        rows(["--train.epoch", "3"])


def edge_cost(config: Config) -> Cost:
    """Of the edge with what the defences add to it, for the bundled images."""
    channel = Channel(DEFENCES.of(own).make_from(own) for own in config.defences)
    return cost(channel.rebuild(build_model(config.model, (1, 32, 32), 10)))["edge"]


def test_the_last_row_has_another_edge_that_costs_and_sends_no_more_and_nothing_else():
    *_, defended, frugal = rows([])
    assert (frugal.name, type(frugal.model).method) == ("thin+cem", "thin")
    assert replace(frugal, name=defended.name, model=defended.model) == defended
    before, after = edge_cost(defended), edge_cost(frugal)
    assert before.macs is not None and after.macs is not None
    assert 0.8 * before.macs < after.macs <= before.macs
    assert after.bytes <= before.bytes


def test_the_second_and_third_row_have_the_same_noise_and_only_the_third_has_cem():
    plain, noisy, defended, _ = rows([])
    assert [type(defence).method for defence in plain.defences] == ["bottleneck"]
    assert [type(defence).method for defence in noisy.defences] == ["bottleneck", "gaussian"]
    assert noisy.defences == defended.defences
    assert noisy.defences[1].sigma > 0
    assert plain.cem.surrogate is None
    assert noisy.cem.surrogate is None
    assert defended.cem.surrogate == SURROGATES["rate"].config()
    assert defended.cem.strength > 0


def test_flags_reach_every_row():
    for config in rows(["--train.epochs", "2", "--attacks", "ridge", "--seed", "5"]):
        assert (config.train.epochs, config.seed) == (2, 5)
        assert config.attacks == (ATTACKS["ridge"].config(),)
