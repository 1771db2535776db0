import itertools
import re
from pathlib import Path

import pytest

from splitveil.cli.arguments import parse, settings, spelling
from splitveil.cli.command_flags import COMMANDS, IMPORT, NAMES
from splitveil.config import Config
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, UserError


def test_no_arguments_give_the_defaults():
    assert parse([]) == Config()


def test_a_surrogate_is_chosen_by_name_and_then_has_flags():
    config = parse(["--cem.surrogate", "rate", "--cem.surrogate.form", "full"])
    assert config.cem.surrogate == SURROGATES["rate"].config(form="full")
    assert parse(["--cem.surrogate", "none"]).cem.surrogate is None


def test_defences_stack_in_their_order_and_have_flags_by_place():
    config = parse(["--defences", "bottleneck,gaussian", "--defences.1.sigma", ".05", "--defences.0.channels", "4"])
    assert config.defences == (DEFENCES["bottleneck"].config(channels=4), DEFENCES["gaussian"].config(sigma=0.05))
    assert parse(["--defences", "gaussian, bottleneck"]).defences[1] == DEFENCES["bottleneck"].config()


def test_model_and_data_are_chosen_by_name_and_then_have_flags():
    config = parse(["--model", "vgg11", "--model.cut", "conv3", "--data=npz", "--data.path=a=b.npz"])
    assert config.model == MODELS["vgg11"].config(cut="conv3")
    assert config.data == DATASETS["npz"].config(path="a=b.npz")


def test_attacks_may_be_several_or_none():
    assert parse(["--attacks", "ridge", "--attacks.0.passes", "2"]).attacks == (ATTACKS["ridge"].config(passes=2),)
    assert parse(["--attacks", "none"]).attacks == ()
    assert parse(["--attacks="]).attacks == ()


def test_the_order_of_flags_does_not_matter():
    groups = [
        "--defences.1.sigma 0.05", "--defences bottleneck,gaussian", "--cem.surrogate.form=full", "--cem.surrogate rate",
        "--train.augment.no-flip",
    ]  # fmt: skip
    configs = [parse(" ".join(order).split()) for order in itertools.permutations(groups)]
    assert all(config == configs[0] for config in configs)
    assert configs[0] != Config()


def test_settings_that_are_valid_only_together_are_checked_together():
    teachers = ["--train.distillation.clean", "runs/a", "--train.distillation.defended", "ema"]
    balanced = ["--train.distillation.temperatures", "balanced"]
    assert parse([*balanced, *teachers]) == parse([*teachers, *balanced])
    with pytest.raises(UserError, match="needs two teachers"):
        parse(balanced)


def test_of_the_same_flag_the_last_one_counts():
    assert parse(["--seed", "1", "--seed", "2"]).seed == 2
    assert parse(["--model", "vgg11", "--model", "small"]).model == MODELS["small"].config()
    assert parse(["--train.no-bf16", "--train.bf16"]).train.bf16


@pytest.mark.parametrize("flags", ["--train.weight-decay 0.1", "--train.weight_decay 1e-1", "--train.weight-decay=.1"])
def test_dashes_underscores_and_equals_signs_are_all_right(flags: str):
    assert parse(flags.split()).train.weight_decay == 0.1


def test_every_kind_of_value_is_read():
    milestones, others = ["--train.milestones", "1", "2"], ["--cem.clip", "None", "--train.tensorboard", "--seed", "-3"]
    config = parse([*milestones, "--cem.sigma", "0.5", *others])
    assert config.train.milestones == (1, 2)
    assert config.cem.sigma == 0.5
    assert config.cem.clip is None
    assert config.train.tensorboard
    assert config.seed == -3
    assert parse(["--train.milestones=5,6"]).train.milestones == (5, 6)
    assert parse(["--train.milestones"]).train.milestones == ()
    assert not parse(["--train.bf16=false"]).train.bf16
    assert parse(["--name", ""]).name == ""


