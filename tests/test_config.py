import dataclasses
import math
import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitveil.cem import CEMConfig
from splitveil.cli.arguments import parse
from splitveil.config import Config, TrainConfig, from_dict, read_toml, to_dict, to_toml
from splitveil.data.splits import SplitsConfig
from splitveil.options import Bounds
from splitveil.registry import ATTACKS, DATASETS, DEFENCES, MODELS, SURROGATES, Registry, UserError
from splitveil.runs import Run
from splitveil.training.train_runs import train_run

texts = st.text(st.characters(exclude_categories=["Cs"]))  # lone surrogates are not Unicode text
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | texts
keys = st.text("abcxyz_09", min_size=1)
tables = st.recursive(
    st.dictionaries(keys, scalars | st.lists(scalars)),
    lambda below: st.dictionaries(keys, scalars | below | st.lists(below, min_size=1)),
    max_leaves=8,
)


@given(tables)
@example({"a": 'quote " backslash \\ newline \n return \r tab \t bell \x07 null \x00 delete \x7f next line \x85 ü € 🙂 \\u0041'})
@example({"a": [1e-05, 1e16, 1e22, 5e-324, -0.0, math.inf, -math.inf, 0.1]})
@example({"a": "'''", "b": '"""', "c": "", "d": []})
def test_toml_reads_back_what_was_written(table: dict[str, Any]):
    back = tomllib.loads(to_toml(table))
    assert back == table
    assert repr(back) == repr(tomllib.loads(to_toml(back)))  # also -0.0, and True is not 1


def test_nan_survives_toml():
    assert math.isnan(tomllib.loads(to_toml({"a": math.nan}))["a"])


def registered() -> list[Any]:
    kinds = {"data": DATASETS, "model": MODELS, "defences": DEFENCES, "attacks": ATTACKS, "surrogate": SURROGATES}
    return [pytest.param(kind, r, name, id=f"{kind}-{name}") for kind, r in kinds.items() for name in r.names()]


@pytest.mark.parametrize(("kind", "registry", "name"), registered())
def test_every_registered_method_survives_dict_and_toml(kind: str, registry: Registry, name: str):
    method = registry[name].config()
    if kind == "surrogate":
        config = Config(cem=CEMConfig(surrogate=method))
    else:
        config = Config(**{kind: (method, method) if kind in ("defences", "attacks") else method})
    assert from_dict(to_dict(config)) == config
    assert from_dict(tomllib.loads(to_toml(to_dict(config)))) == config
    assert registry.of(method).name == name


def another(value: Any, field: dataclasses.Field[Any]) -> Any:
    """A value of the same type, within the option's bounds, that differs from the default."""
    hint, bounds = field.type, field.metadata.get("bounds", Bounds())
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        near = (value + 1, value + 2, value - 1) if isinstance(value, int) else (value + 1, value / 2, 0.5, 0.75)
        return next(other for other in near if other != value and bounds.allow(other))
    if value is None:
        arm = next(arm for arm in get_args(hint) if arm is not type(None))
        near = (get_args(arm)[0],) if get_args(arm) else {int: (3,), float: (2.5, 0.5), bool: (True,), str: ("other",)}[arm]
        return next(other for other in near if bounds.allow(other))
    if isinstance(value, tuple):
        return (*value, 7)
    return next((choice for choice in getattr(hint, "__args__", ()) if choice != value), "other")


@pytest.mark.parametrize(("kind", "registry", "name"), registered())
def test_every_option_of_every_method_survives_with_another_value(kind: str, registry: Registry, name: str):
    cls = registry[name].config
    default = cls()
    method = cls(**{f.name: another(getattr(default, f.name), f) for f in dataclasses.fields(cls)})
    if kind == "surrogate":
        config = Config(cem=CEMConfig(surrogate=method))
    else:
        config = Config(**{kind: (method,) if kind in ("defences", "attacks") else method})
    assert from_dict(tomllib.loads(to_toml(to_dict(config)))) == config


