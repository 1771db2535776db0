"""step, captured, together and floor: a training step as `train` makes it.

The steps measured are those of `training.step.Stepper`, which every training is: the same step, the same feed of batches, and on
CUDA the same captured graph.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.bench.timing import Advance, Row, Setting, Work, compare, in_turns, speedup
from splitveil.config import Config, from_dict
from splitveil.data import ImageSet
from splitveil.data.loader import DeviceImages, Feed
from splitveil.metrics.cost import cost
from splitveil.registry import SURROGATES
from splitveil.rng import seed_of
from splitveil.training.build import Parts, build_parts
from splitveil.training.loop import epoch_of as epoch_of_runs
from splitveil.training.step import Stepper, compiles_steps

SHAPES = {"small": (1, 28, 28), "vgg11": (3, 32, 32)}
SIGMA = 0.1
LR = 1e-3
"""Small, so that a hundred steps on random labels neither diverge nor close a hinge."""
BASE = "undefended"
RUNS = (2, 4, 8)
"""How many runs are trained together."""
SIDE = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the matrices that the arithmetic rate is measured with."""


def configs(model: str, compiled: bool = False, capture: bool = True) -> dict[str, Config]:
    """Undefended, noise alone, every registered surrogate as it comes, and the other forms of the rate bound."""
    bottleneck, noise = {"name": "bottleneck"}, {"name": "gaussian", "sigma": SIGMA}
    tables: dict[str, Row] = {BASE: {"defences": [bottleneck]}, "noise": {"defences": [bottleneck, noise]}}
    for name in SURROGATES.names():
        tables[name] = tables["noise"] | {"cem": {"surrogate": name, "warmup": 0}}
    for form in ("full", "turned"):
        tables[f"rate {form}"] = tables["noise"] | {"cem": {"surrogate": "rate", "rate": {"form": form}, "warmup": 0}}
    common = {"model": {"name": model}, "train": {"compile": compiled, "capture": capture}}
    return {name: from_dict(common | table) for name, table in tables.items()}


def asked(setting: Setting, capture: bool = True) -> dict[str, Config]:
    """Those of a setting, the undefended one always."""
    found = configs(setting.model, setting.compile, capture)
    return {name: found[name] for name in found if not setting.variants or name in (BASE, *setting.variants)}


def random_images(count: int, shape: tuple[int, ...], classes: int) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)
    return ImageSet(pixels, np.arange(count) % classes, tuple(map(str, range(classes))))


def task_of(setting: Setting) -> ImageSet:
    """Images that a model is built for."""
    return random_images(max(512, 4 * setting.classes), SHAPES[setting.model], setting.classes)


def epoch_of(setting: Setting) -> DeviceImages:
    """Images for the steps of a block."""
    count = setting.batch * setting.steps
    return DeviceImages(random_images(count, SHAPES[setting.model], setting.classes), setting.device)