RECIPE = """
seed = 7
defences = [{ name = "bottleneck", channels = 5 }, { name = "gaussian", sigma = 0.5 }]
[model]
name = "small"
width = 3
[cem]
surrogate = "rate"
strength = 2
[cem.rate]
form = "full"
[train]
epochs = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return str(tmp_path / "recipe.toml")


def test_flags_come_on_top_of_the_recipe(recipe: str):
    config = parse([recipe, "--train.epochs", "5", "--defences.1.sigma", "0.6"])
    assert (config.seed, config.train.epochs, config.cem.strength) == (7, 5, 2.0)
    assert config.defences == (DEFENCES["bottleneck"].config(channels=5), DEFENCES["gaussian"].config(sigma=0.6))


def test_options_are_kept_where_a_name_stays_and_dropped_where_it_changes(recipe: str):
    config = parse([recipe, "--defences", "gaussian,none", "--model", "small", "--cem.surrogate", "rate"])
    assert config.defences == (DEFENCES["gaussian"].config(sigma=0.5), DEFENCES["none"].config())
    assert config.model == MODELS["small"].config(width=3)
    assert config.cem.surrogate == SURROGATES["rate"].config(form="full")
    config = parse([recipe, "--model", "vgg11", "--cem.surrogate", "uniform"])
    assert config.model == MODELS["vgg11"].config()
    assert config.cem.surrogate == SURROGATES["uniform"].config()
    assert config.cem.strength == 2.0


@pytest.mark.parametrize(("flags", "message"), [
    (["--train.epoch", "3"], "unknown flag '--train.epoch'; did you mean '--train.epochs'?"),
    (["--train.no-bf61"], "did you mean '--train.no-bf16'?"),
    (["--defence", "gaussian"], "did you mean '--defences'?"),
    (["--train.epochs", "ten"], "--train.epochs is 'ten', must be of type int"),
    (["--train.epochs", "1.5"], "--train.epochs is '1.5', must be of type int"),
    (["--train.lr", "fast"], "--train.lr is 'fast', must be of type float"),
    (["--train.bf16=maybe"], "--train.bf16 is 'maybe', must be of type bool"),
    (["--train.no-bf16=true"], "unknown flag '--train.no-bf16'"),
    (["--train.schedule", "linear"], "--train.schedule is 'linear', must be one of 'cosine', 'milestones'"),
    (["--train.milestones", "1", "x"], "--train.milestones is 'x', must be of type int"),
    (["--cem.sigma", "low"], "--cem.sigma is 'low', must be of type float"),
    (["--train.epochs"], "--train.epochs needs a value"),
    (["--train.epochs", "--seed", "1"], "--train.epochs needs a value"),
    (["--model"], "--model needs a value: NAME"),
    (["--model", "--seed", "1"], "--model needs a value: NAME"),
    (["--seed", "1", "recipe.toml"], "unexpected argument 'recipe.toml'; a recipe comes first"),
    (["--train.bf16", "maybe"], "unexpected argument 'maybe'"),
    (["-x"], "unexpected argument '-x'"),
    (["--cem.surrogate", "raet"], "unknown surrogate 'raet'; did you mean 'rate'?"),
    (["--defences", "bottleneck,"], "unknown defence ''"),
    (["--defences.7.sigma", "1"], "unknown flag '--defences.7.sigma'"),
    (["--cem.surrogate.form", "full"], "unknown flag '--cem.surrogate.form'"),
])  # fmt: skip
def test_a_mistake_is_one_line_that_names_it(flags: list[str], message: str):
    with pytest.raises(UserError) as error:
        parse(flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_in_the_recipe_is_found_also_where_a_flag_replaces_it(tmp_path: Path):
    (tmp_path / "recipe.toml").write_text("defences = 3")
    with pytest.raises(UserError, match="defences is 3, must be a list"):
        parse([str(tmp_path / "recipe.toml"), "--defences", "gaussian"])


def test_the_help_shows_exactly_the_flags_that_are_understood(capsys: pytest.CaptureFixture[str]):
    flags = ["--defences=bottleneck,gaussian", "--cem.surrogate=rate", "--data=npz", "--attacks=ridge,decoder"]
    known = settings(parse(flags))
    with pytest.raises(SystemExit) as stop:
        parse([*flags, "--help"])
    assert stop.value.code == 0
    shown = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", capsys.readouterr().out))
    ours = {spelling(name) for name in known} | {spelling(name, False) for name in known if known[name].hint is bool}
    assert shown == ours | {flag.name for flag in (*NAMES, *COMMANDS["train"].flags, IMPORT)}


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_gives_default_meaning_and_bounds_and_keeps_to_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        parse(["--defences", "bottleneck,gaussian", "--cem.surrogate", "gated", "--attacks", "diffusion", "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert "defences.1: gaussian --defences.1.sigma FLOAT 0.025 Standard deviation of the noise" in text
    assert "Must be above 0." in text
    assert "cosine How the learning rate falls" in text
    assert "One of cosine, milestones." in text
    assert re.search(r"--train.bf16 +on +\w", "\n".join(lines))