def test_every_setting_that_is_no_method_survives_with_another_value():
    def varied(config: Any) -> Any:
        changes = {}
        for f in dataclasses.fields(config):
            value = getattr(config, f.name)
            changes[f.name] = varied(value) if dataclasses.is_dataclass(value) else another(value, f)
        return replace(config, **changes)

    cem = replace(varied(replace(CEMConfig(), surrogate=SURROGATES["rate"].config())), surrogate=None, lr_rescale="off")
    for left_out in ({"muon": 0.0}, {"edge_weight_decay": None}):  # which do not go together
        train = replace(varied(TrainConfig()), schedule="milestones", **left_out)
        train = replace(train, distillation=replace(train.distillation, defended="ema"))  # whose average `decay` is of
        config = Config('it\'s "me"\\', 3, "cpu", splits=varied(SplitsConfig()), cem=cem, train=train, defences=(), attacks=())
        assert from_dict(tomllib.loads(to_toml(to_dict(config)))) == config


def test_a_name_alone_is_short_for_a_method_with_its_defaults():
    config = from_dict({"model": "vgg11", "data": "cifar10", "defences": ["bottleneck", {"name": "gaussian"}]})
    assert config.model == MODELS["vgg11"].config()
    assert config.data == DATASETS["cifar10"].config()
    assert config.defences == (DEFENCES["bottleneck"].config(), DEFENCES["gaussian"].config())


