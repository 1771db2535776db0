"""What each surrogate adds to a training step, and what working on all classes at once saves.

    python benchmarks/surrogate_cost.py --device cpu --model small --out benchmarks/measured/surrogate_cost_cpu.json
    python benchmarks/surrogate_cost.py --device cuda --model vgg11 --out benchmarks/measured/surrogate_cost_cuda.json

step      the project's own `train_step` with CEM's every part (Adam and bank included), over the same step without noise and CEM
loop      forward and backward of a surrogate one class after the other, z[y == c], over all classes at once; same loss, asserted.
          Banks are off here: the loop would need one for each class
refresh   statistics over N random features: the first one, and the next after the features moved by a tenth of their spread

In every round each variant has its turn; a ratio is that of two blocks of one round, and its median and quartiles over the rounds
are given, so that a slow spell of the machine hits both sides, or few of the rounds.
Random pixels in the shapes of real data: 1 x 28 x 28 for `small`, 3 x 32 x 32 for `vgg11`, both with an 8-channel bottleneck.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitveil.build import Parts, build_parts, pick_device
from splitveil.config import Config, from_dict
from splitveil.data import ImageSet
from splitveil.data.augment import AugmentConfig
from splitveil.data.loader import DeviceImages
from splitveil.progress import steps_bar
from splitveil.registry import SURROGATES
from splitveil.rng import stream
from splitveil.runs import environment, write_json
from splitveil.step import Means, Pipeline, train_step
from splitveil.surrogates import Surrogate

SHAPES = {"small": (1, 28, 28), "vgg11": (3, 32, 32)}
SIGMA = 0.1
LR = 1e-3
"""Small, so that a hundred steps on random labels neither diverge nor close a hinge."""
ROUNDS = {"cpu": (11, 2, 7), "cuda": (7, 6, 3)}
"""Rounds, steps of a block, and rounds of the loops, which are slow."""
BASE = "undefended"

Batches = list[tuple[Tensor, Tensor]]
Row = dict[str, Any]


def configs(model: str) -> dict[str, Config]:
    """Undefended, noise alone, every registered surrogate as it comes, and the rate bound with whole covariances."""
    bottleneck, noise = {"name": "bottleneck"}, {"name": "gaussian", "sigma": SIGMA}
    tables: dict[str, Row] = {BASE: {"defences": [bottleneck]}, "noise": {"defences": [bottleneck, noise]}}
    for name in SURROGATES.names():
        tables[name] = tables["noise"] | {"cem": {"surrogate": name, "warmup": 0}}
    tables["rate full"] = tables["noise"] | {"cem": {"surrogate": "rate", "rate": {"form": "full"}, "warmup": 0}}
    return {name: from_dict({"model": {"name": model}} | table) for name, table in tables.items()}


def random_images(count: int, shape: tuple[int, ...], classes: int) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)
    return ImageSet(pixels, np.arange(count) % classes, tuple(map(str, range(classes))))


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def in_turns(
    works: dict[str, Callable[[], Any]], rounds: int, device: torch.device, advance: Callable[..., None]
) -> dict[str, list[float]]:
    """Seconds of each work in each round, after one to warm up; who is first changes from round to round."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for i in range(-1, rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            spent = seconds(works[name], device)
            advance(1, name)
            if i >= 0:
                taken[name].append(spent)
    return taken


def compare(taken: list[float], base: list[float], steps: int) -> Row:
    low, middle, high = np.quantile(np.divide(taken, base), (0.25, 0.5, 0.75)).tolist()
    ms = [1e3 * float(np.median(spent)) / steps for spent in (taken, base)]
    return {"ratio": middle, "quartiles": [low, high], "ms": ms[0], "base_ms": ms[1]}


def steps_of(config: Config, parts: Parts, batches: Batches, steps: int, device: torch.device) -> Callable[[], None]:
    """A block of training steps, as `train` makes them."""
    model, channel, cem = parts
    pipeline, train = Pipeline(model, channel).train(), config.train
    parameters = [*model.parameters(), *channel.task_parameters()]
    optimizer = torch.optim.SGD(parameters, LR, train.momentum, weight_decay=train.weight_decay)
    if cem is not None:
        cem.schedule(0, LR)
    noise, bf16 = stream(device, 0, "noise"), train.bf16 and device.type == "cuda"

    def block() -> None:
        means = Means()
        for x, y in islice(cycle(batches), steps):
            train_step(pipeline, channel, cem, optimizer, x, y, noise, train.label_smoothing, bf16, means)

    return block


def features_like(parts: Parts, x: Tensor, count: int) -> Tensor:
    """Random features with the mean and spread that z has at the start of training."""
    with torch.no_grad():
        z = parts.model.edge(x)
    return z.mean(0) + z.std(0) * torch.randn(count, *parts.model.z_shape, device=x.device)


def alone(config: Config, full: Surrogate, c: int, sigma: float | None) -> Surrogate:
    """The surrogate of one class: the parameters are `full`'s own, the statistics its row of them."""
    entry = SURROGATES.of(config.cem.surrogate)
    surrogate = entry.make_from(config.cem.surrogate, dim=full.dim, classes=1, sigma=sigma)
    surrogate.bank = None
    shapes = {name: value.shape for name, value in surrogate.state_dict().items()}
    state = full.state_dict(keep_vars=True)
    own = {name: value if value.shape == shapes[name] else value[c : c + 1] for name, value in state.items()}
    surrogate.load_state_dict(own, assign=True)
    return surrogate


def one_by_one(each: list[Surrogate], z: Tensor, y: Tensor) -> Tensor:
    total = z.new_zeros(())
    for c in y.unique().tolist():
        own = z[y == c]
        total = total + len(own) / len(z) * each[c](own, torch.zeros_like(y[: len(own)])).loss
    return total


