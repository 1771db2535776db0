"""What adaptation from z alone gains on corrupted images, how much of that remains if 40 % of z are kept, and what poisoned z do.

    python -m benchmarks.adaptation --cifar10 DIR --only train --seeds 0           # ten epochs on 40,000 images; resumable
    python -m benchmarks.adaptation --cifar10 DIR                                  # streams, poison, attacks; then the table
    python -m benchmarks.adaptation --table                                        # the table from the file, nothing is run

The model is `small` with the bottleneck of 8 channels, noise of 0.3 and CEM `rate`. A stream is --images test images under one
corruption at one level in a random order, 50 at a time; each is answered before anything is learnt from it.

    none           the cloud as released
    all            running statistics follow all z that are plausible
    kept           they follow 40 % of them: the default
    reset          as kept, and everything returns to the start every 20 steps
    all descent    as all; the affines of the norms and the one at the cut learn by descent
    kept descent   the same from 40 %
    message        as kept descent; after half of the stream the affine at the cut moves to the device, as far as its guard allows

Every line of the file is one stream, and is written when the stream ends. `--own` takes the attacker's images in the place of the
test images; the option `statistics` was chosen on those, on seed 0.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.start import start
from splitveil.adaptation import Adapter, AdapterConfig, Client, attack_again, digest_of_edge
from splitveil.adaptation.message import Update, write
from splitveil.adaptation.retention import size, usual_sizes
from splitveil.config import Config, from_dict
from splitveil.data import ImageSet
from splitveil.data.corruptions import LEVELS, corrupted
from splitveil.data.splits import Splits
from splitveil.evaluation.run_attacks import load_parts, trained_weights
from splitveil.progress import console, steps_bar
from splitveil.registry import UserError
from splitveil.rng import stream
from splitveil.runs import Run, read_json, write_json
from splitveil.training.build import Parts, build_splits
from splitveil.training.train_runs import train_runs

SEEDS = (0, 1, 2)
BATCH, SIGMA = 50, 0.3
KEEP, DESCENT = AdapterConfig(keep=0.4), AdapterConfig(keep=0.4, descent=True)
VARIANTS: dict[str, AdapterConfig | None] = {
    "none": None, "all": AdapterConfig(keep=1.0), "kept": KEEP, "reset": replace(KEEP, reset_every=20),
    "all descent": AdapterConfig(keep=1.0, descent=True), "kept descent": DESCENT, "message": DESCENT,
}  # fmt: skip
POISONED = 1000
POISONS = ("random", "uncertain", "one class", "ten times", "largest", "smallest", "contrast")
"""Random numbers with the spread of z; z' whose answers descent made uncertain, or sure of one class; too large; as large and as
small as the adapter lets pass, which somebody must know; and what images of hardly any contrast give."""
ATTACKS = [
    {"name": "ridge"},
    {"name": "decoder", "label": "decoder-small", "blocks": 2, "width": 32, "epochs": 8, "batch": 64, "lr": 0.002},
]
"""Those of the suite quick that learn most."""


def config_of(seed: int, cifar10: Path) -> Config:
    return from_dict({
        "name": f"seed{seed}", "seed": seed, "device": "cpu", "data": {"name": "cifar10", "path": str(cifar10)},
        "splits": {"task": 0.8, "validation": 0.02, "auxiliary": 0.18}, "model": {"name": "small", "width": 16},
        "defences": [{"name": "bottleneck"}, {"name": "gaussian", "sigma": SIGMA}],
        "cem": {"surrogate": "rate", "strength": 0.1, "lr_rescale": "off"},
        "train": {"epochs": 10, "batch": 64, "lr": 0.05, "augment": {"crop": 2}},
    })  # fmt: skip


class World(NamedTuple):
    """A trained model, and z of its own images and of those that stream in."""

    parts: Parts
    splits: Splits
    reference: Tensor  # [n, *z_shape], sent
    images: Tensor  # [n, c, h, w]
    labels: Tensor  # [n]
    seed: int


@torch.no_grad()
def z_of(world: World, x: Tensor) -> Tensor:
    return torch.cat([world.parts.model.edge(part) for part in x.split(500)])


def sent(z: Tensor, seed: int, *words: object) -> Tensor:
    """z as the channel sends it."""
    return z + SIGMA * torch.randn(z.shape, generator=stream("cpu", seed, *words))


def images_of(part: ImageSet, count: int) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(part.images[:count]).float() / 255, torch.from_numpy(part.labels[:count])


def open_world(root: Path, seed: int, count: int, own: bool) -> World:
    run = Run.open(root / f"seed{seed}")
    splits = build_splits(run.config)
    parts = load_parts(run, splits, torch.device("cpu"))
    part = splits.auxiliary if own else splits.test
    order = torch.randperm(len(part), generator=stream("cpu", seed, "stream"))[:count].numpy()
    images, labels = images_of(part.take(order), count)
    world = World(parts, splits, torch.empty(0), images, labels, seed)
    mine, _ = images_of(splits.task, 512)
    return world._replace(reference=sent(z_of(world, mine), seed, "reference"))


def adapter_of(world: World, config: AdapterConfig | None) -> Adapter:
    """Without a config it learns nothing."""
    still = replace(KEEP, statistics=0.0)
    return Adapter(world.parts.model.cloud, world.reference, config or still, world.seed)


def client_of(world: World) -> Client:
    return Client(world.parts.model.edge, world.parts.channel, tuple(world.parts.model.z_shape))


def streamed(world: World, adapter: Adapter, z: Tensor, message: bool, *words: object) -> tuple[np.ndarray, bytes]:
    """Which answers of a stream were right, in its order; and the message that was sent after half of it."""
    affine, right, update = client_of(world).affine, [], b""
    for i, (part, labels) in enumerate(zip(z.split(BATCH), world.labels.split(BATCH))):
        if message and i * BATCH >= len(z) // 2 and not update:
            client = client_of(world)
            update = adapter.update(client.digest)
            client.apply(update)
            adapter.confirm(update, SIGMA)
            affine = client.affine
        right.append(adapter.observe(sent(affine(part), world.seed, "wire", i, *words)).argmax(1) == labels)
    return torch.cat(right).numpy(), update


def line_of(adapter: Adapter, right: np.ndarray) -> dict[str, Any]:
    retention = adapter.retention
    gain, shift = adapter.model.gain.detach(), adapter.model.shift.detach()
    return {
        "accuracy": float(right.mean()), "second_half": float(right[len(right) // 2 :].mean()),
        "kept": retention.kept / retention.seen, "steps": adapter.steps, "resets": adapter.resets,
        "gain": [gain.min().item(), gain.max().item()], "shift": shift.abs().max().item(),
    }  # fmt: skip


def corrupted_z(world: World, name: str, level: int) -> Tensor:
    generator = stream("cpu", world.seed, "corruption", name, level)
    return z_of(world, corrupted(world.images, name, level, generator) if level else world.images)


def poison(world: World, kind: str) -> Tensor:
    """[1000, *z_shape] z' of one of POISONS."""
    generator = stream("cpu", world.seed, "poison", kind)
    reference = world.reference
    shape = (POISONED, *reference.shape[1:])
    some = reference[torch.randint(len(reference), (POISONED,), generator=generator)]
    if kind == "random":  # of the size and the spread of z
        return reference.mean() + reference.std() * torch.randn(shape, generator=generator)
    if kind == "ten times":
        return 10 * some
    if kind in ("largest", "smallest"):
        low, high = usual_sizes(reference)
        wanted = 0.99 * high if kind == "largest" else 1.01 * low
        return some * (wanted / size(some)).view(-1, *[1] * (some.dim() - 1))
    if kind == "contrast":
        mine, _ = images_of(world.splits.task, POISONED)
        return sent(z_of(world, corrupted(mine, "contrast", 5, generator)), world.seed, "poison")
    cloud = world.parts.model.cloud
    z = some.clone().requires_grad_()
    adam = torch.optim.Adam([z], 0.05)
    for _ in range(30):
        logs = cloud(z).log_softmax(1)
        loss = -logs[:, 0].mean() if kind == "one class" else (logs.exp() * logs).sum(1).mean()
        (z.grad,) = torch.autograd.grad(loss, z)
        adam.step()
    return z.detach()