def features_like(parts: Parts, task: ImageSet, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random features with the mean and spread that z has at the start of training, and their labels."""
    with torch.no_grad():
        z = parts.model.edge(DeviceImages(task, device).take(slice(0, 512)))
    features = z.mean(0) + z.std(0) * torch.randn(count, *parts.model.z_shape, device=device)
    return features, torch.arange(count, device=device) % len(task.classes)


def parts_of(config: Config, task: ImageSet, device: torch.device) -> Parts:
    """Model, channel and CEM, with statistics where the surrogate keeps any."""
    parts = build_parts(config, task, device)
    if parts.cem is not None and parts.cem.surrogate.refresh_every:
        parts.cem.refresh(*features_like(parts, task, 40 * len(task.classes), device))  # eight a cluster
    return parts


class Given:
    """Batches that are there already, in the place of a `Feed`: one after the other, again and again."""

    def __init__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.x, self.y = (torch.stack(each) for each in zip(*batches))  # [n, b, …], [n, b]
        self.step = torch.zeros(1, dtype=torch.int64, device=self.y.device)

    def next(self) -> tuple[Tensor, Tensor]:
        x, y = (each.index_select(0, self.step).squeeze(0) for each in (self.x, self.y))
        self.step.add_(1).remainder_(len(self.y))
        return x, y


def stepper(config: Config, parts: Parts, feed: Feed | Given, device: torch.device) -> Stepper:
    """The steps of a run that has no folder."""
    found = Stepper(parts, config.train, feed, device)
    found.noise.manual_seed(seed_of(0, "noise"))
    found.optimizer.set_lr(LR)
    found.pipeline.train()
    if parts.cem is not None:
        parts.cem.schedule(0, LR)
    return found


class Block:
    """Steps of runs side by side, as `train` makes them: on CUDA the first block captures them, later ones replay."""

    def __init__(self, steppers: Sequence[Stepper], steps: int) -> None:
        self.steppers, self.epoch = steppers, epoch_of_runs(steppers, steps)

    def __call__(self) -> None:
        for stepper in self.steppers:
            stepper.feed.step.zero_()  # the first batch of the epoch again
        self.epoch()

    @property
    def captured(self) -> bool:
        return self.epoch.launch.graph is not None

    def check(self) -> None:
        """Refuse times that say nothing."""
        for stepper in self.steppers:
            cem = stepper.parts.cem
            assert cem is None or cem.skipped == 0, "steps were skipped"


def steps_of(config: Config, parts: Parts, batches: Sequence[tuple[Tensor, Tensor]], steps: int, device: torch.device) -> Block:
    """A block of training steps on given batches."""
    return Block([stepper(config, parts, Given(batches), device)], steps)


def stepping(setting: Setting, config: Config, task: ImageSet, images: DeviceImages) -> Stepper:
    feed = Feed(images, setting.batch, config.train.augment)
    if compiles_steps(config.train, setting.device):
        feed.compile()
    feed.begin(0, 0)
    return stepper(config, parts_of(config, task, setting.device), feed, setting.device)


def undefended(setting: Setting) -> Stepper:
    config = configs(setting.model, setting.compile)[BASE]
    return stepping(setting, config, task_of(setting), epoch_of(setting))


def blocks_of(setting: Setting, capture: bool = True) -> dict[str, Block]:
    """A block of steps of every variant."""
    task, images = task_of(setting), epoch_of(setting)
    chosen = asked(setting, capture)
    return {name: Block([stepping(setting, config, task, images)], setting.steps) for name, config in chosen.items()}


def step_rows(setting: Setting, advance: Advance) -> list[Row]:
    """Every variant's step over the undefended one."""
    works = blocks_of(setting)
    taken = in_turns(works, setting.rounds, setting.device, advance)
    rows = []
    for name, block in works.items():
        block.check()
        numbers = compare(taken[name], taken[BASE], setting.steps) | {"captured": block.captured}
        rows.append(setting.row("step", name, "undefended step", numbers))
    return rows


def captured_rows(setting: Setting, advance: Advance) -> list[Row]:
    """How many times as fast the captured step is as one whose kernels Python starts one by one."""
    captured, eager = blocks_of(setting), blocks_of(setting, capture=False)
    works = captured | {f"{name}, eager": block for name, block in eager.items()}
    taken = in_turns(works, setting.slow_rounds, setting.device, advance)
    return [
        setting.row("captured", name, "eager step", speedup(taken[name], taken[f"{name}, eager"], setting.steps))
        for name, block in captured.items()
        if block.captured
    ]


def together_rows(setting: Setting, advance: Advance) -> list[Row]:
    """A step of k runs side by side over that of one alone; one after the other they would take k times as long."""
    task, images, chosen = task_of(setting), epoch_of(setting), configs(setting.model, setting.compile)
    works: dict[str, Work] = {}
    for name in (BASE, "rate"):
        for k in (1, *RUNS):
            runs = [stepping(setting, chosen[name], task, images) for _ in range(k)]
            works[f"{name} x {k}"] = Block(runs, setting.steps)
    taken = in_turns(works, setting.slow_rounds, setting.device, advance)
    rows = []
    for name in (BASE, "rate"):
        for k in RUNS:
            numbers = compare(taken[f"{name} x {k}"], taken[f"{name} x 1"], setting.steps)
            rows.append(setting.row("together", f"{name} x {k}", "one run alone", numbers))
    return rows


def floor_rows(setting: Setting, advance: Advance) -> list[Row]:
    """The share of the undefended step that its multiply-adds would take at the speed of a large matrix product.

    The backward pass has two products for each one of the forward pass: three times its multiply-adds, two operations each.
    """
    side = SIDE[setting.device.type]
    kind = torch.bfloat16 if setting.device.type == "cuda" else torch.float32
    a, b, product = torch.randn(3, side, side, device=setting.device).to(kind).unbind()
    training = undefended(setting)
    operations = 3 * 2 * sum(half.macs for half in cost(training.parts.model).values()) * setting.batch

    def products() -> None:
        for _ in range(setting.steps):
            torch.mm(a, b, out=product)

    works = {"matrix product": products, BASE: Block([training], setting.steps)}
    taken = in_turns(works, setting.rounds, setting.device, advance)
    rates = [2 * side**3 * setting.steps / spent for spent in taken["matrix product"]]  # operations a second
    floor = [operations * setting.steps / rate for rate in rates]
    numbers = compare(floor, taken[BASE], setting.steps)
    numbers |= {"gflop": operations / 1e9, "tflops": float(np.median(rates)) / 1e12}
    return [setting.row("floor", BASE, "undefended step", numbers)]