def at_once_and_looped(config: Config, parts: Parts, z: Tensor, y: Tensor) -> list[Callable[[], None]]:
    """Forward and backward, all classes at once and one by one; they must agree."""
    assert parts.cem is not None
    full = parts.cem.surrogate
    full.bank = None
    each = [alone(config, full, c, parts.channel.noise_std) for c in range(full.classes)]
    losses = [lambda: full(z, y).loss, lambda: one_by_one(each, z, y)]
    values = [loss() for loss in losses]
    expected, found = (torch.autograd.grad(value, z)[0] for value in values)
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-7)
    apart = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert values[0] > 0 and apart < 1e-3, f"loss {values[0]:.3g}, gradients of the loop are off by {apart:.2g}"

    def with_backward(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def work() -> None:
            z.grad = None
            full.zero_grad(set_to_none=True)
            loss().backward()

        return work

    return [with_backward(loss) for loss in losses]


def measure(options: argparse.Namespace, classes: int, device: torch.device, advance: Callable[..., None]) -> list[Row]:
    rows: list[Row] = []
    task = random_images(4 * max(*options.batches, classes), SHAPES[options.model], classes)
    images, chosen = DeviceImages(task, device), configs(options.model)
    parts = {name: build_parts(config, task, device) for name, config in chosen.items()}
    cems = {name: part.cem for name, part in parts.items() if part.cem is not None}
    features = features_like(parts[BASE], images.take(slice(0, 512)), options.images)
    moved = features + 0.1 * features.std(0) * torch.randn_like(features)
    labels = torch.arange(options.images, device=device) % classes
    for name, cem in cems.items():
        if cem.surrogate.refresh_every:
            first, later = (seconds(partial(cem.refresh, z, labels), device) for z in (features, moved))
            rows.append({"what": "refresh", "variant": name, "classes": classes, "first": first, "later": later})
    batches = {batch: list(images.shuffled(batch, 0, 0, AugmentConfig())) for batch in options.batches}
    for batch in options.batches:
        works = {n: steps_of(config, parts[n], batches[batch], options.steps, device) for n, config in chosen.items()}
        taken = in_turns(works, options.rounds, device, advance)
        for name, spent in taken.items():
            row = {"what": "step", "variant": name, "batch": batch, "classes": classes}
            rows.append(row | compare(spent, taken[BASE], options.steps))
    for name, cem in cems.items():
        assert cem.skipped == 0, f"{name}: steps were skipped, their time says nothing"
    for batch in options.batches:
        z, y = features[:batch].clone().requires_grad_(), batches[batch][0][1]
        works = {}
        for name in cems:
            works[name], works[f"{name}, looped"] = at_once_and_looped(chosen[name], parts[name], z, y)
        taken = in_turns(works, options.loop_rounds, device, advance)
        for name in cems:
            row = {"what": "loop", "variant": name, "batch": batch, "classes": classes}
            rows.append(row | compare(taken[f"{name}, looped"], taken[name], 1))
    return rows


def show(rows: list[Row], images: int) -> None:
    for what, title in {
        "step": f"training step over {BASE} (median over rounds, quartiles)",
        "loop": "one class after the other over all at once, surrogate alone (median over rounds, quartiles)",
    }.items():
        mine = [row for row in rows if row["what"] == what]
        settings = sorted({(row["batch"], row["classes"]) for row in mine})
        print(f"\n{title}\n{'':14}" + "".join(f"{f'batch {b}, {c} classes':>24}" for b, c in settings))
        for name in dict.fromkeys(row["variant"] for row in mine):
            cells = {(row["batch"], row["classes"]): row for row in mine if row["variant"] == name}
            texts = [
                f"{cell['ms']:.1f} ms" if name == BASE else "{:.2f} [{:.2f}, {:.2f}]".format(cell["ratio"], *cell["quartiles"])
                for cell in (cells[setting] for setting in settings)
            ]  # fmt: skip
            print(f"{name:14}" + "".join(f"{text:>24}" for text in texts))
    print(f"\nrefresh over {images} features, seconds: first, later")
    for row in rows:
        if row["what"] == "refresh":
            print(f"{row['variant']:14}{row['classes']:4} classes {row['first']:8.2f} {row['later']:8.2f}")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=ROUNDS, default="cpu")
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--images", type=int, default=20_000, help="N, features of a refresh")
    parser.add_argument("--quick", action="store_true", help="two rounds of one step: does it run at all?")
    options = parser.parse_args(words)
    options.rounds, options.steps, options.loop_rounds = (2, 1, 1) if options.quick else ROUNDS[options.device]
    device = pick_device(options.device)
    torch.manual_seed(0)
    variants, settings = len(configs(options.model)), len(options.batches) * len(options.classes)
    looped = 2 * (variants - 2) * (options.loop_rounds + 1)  # a step has no loop without a surrogate
    used = {name: getattr(options, name) for name in ("model", "images", "rounds", "steps", "loop_rounds")}
    claim = "time of a training step over an undefended one, and of a loop over classes over all classes at once"
    command = " ".join(["python benchmarks/surrogate_cost.py", *(sys.argv[1:] if words is None else words)])
    rows: list[Row] = []
    with steps_bar("surrogate cost", settings * (variants * (options.rounds + 1) + looped)) as advance:
        for classes in options.classes:  # written as they come: a long measurement may be cut short
            rows += measure(options, classes, device, advance)
            write_json(options.out, {"claim": claim, "command": command, **environment(device), **used, "rows": rows})
    show(rows, options.images)


if __name__ == "__main__":
    main()
