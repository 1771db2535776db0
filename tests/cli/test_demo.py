from splitveil.cli.demo import rows
from splitveil.registry import ATTACKS, SURROGATES


def test_the_rows_differ_in_nothing_but_their_defence():
    none, noisy, defended = rows([])
    assert [config.name for config in (none, noisy, defended)] == ["none", "gaussian", "gaussian+cem"]
    for config in (noisy, defended):
        assert config.data == none.data
        assert config.splits == none.splits
        assert config.model == none.model
        assert config.train == none.train
        assert config.seed == none.seed
        assert config.attacks == none.attacks
        assert config.defences[0] == none.defences[0]  # the bottleneck is part of the architecture


def test_the_last_two_rows_have_the_same_noise_and_only_the_last_has_cem():
    none, noisy, defended = rows([])
    assert [type(defence).method for defence in none.defences] == ["bottleneck"]
    assert [type(defence).method for defence in noisy.defences] == ["bottleneck", "gaussian"]
    assert noisy.defences == defended.defences
    assert noisy.defences[1].sigma > 0
    assert none.cem.surrogate is None
    assert noisy.cem.surrogate is None
    assert defended.cem.surrogate == SURROGATES["rate"].config()
    assert defended.cem.strength > 0


def test_flags_reach_every_row():
    for config in rows(["--train.epochs", "2", "--attacks", "ridge", "--seed", "5"]):
        assert (config.train.epochs, config.seed) == (2, 5)
        assert config.attacks == (ATTACKS["ridge"].config(),)
