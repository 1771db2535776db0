from splitveil.cli.demo import rows
from splitveil.registry import ATTACKS, SURROGATES


def test_the_rows_differ_in_nothing_but_their_defence():
    plain, noisy, defended = rows([])
    assert [config.name for config in (plain, noisy, defended)] == ["bottleneck", "gaussian", "gaussian+cem"]
    for config in (noisy, defended):
        assert config.data == plain.data
        assert config.splits == plain.splits
        assert config.model == plain.model
        assert config.train == plain.train
        assert config.seed == plain.seed
        assert config.attacks == plain.attacks
        assert config.defences[0] == plain.defences[0]  # the bottleneck is part of the architecture


def test_the_last_two_rows_have_the_same_noise_and_only_the_last_has_cem():
    plain, noisy, defended = rows([])
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