@pytest.mark.parametrize(("table", "message"), [
    ({"trian": {}}, "unknown setting 'trian'; did you mean 'train'?"),
    ({"train": {"epoch": 3}}, "unknown setting 'train.epoch'; did you mean 'train.epochs'?"),
    ({"train": {"augment": {"flipp": True}}}, "did you mean 'train.augment.flip'?"),
    ({"model": {"name": "smal"}}, "unknown model 'smal'; did you mean 'small'?"),
    ({"model": {"name": "zzz"}}, "unknown model 'zzz'; known: "),
    ({"model": {"cut": "conv2"}}, "model is {'cut': 'conv2'}, which has no name; known: "),
    ({"model": {"name": "small", "widht": 3}}, "did you mean 'width'?"),
    ({"model": {"name": 3}}, "model is called 3, must be one of "),
    ({"data": {"name": "fashon"}}, "unknown data set 'fashon'; did you mean 'fashion'?"),
    ({"defences": [{"name": "gausian"}]}, "unknown defence 'gausian'; did you mean 'gaussian'?"),
    ({"defences": [{"name": "gaussian", "sgima": 1.0}]}, "did you mean 'sigma'?"),
    ({"defences": [3]}, "defences.0 is 3, which has no name"),
    ({"attacks": [{"name": "rigde"}]}, "unknown attack 'rigde'; did you mean 'ridge'?"),
    ({"cem": {"surrogate": "raet"}}, "unknown surrogate 'raet'; did you mean 'rate'?"),
    ({"cem": {"surrogate": "rate", "rate": {"from": "full"}}}, "did you mean 'form'?"),
    ({"cem": {"surrogate": 3}}, "is called 3, must be one of "),
    ({"cem": {"strenght": 3}}, "did you mean 'cem.strength'?"),
])  # fmt: skip
def test_an_unknown_name_is_refused_with_a_suggestion(table: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        from_dict(table)
    assert message in str(error.value)


@pytest.mark.parametrize(("table", "message"), [
    ({"seed": "one"}, "seed is 'one', must be of type int"),
    ({"seed": 1.5}, "seed is 1.5, must be of type int"),
    ({"seed": True}, "seed is True, must be of type int"),
    ({"name": 3}, "name is 3, must be of type str"),
    ({"train": {"lr": "fast"}}, "train.lr is 'fast', must be of type float"),
    ({"train": {"lr": True}}, "train.lr is True, must be of type float"),
    ({"train": {"bf16": 1}}, "train.bf16 is 1, must be of type bool"),
    ({"train": {"schedule": "linear"}}, "train.schedule is 'linear', must be one of 'cosine', 'milestones'"),
    ({"train": {"milestones": 3}}, "train.milestones is 3, must be a list"),
    ({"train": {"milestones": [1, "2"]}}, "train.milestones is '2', must be of type int"),
    ({"train": {"augment": 3}}, "train.augment is 3, must be a table"),
    ({"train": 3}, "train is 3, must be a table"),
    ({"cem": 3}, "cem is 3, must be a table"),
    ({"cem": {"sigma": "low"}}, "cem.sigma is 'low', must be of type float"),
    ({"cem": {"warmup": 1.5}}, "cem.warmup is 1.5, must be of type int"),
    ({"defences": "gaussian"}, "defences is 'gaussian', must be a list of tables"),
    ({"attacks": {"name": "ridge"}}, "attacks is {'name': 'ridge'}, must be a list of tables"),
    ({"model": 3}, "model is 3, must be a table"),
    ({"defences": [{"name": "gaussian", "sigma": "much"}]}, "defences.0.sigma is 'much', must be of type float"),
    ({"cem": {"surrogate": "rate", "rate": {"form": "half"}}}, "cem.rate.form is 'half', must be one of"),
])  # fmt: skip
def test_a_wrong_type_is_refused_by_name_and_value(table: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        from_dict(table)
    assert message in str(error.value)


def test_whole_numbers_are_fine_where_a_fraction_is_asked_for():
    lr = from_dict({"train": {"lr": 1}}).train.lr
    assert (lr, type(lr)) == (1.0, float)


def test_options_of_a_surrogate_that_is_not_chosen_wait_in_the_recipe():
    recipe = {"cem": {"surrogate": "uniform", "rate": {"form": "full"}}}
    assert from_dict(recipe).cem.surrogate == SURROGATES["uniform"].config()


@pytest.mark.parametrize(("content", "message"), [
    (None, "no recipe at"),
    (b"a = = 3", "is not valid TOML"),
    (b"a = '\xff'", "cannot be read"),
    (b"a = 1\na = 2", "not valid"),
    (b"a = " + b"[" * 100_000, "not valid"),
    (b"#" * (2**20 + 1), "may have 1.0 MB at most"),
])  # fmt: skip
def test_a_recipe_that_cannot_be_read_is_named(content: bytes | None, message: str, tmp_path: Path):
    file = tmp_path / "recipe.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_toml(file)
    assert message in str(error.value)
    assert str(file) in str(error.value)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_recipe_must_be_a_plain_file(kind: str, tmp_path: Path):
    if kind == "pipe":
        os.mkfifo(tmp_path / "recipe.toml")
    path = {"pipe": tmp_path / "recipe.toml", "device": Path("/dev/zero"), "folder": tmp_path}[kind]
    with pytest.raises(UserError, match=f"is a {kind}, must be a plain file"):
        read_toml(path)


def test_the_config_of_a_run_folder_gives_the_run_again(small: list[str], tmp_path: Path):
    flags = [*small, "--cem.surrogate", "rate", "--cem.surrogate.form", "full", "--train.milestones", "1", "2"]
    train_run(tmp_path / "first", parse([*flags, "--train.lr", "0.1234567890123", "--train.schedule", "milestones"]))
    train_run(tmp_path / "second", parse([str(tmp_path / "first" / "config.toml"), "--name", "second"]))
    first, second = ((tmp_path / name / "weights" / "last.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_the_digest_of_a_run_does_not_depend_on_the_layout_of_its_config(tmp_path: Path):
    run = Run.create(tmp_path / "run", parse(["--defences", "bottleneck,gaussian"]))
    config = tmp_path / "run" / "config.toml"
    short, tables = "defences = [\n", '[[defences]]\nname = "bottleneck"\n[[defences]]\nname = "gaussian"\n'
    text = config.read_text()
    assert short in text
    config.write_text(re.sub(r"defences = \[\n.*?\n\]\n", "", text, flags=re.DOTALL) + tables)  # as older runs have it
    assert Run.open(tmp_path / "run").config == run.config
    assert Run.open(tmp_path / "run").config_sha256 == run.config_sha256
    assert Run.create(tmp_path / "other", parse(["--seed", "1"])).config_sha256 != run.config_sha256