def poisoned(world: World, kind: str, bursts: bool) -> dict[str, Any]:
    """Accuracy on clean z that stream in together with poison, mixed or all of it at once in the middle."""
    adapter, clean = adapter_of(world, KEEP), sent(corrupted_z(world, "clean", 0), world.seed, "wire")
    bad = poison(world, kind) if kind != "no poison" else clean[:0]
    n = len(clean)
    order = torch.randperm(n + len(bad), generator=stream("cpu", world.seed, "mixed"))
    if bursts:
        order = torch.cat([torch.arange(n // 2), torch.arange(n, n + len(bad)), torch.arange(n // 2, n)])
    z, labels = torch.cat([clean, bad]), torch.cat([world.labels, torch.full((len(bad),), -1)])
    right, is_bad = [], []
    for index in order.split(BATCH):
        right.append(adapter.observe(z[index]).argmax(1) == labels[index])
        is_bad.append(labels[index] < 0)
    bad_ones = torch.cat(is_bad).numpy()
    after = float((adapter(clean).argmax(1) == world.labels).float().mean())
    found = line_of(adapter, torch.cat(right).numpy()[~bad_ones])
    return found | {"after": after}


def attacked(world: World, update: bytes, images: int, attacks: list[dict[str, Any]]) -> dict[str, Any]:
    """The attacks before and after an update, on half as many test images as the attacker has of its own."""
    private, own = world.splits.test.take(np.arange(images // 2)), world.splits.auxiliary.take(np.arange(images))
    model, channel = world.parts.model, world.parts.channel
    again = attack_again(model, channel, update, private, own, attacks, seed=world.seed, least=1e-9)
    return {"before": again.before, "after": again.after, "ratio": again.ratio, "bytes": len(update)}


def shrunk(world: World, gain: float) -> bytes:
    """The update of a gain that is the same for all channels."""
    channels = len(client_of(world).affine.gain)
    return write(Update(torch.full((channels,), gain), torch.zeros(channels), 1, digest_of_edge(world.parts.model.edge)))


class Results:
    """Lines by name and the settings that they were made with, in a file that is written whenever a line is added.

    A setting that the file has with another value is refused; one that it lacks is added, because no line of it is there yet.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        kept = read_json(path) if path.exists() else {"settings": {}, "lines": {}}
        if kept.keys() != {"settings", "lines"}:
            raise UserError(f"{path} does not say with which settings it was made; choose another --out, or delete it")
        if changed := differing(kept["settings"], settings):
            raise UserError(f"{path} was made with other settings ({changed}); choose another --out, or delete it")
        self.settings: dict[str, Any] = kept["settings"] | settings
        self.lines: dict[str, dict[str, Any]] = kept["lines"]

    def add(self, key: str, work: Callable[[], dict[str, Any]]) -> None:
        if key not in self.lines:
            self.lines[key] = work()
            write_json(self.path, {"settings": self.settings, "lines": self.lines})


def differing(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The settings in both that are not the same, in words."""
    return ", ".join(f"{name}: {old[name]}, not {new[name]}" for name in new if old.get(name, new[name]) != new[name])


def settings_of(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What decides the lines of a seed. How many images the attacks have is a setting of these alone."""
    attacked = {"attacked": options.attacked} if "attack" in options.only else {}
    return {"images": options.images, "weights": trained_weights(Run.open(options.runs / f"seed{seed}"))} | attacked


def lines_in(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """The lines of several files, which must be of the same settings; the weights are each seed's own."""
    lines, settings = {}, {}
    for path in paths:
        results = Results(path, settings)
        settings = {name: value for name, value in results.settings.items() if name != "weights"}
        lines |= results.lines
    return lines


def conditions() -> Iterator[tuple[str, int]]:
    yield "clean", 0
    for name, levels in LEVELS.items():
        for level in range(1, len(levels) + 1):
            yield name, level


def one_stream(world: World, z: Tensor, variant: str, config: AdapterConfig | None, back: bool) -> dict[str, Any]:
    """A stream of z; with `back` clean images follow, which the same adapter answers and learns from."""
    adapter = adapter_of(world, config)
    right, update = streamed(world, adapter, z, variant == "message")
    found = line_of(adapter, right) | {"bytes": len(update)}
    if back:
        later, _ = streamed(world, adapter, corrupted_z(world, "clean", 0), False, "back")
        found |= {"back": float(later.mean()), "back_second_half": float(later[len(later) // 2 :].mean())}
    return found


def streams(world: World, results: Results) -> None:
    """Every variant under every condition; and what is answered to clean images after the worst of them."""
    todo = sorted(conditions(), key=lambda condition: (0, 5, 3, 1, 4, 2).index(condition[1]))  # a part of it says something, too
    with steps_bar(f"seed {world.seed}: streams", total=len(todo)) as advance:
        for name, level in todo:
            z = None
            for variant, config in VARIANTS.items():
                key = f"{world.seed}/{name}/{level}/{variant}"
                if key in results.lines:
                    continue
                z = corrupted_z(world, name, level) if z is None else z

                results.add(key, partial(one_stream, world, z, variant, config, level == 5 and variant in ("all", "kept")))
            advance(1)


def poisons(world: World, results: Results) -> None:
    results.add(f"{world.seed}/poison/no poison/mixed", partial(poisoned, world, "no poison", False))
    for kind in POISONS:
        for how in ("mixed", "burst"):
            results.add(f"{world.seed}/poison/{kind}/{how}", partial(poisoned, world, kind, how == "burst"))


def attacks(world: World, results: Results, images: int) -> None:
    def learnt() -> dict[str, Any]:
        adapter = adapter_of(world, DESCENT)
        _, update = streamed(world, adapter, corrupted_z(world, "contrast", 5), True)
        return attacked(world, update, images, ATTACKS)

    results.add(f"{world.seed}/attack/learnt", learnt)
    results.add(f"{world.seed}/attack/gain 0.7", lambda: attacked(world, shrunk(world, 0.7), images, ATTACKS[:1]))


def points(value: float) -> str:
    """Two digits after the point, with the sign; a tie is rounded away from zero, and the last bit of the float decides nothing.

    An accuracy is a number of images over thousands, so that ties do occur.
    """
    return f"{Decimal(str(round(value, 6))).quantize(Decimal('0.01'), ROUND_HALF_UP) + 0:+}"


def table(lines: dict[str, dict[str, Any]]) -> None:
    seeds = sorted({key.split("/")[0] for key in lines})

    def mean(condition: str, variant: str, what: str = "accuracy") -> float:
        return 100 * float(np.mean([lines[f"{seed}/{condition}/{variant}"][what] for seed in seeds]))

    def whole(condition: str) -> bool:
        return all(f"{seed}/{condition}/{variant}" in lines for seed in seeds for variant in VARIANTS)

    found = [f"{name}/{level}" for name, level in conditions() if whole(f"{name}/{level}")]
    print("| corruption | " + " | ".join(VARIANTS) + " | kept, % |\n|" + "---|" * (len(VARIANTS) + 2))
    for condition in found:
        told = " | ".join(f"{mean(condition, variant):.2f}" for variant in VARIANTS)
        print(f"| {condition} | {told} | {mean(condition, 'kept', 'kept'):.1f} |")
    under = [condition for condition in found if not condition.startswith("clean")]
    for seed in [*seeds, "all"]:
        chosen = seeds if seed == "all" else [seed]
        of = {
            variant: 100 * float(np.mean([lines[f"{s}/{c}/{variant}"]["accuracy"] for s in chosen for c in under]))
            for variant in VARIANTS
        }
        halves = {
            variant: 100 * float(np.mean([lines[f"{s}/{c}/{variant}"]["second_half"] for s in chosen for c in under]))
            for variant in ("none", "kept descent", "message")
        }
        gap = of["all"] - of["none"]
        shares = ", ".join(f"{v} {(of[v] - of['none']) / gap:.2f}" for v in VARIANTS if v not in ("none", "all"))
        print(f"seed {seed}: " + ", ".join(f"{v} {of[v]:.2f}" for v in VARIANTS) + f"; gap {gap:.2f}, of it {shares}")
        print("   second half: " + ", ".join(f"{variant} {value:.2f}" for variant, value in halves.items()))
    print("| poison | accuracy meanwhile | worst seed | accuracy after | worst seed |\n|---|---|---|---|---|")
    for kind, how in ((kind, how) for kind in POISONS for how in ("mixed", "burst")):
        if all(f"{seed}/poison/{kind}/{how}" in lines for seed in seeds):
            told = []
            for what in ("accuracy", "after"):
                pairs = [(lines[f"{s}/poison/{kind}/{how}"][what], lines[f"{s}/poison/no poison/mixed"][what]) for s in seeds]
                moved = [100 * (with_it - without) for with_it, without in pairs]
                told += [points(float(np.mean(moved))), points(min(moved))]
            print(f"| {kind}, {how} | " + " | ".join(told) + " |")
    for variant in ("all", "kept"):
        for name in LEVELS:
            key = f"{name}/5/{variant}"
            if all(f"{seed}/{key}" in lines and f"{seed}/clean/0/none" in lines for seed in seeds):
                pairs = [("back", "accuracy"), ("back_second_half", "second_half")]
                of = {back: mean(f"{name}/5", variant, back) - mean("clean/0", "none", what) for back, what in pairs}
                print(f"{key}: back on clean images {of['back']:+.2f}, in the second half {of['back_second_half']:+.2f} points")
    for key in sorted(key for key in lines if "/attack/" in key):
        print(key, lines[key])


def main(words: list[str] | None = None) -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--cifar10", type=Path, help="where cifar-10-batches-bin/ lies")
    asked.add_argument("--runs", type=Path, default=Path("runs/adaptation"))
    asked.add_argument("--out", type=Path, default=Path("runs/adaptation"), help="folder of the results, one file a seed")
    asked.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    asked.add_argument("--images", type=int, default=4000, help="of each stream")
    asked.add_argument("--attacked", type=int, default=2000, help="images of the attacker; private are half as many")
    asked.add_argument("--own", action="store_true")
    asked.add_argument("--only", default="train,streams,poison,attack")
    asked.add_argument("--table", action="store_true")
    options = asked.parse_args(words)
    torch.set_num_threads(1)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if not options.table:
        for seed in seeds:
            if "train" in options.only:
                train_runs({options.runs / f"seed{seed}": config_of(seed, options.cifar10)})
            if options.only == "train":
                continue
            world = open_world(options.runs, seed, options.images, options.own)
            results = Results(options.out / f"{'own' if options.own else 'lines'}-{seed}.json", settings_of(options, seed))
            if "streams" in options.only:
                streams(world, results)
            if "poison" in options.only:
                poisons(world, results)
            if "attack" in options.only:
                attacks(world, results, options.attacked)
            console.print(f"seed {seed}: {results.path}")
    lines = lines_in(sorted(options.out.glob("own-*.json" if options.own else "lines-*.json")))
    if lines:
        table(lines)


if __name__ == "__main__":
    start(main)
