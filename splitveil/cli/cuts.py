"""`splitveil cuts MODEL`: where can this model be cut, what does each cut cost, and with --leak, what does it give away?

splitveil cuts vgg11                                                      a registered model, images of 3 x 32 x 32
splitveil cuts vgg11 --leak --data cifar10 --data.path ~/cifar --weights trained.safetensors --out cuts.svg
splitveil cuts my_models:resnet --input 3,224,224                         your own function that returns an nn.Module
"""

from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from splitveil.cli.arguments import parse
from splitveil.compute.pick_device import pick_device
from splitveil.config import Config
from splitveil.cut_by_fx import every_split
from splitveil.data import ImageSet
from splitveil.data.splits import converted
from splitveil.evaluation.where_to_cut import Cut, every_stage, images_for, where_to_cut
from splitveil.models import build_model
from splitveil.own_model import load_weights, model_from
from splitveil.progress import steps_bar
from splitveil.registry import UserError, told
from splitveil.report import check_packages
from splitveil.rng import seed_of
from splitveil.split_model import SplitModel, stages_of
from splitveil.training.build import build_splits, channel_moments

PRIVATE = 500
"""The quick attack rebuilds at most so many test images."""
USUAL = (3, 32, 32)
"""The shape of an image if neither --data nor --input gives one."""


def cuts(model: str, own: dict[str, Any], flags: list[str]) -> None:
    """Print the table of a model's cuts, and draw them if --out says where."""
    theirs, out = ":" in model, Path(own["--out"]) if own["--out"] else None
    if out is not None:
        check_picture(out)
    config = parse([*flags, *([] if theirs else ["--model", model])], command="cuts")
    splits, device = build_splits(config), pick_device(config.device)
    named_data = any(flag.split("=")[0] == "--data" for flag in flags)
    shape = shape_of(own["--input"]) or (splits.test.shape if named_data else USUAL)
    weights = Path(own["--weights"]) if own["--weights"] else None
    if theirs:
        models = user_cuts(model, shape, weights, device)
    else:
        models = registered_cuts(config, shape, splits.task, weights, device)
    if not models:
        raise UserError(f"{model} can be cut nowhere; `splitveil.split(module, at=…, example=x)` says why for a single place")
    count, images = number_of(own["--images"]), None
    if own["--leak"]:
        count = min(images_for([split for _, split in models], count), len(splits.auxiliary))
        images = tuple(tensor_of(part, n, shape, device) for part, n in ((splits.auxiliary, count), (splits.test, PRIVATE)))
    with steps_bar(f"{model}: cuts", total=len(models)) as advance:
        found = []
        for cut in where_to_cut(models, *(images or ())):
            found.append(cut)
            advance(1, cut.at)
    show(model, found, shape)
    if images is not None:
        data = type(config.data).method
        print(
            f"leak: the best linear inverse (ridge), learnt from {len(images[0])} images of {data}, on {len(images[1])} test "
            "images and without a defence; the ceiling is the MSE of the mean image. What it rebuilds does leak; a trained "
            "decoder (splitveil attack) may rebuild more."
        )
        print(whose_weights(model, theirs, weights))
    if out is not None:
        from splitveil.report.cuts_picture import write_picture

        print(write_picture(found, model, out))


def whose_weights(model: str, theirs: bool, weights: Path | None) -> str:
    """A sentence that says with which weights the leak was measured."""
    if weights is not None:
        return f"weights: {weights.name}"
    if theirs:
        return (
            f"weights: as {model} returns them; if it does not train or load any, read the leak as that of an untrained network"
        )
    return (
        "weights: random, as no --weights are given. The leak is that of an untrained network: it tells what the layers' shapes "
        "let through, not what is left after training."
    )


def shape_of(text: str) -> tuple[int, int, int] | None:
    """3,224,224 as a shape; None for an empty text."""
    if not text:
        return None
    try:
        channels, height, width = (int(word) for word in text.replace("x", ",").split(","))
    except ValueError:
        channels = height = width = 0
    if channels < 1 or min(height, width) < 8:
        raise UserError(f"--input is {text!r}, must be channels,height,width such as 3,224,224, of 8 pixels or more")
    return channels, height, width


def check_picture(out: Path) -> None:
    """Refuse a picture that cannot be drawn, before anything is measured."""
    check_packages()
    if out.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise UserError(f"--out is {out}, must end in .svg, .png or .pdf")


def number_of(text: str) -> int:
    """Read a flag's value: how many images the attacker gets at most."""
    if not text.isdecimal() or int(text) < 50:
        raise UserError(f"--images is {text!r}, must be a number of 50 or more")
    return int(text)


def tensor_of(part: ImageSet, count: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The first images of a part in [0, 1] and in the model's shape; every part holds its classes mixed."""
    images = part.images[:count]
    return torch.from_numpy(images if images.shape[1:] == shape else converted(images, shape)).to(device).float() / 255


def registered_cuts(
    config: Config, shape: tuple[int, ...], task: ImageSet, weights: Path | None, device: torch.device
) -> list[tuple[str, SplitModel]]:
    """The cuts of a model of splitveil's registry."""
    torch.manual_seed(seed_of(config.seed, "weights"))
    moments = channel_moments(task) if task.shape == shape else ()
    model = build_model(config.model, shape, len(task.classes), *moments)
    if weights is not None:
        load_weights(stages_of(model), weights, whole_name)
    return list(every_stage(model.to(device)))


def whole_name(name: str) -> str | None:
    """The name of a weight in the uncut model. Those of a run begin with model.edge. or model.cloud.; its channel has none."""
    if name.startswith("channel."):
        return None
    return name.removeprefix("model.").removeprefix("edge.").removeprefix("cloud.")


def user_cuts(model: str, shape: tuple[int, ...], weights: Path | None, device: torch.device) -> list[tuple[str, SplitModel]]:
    """The cuts of what pkg.module:function returns."""
    module = model_from(model)
    if weights is not None:
        load_weights(module, weights)
    module.to(device).eval()
    try:
        return list(every_split(module, torch.rand(2, *shape, device=device)))
    except UserError:
        raise
    except Exception as error:
        size = "x".join(map(str, shape))
        raise UserError(
            f"{model} fails on images of {size} ({told(error)}); say what it takes, such as --input 3,224,224"
        ) from error


def show(model: str, found: list[Cut], shape: tuple[int, ...]) -> None:
    """The table on the terminal."""
    sent = 4 * shape[0] * shape[1] * shape[2]
    size = "x".join(map(str, shape))
    table = Table(title=f"cuts of {model} for images of {size} ({short(sent)}B in float32)", box=SIMPLE_HEAD, padding=0)
    leaks = ("MSE", "of ceiling", "SSIM") if found[0].leak else ()
    for column in ("cut", "z", "sent", "edge MACs", "edge weights", *leaks):
        table.add_column(column, justify="left" if column == "cut" else "right", no_wrap=column != "cut", overflow="fold")
    for cut in found:
        row = [cut.at, "x".join(map(str, cut.z_shape)), f"{short(cut.bytes)}B", short(cut.macs), short(cut.parameters)]
        if cut.leak is not None:
            row += [f"{cut.leak.mse:.4f}", f"{cut.leak.of_ceiling:.0%}", f"{cut.leak.ssim:.3f}"]
        table.add_row(*row)
    Console().print(table, markup=False)


def short(number: int) -> str:
    """A number with three digits and k, M or G: 12.3 k."""
    for factor, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= factor:
            return f"{number / factor:.3g} {letter}"
    return f"{number} "
