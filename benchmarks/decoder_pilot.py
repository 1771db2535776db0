"""Which decoder has converged? Twice the epochs, twice the width and twice the images must each gain less than 2 %.

    python -m benchmarks.decoder_pilot --data DIR --out OUT --minutes 9        # for a GPU; the same command resumes
    python -m benchmarks.decoder_pilot --data DIR --out OUT --only width,mean3 --targets rate
    python -m benchmarks.decoder_pilot --data DIR --out OUT --smoke            # every run at toy size, minutes on a CPU

DIR holds medlz.py and 30,000 CIFAR-10 images: task-*.npz (18,000), attacker-0.npz (10,000), test-0.npz (2,000). They are packed
from the official binary files BIN/*.bin by

    python - <<END
    import medlz, numpy as np
    for part, file, many in (("task-0", "data_batch_1", 9000), ("task-1", "data_batch_2", 9000),
                             ("attacker-0", "data_batch_3", 10000), ("test-0", "test_batch", 2000)):
        rows = np.fromfile(f"BIN/{file}.bin", np.uint8).reshape(-1, 3073)[:many]
        medlz.save(f"DIR/{part}.npz", rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), rows[:, 0])
    END

Two targets, both VGG-11 cut after conv2 with an 8-channel bottleneck: `none` is undefended, `rate` has noise of sigma 0.3 and CEM
by rate at strength 0.3. `splitveil train` makes them, side by side and captured but not compiled: 133 steps an epoch are too few
to pay for compiling. Then every run of RUNS trains a decoder on 9,500 of the attacker's images against each frozen edge, with
fresh channel noise at every step; 500 more of its images choose the epoch. An "epoch" is 9,500 images, also for those who have
more, so that runs with the same epochs make the same number of steps. `mse` is the error on the 2,000 test images; all decoders
see the same release of each. `gain` is what a run gains over the one it is compared with, and `se` its standard error over paired
images.

Arithmetic, for one target on an H200 at 300 TFLOP/s in the convolutions and 4 TB/s elsewhere. A block of `strong` at width 128
costs 75 M multiply-adds at each of its three sizes, and 8 blocks make 0.6 G: 6 FLOP each, 256 images, so 0.92 TFLOP or 3 ms a
step, and 1.2 ms for norms and activations. With the edge that is 5 ms a step, 37 steps an epoch, 0.19 s an epoch. Width 64
takes 0.08 s an epoch (kernels of microseconds), width 256 takes 0.55 s (four times the arithmetic). RUNS says the seconds of each
run: 302 s on `rate` and 203 s on `none` up to `lr`, 60 s for the start and the targets: 9.4 minutes. The last two runs need
another 6 minutes and are worth it only if `epochs` or `width` gains 2 %.
"""

import argparse
import copy
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from splitveil.compute.cuda_graph import Captured
from splitveil.models.decoder import res_decoder

HELD_OUT, CHUNK, SHIFT = 500, 500, 4
CEM = "--cem.surrogate rate --cem.strength 0.3 --cem.lr-rescale off"
TARGETS = {  # sigma, and flags of `splitveil train`
    "none": (0.0, "--defences bottleneck"),
    "rate": (0.3, f"--defences bottleneck,gaussian --defences.1.sigma 0.3 {CEM}"),
}
Parts = dict[str, tuple[np.ndarray, np.ndarray]]
"""Images uint8 [n, 3, 32, 32] and labels [n] of `task`, `attacker` and `test`."""


@dataclass(frozen=True)
class Run:
    """One decoder: the network, how it is trained, and what the result decides."""

    name: str
    decides: str
    seconds: float  # estimated, for one target
    against: str = "base"  # the run with which this one is compared
    targets: tuple[str, ...] = ("none", "rate")
    net: str = "strong"
    width: int = 128
    epochs: int = 100
    batch: int = 256
    lr: float = 1e-3
    plain: bool = False  # Adam in float32 without warm-up or clipping, and live weights, as published
    augment: bool = True
    attention: bool = True
    images: int = 1  # times 9,500; what the attacker lacks is taken from the task images
    members: int = 1


def paper(name: str, decides: str, seconds: float, **options: Any) -> Run:
    """The published decoder "res N8 C64"."""
    chosen: dict[str, Any] = {"width": 64, "epochs": 50, "plain": True, "augment": False, **options}
    return Run(name, decides, seconds, against="paper", net="paper", **chosen)


NOISY = ("rate",)
RUNS = [  # by value: what is not reached in time matters less
    paper("paper", "what the published decoder leaves, the number to beat", 8),
    Run("base", "what the strong recipe gains over it", 19, against="paper"),
    Run("epochs", "converged in epochs?", 37, epochs=200),
    Run("images", "converged in images? (9,500 task images are added, at as many steps)", 19, images=2),
    Run("width", "converged in width?", 55, width=256, lr=7e-4),
    Run("no-augment", "what flips and crops are worth", 19, augment=False),
    Run("mean3", "what the mean of three decoders gains", 38, members=3),
    Run("narrow", "whether a quarter of the price does as well", 8, width=64, lr=1.4e-3),
    paper("paper-recipe", "whether the recipe or the network makes the gain", 10, epochs=100, plain=False, augment=True,
          targets=NOISY),
    paper("paper-epochs", "how far the published decoder is from convergence in epochs", 16, epochs=100, targets=NOISY),
    paper("paper-width", "and in width", 22, width=128, targets=NOISY),
    Run("batch", "whether larger batches do as well in half the steps", 15, batch=512, lr=1.4e-3, targets=NOISY),
    Run("no-attention", "what attention at 8 x 8 is worth", 17, attention=False, targets=NOISY),
    Run("lr", "whether the rate was too low", 19, lr=2e-3, targets=NOISY),
    Run("epochs4", "the next doubling, if `epochs` gained 2 %", 74, against="epochs", epochs=400),
    Run("width-epochs", "width again at twice the epochs, if `width` gained 2 %", 110, against="epochs", epochs=200,
        width=256, lr=7e-4),
]  # fmt: skip


class Norm(nn.Module):
    """LayerNorm over channels, in the precision of its input. The convolution behind it has the scale and the shift."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # which would make float32 of it
            return F.layer_norm(x.permute(0, 2, 3, 1), x.shape[1:2]).permute(0, 3, 1, 2)


class Block(nn.Sequential):
    """x + conv(SiLU(conv(norm(x)))), which starts as the identity; no BatchNorm, which hurts regression."""

    def __init__(self, width: int) -> None:
        first, second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        super().__init__(Norm(), first, nn.SiLU(), zeroed(second))

    def forward(self, input: Tensor) -> Tensor:
        return input + super().forward(input)


class Attention(nn.Module):
    """Every place looks at every other; heads of 64 channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.norm = max(1, width // 64), Norm()
        self.qkv, self.out = nn.Linear(width, 3 * width), zeroed(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        rows = self.norm(x).permute(0, 2, 3, 1).reshape(b, h * w, c)
        q, k, v = self.qkv(rows).view(b, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.out(seen).view(b, h, w, c).permute(0, 3, 1, 2)


def zeroed(layer: nn.Conv2d | nn.Linear) -> nn.Conv2d | nn.Linear:
    """The layer with weights and bias set to zero."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


class Strong(nn.Module):
    """z [b, c, 8, 8] -> x [b, 3, 32, 32]: 2w channels at 8 x 8 with attention, w at 16 x 16, w / 2 at 32 x 32.

    z is standardised by a sample of the attacker's releases. A transposed convolution adds the linear reading of it, so that the
    network has only the rest to learn.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, sample: Tensor, width: int, attention: bool) -> None:
        super().__init__()
        low, high, channels = 2 * width, width // 2, sample.shape[1]
        self.register_buffer("mean", sample.mean((0, 2, 3)).view(-1, 1, 1))
        self.register_buffer("std", sample.std((0, 2, 3)).clamp_min(1e-6).view(-1, 1, 1))
        self.place = nn.Parameter(torch.zeros(low, 8, 8))
        self.stem = nn.Conv2d(channels, low, 3, padding=1)
        look = [Attention] if attention else []
        self.body = nn.Sequential(
            *(part(low) for part in (Block, *look, Block, Block, *look, Block)),
            nn.Conv2d(low, width, 1), nn.Upsample(scale_factor=2), Block(width), Block(width),
            nn.Conv2d(width, high, 1), nn.Upsample(scale_factor=2), Block(high), Block(high), Norm(),
        )  # fmt: skip
        self.last = zeroed(nn.Conv2d(high, 3, 3, padding=1))
        self.linear = nn.ConvTranspose2d(channels, 3, 12, stride=4, padding=4)
        nn.init.constant_(self.linear.bias, 0.5)  # type: ignore[arg-type]

    def forward(self, z: Tensor) -> Tensor:
        z = (z - self.mean) / self.std
        x = self.stem(z)
        x = self.body(x + self.place.to(x.dtype))
        with torch.autocast(z.device.type, enabled=False):  # bfloat16 would round the pixels
            return self.last(x.float()) + self.linear(z.float())


@dataclass
class Target:
    """A frozen edge, its channel, and one release of each held-out and test image, which all decoders read."""

    edge: dict[str, Tensor]
    sigma: float
    images: Tensor  # uint8 [n, 3, 32, 32]: the attacker's, then those lent to it
    held_out: tuple[Tensor, Tensor]  # z, x
    test: tuple[Tensor, Tensor]

    def send(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            z = run_edge(self.edge, x)
            return z + self.sigma * torch.randn(z.shape, generator=generator, device=z.device)


def read_images(folder: Path, most: int | None) -> Parts:
    sys.path.insert(0, str(folder))
    import medlz  # type: ignore[import-not-found]

    paths = sorted(folder.glob("*-*.npz"))
    with ThreadPoolExecutor() as pool:
        shards = list(pool.map(medlz.load, paths))
    parts: Parts = {}
    for part in ("task", "attacker", "test"):
        x, y = zip(*(shard for path, shard in zip(paths, shards) if path.name.startswith(part)))
        parts[part] = np.concatenate(x).transpose(0, 3, 1, 2)[:most].copy(), np.concatenate(y)[:most].astype(np.int64)
    return parts


def train_targets(out: Path, parts: Parts, epochs: int, names: list[str]) -> dict[str, float]:
    """Train the edges that OUT lacks, side by side, and save them there; returns their validation accuracy."""
    missing = [name for name in names if not (out / f"edge_{name}.safetensors").exists()]
    accuracy = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder, many = Path(scratch), len(parts["task"][1])
        (images, labels), (test_images, test_labels) = parts["task"], parts["test"]
        np.savez(folder / "images.npz", images=images, labels=labels, test_images=test_images, test_labels=test_labels)
        splits = f"--splits.task {many * 17 // 18} --splits.validation {many // 18 - 10} --splits.auxiliary 10"
        common = f"--data npz --data.path {folder}/images.npz {splits} --model vgg11 --runs {folder} --train.batch 128"
        common += f" --train.epochs {epochs} --train.label-smoothing 0.1 --train.augment.crop 4"
        start = [sys.executable, "-m", "splitveil", "train"]
        words = {name: f"{common} {TARGETS[name][1]} --name {name}".split() for name in missing}
        jobs = {name: subprocess.Popen([*start, *flags]) for name, flags in words.items()}
        for name, job in jobs.items():
            if job.wait():
                raise RuntimeError(f"splitveil train ended with {job.returncode} for target {name}")
            weights = load_file(folder / name / "weights" / "last.safetensors")
            edge = {key.removeprefix("model.edge."): value for key, value in weights.items() if ".edge." in key}
            save_file(edge, out / f"edge_{name}.safetensors")
            line = (folder / name / "metrics.jsonl").read_text().splitlines()[-1]
            accuracy[name] = json.loads(line)["accuracy"]
    return accuracy


def run_edge(weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """x [b, 3, 32, 32] in [0, 1] -> z [b, 8, 8, 8]: two convolutions and the bottleneck, by `splitveil`'s names."""
    x = (x - weights["inner.normalise.mean"]) / weights["inner.normalise.std"]
    for stage in ("inner.conv1", "inner.conv2"):
        norm = {name: weights[f"{stage}.1.{name}"] for name in ("running_mean", "running_var", "weight", "bias")}
        x = F.batch_norm(F.conv2d(x, weights[f"{stage}.0.weight"], padding=1), **norm)  # type: ignore[arg-type]
        x = F.relu(F.max_pool2d(x, 2))
    return F.conv2d(x, weights["narrow.0.weight"], weights["narrow.0.bias"], padding=1)


def make_target(path: Path, sigma: float, parts: Parts, device: torch.device) -> Target:
    own, lent, test = (torch.from_numpy(parts[part][0]).to(device) for part in ("attacker", "task", "test"))
    held_out, own = own[: min(HELD_OUT, len(own) // 4)], own[min(HELD_OUT, len(own) // 4) :]
    nothing = torch.empty(0), torch.empty(0)
    target = Target(load_file(path, str(device)), sigma, torch.cat([own, lent[: len(own)]]), nothing, nothing)
    generator = torch.Generator(device).manual_seed(7)
    for name, images in {"held_out": held_out, "test": test}.items():
        x = images.float() / 255
        setattr(target, name, (torch.cat([target.send(part, generator) for part in x.split(CHUNK)]), x))
    return target


def take(images: Tensor, index: Tensor, augment: bool) -> Tensor:
    """A batch in [0, 1] by one gather; if wanted, mirrored at random and shifted by up to 4 pixels with reflected borders."""
    last = images.shape[-1] - 1
    place = torch.arange(last + 1, device=images.device)
    rows = columns = place.expand(len(index), -1)
    if augment:
        shift = torch.randint(-SHIFT, SHIFT + 1, (2, len(index), 1), device=images.device)
        rows, columns = last - (last - (place + shift).abs()).abs()
        columns = torch.where(torch.rand(len(index), 1, device=images.device) < 0.5, last - columns, columns)
    channel = torch.arange(images.shape[1], device=images.device)[None, :, None, None]
    return images[index[:, None, None, None], channel, rows[:, None, :, None], columns[:, None, None, :]].float() / 255


def train_decoder(run: Run, target: Target, seed: int, deadline: float) -> tuple[dict[str, Any], Tensor]:
    """Train one decoder; what was measured, and its images [n, 3, 32, 32] of the test releases."""
    device, began = target.images.device, time.perf_counter()
    on_gpu = device.type == "cuda"
    torch.manual_seed(seed)
    own = len(target.images) // 2  # the other half is lent
    images = target.images[: own * run.images]
    if run.net == "paper":
        net = res_decoder((8, 8, 8), (3, 32, 32), blocks=8, width=run.width)
    else:
        net = Strong(target.held_out[0], run.width, run.attention)
    net = net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    per_epoch = max(1, own // run.batch)
    batch, steps = min(run.batch, own), per_epoch * run.epochs
    lr, turn = torch.zeros((), device=device), torch.zeros(1, dtype=torch.int64, device=device)
    order = torch.zeros(per_epoch, batch, dtype=torch.int64, device=device)
    done, loss_sum = torch.zeros((), device=device), torch.zeros(run.epochs, device=device)
    weights = [p for p in net.parameters() if p.requires_grad]
    rest: dict[str, Any] = {"lr": lr, "fused": on_gpu, "foreach": False, "capturable": on_gpu}
    kind, decay = (torch.optim.Adam, 1e-4) if run.plain else (torch.optim.AdamW, 0.05)
    optimizer = kind(weights, weight_decay=decay, **rest)
    average = copy.deepcopy(net)
    live, mean = ([v for v in m.state_dict().values() if v.is_floating_point()] for m in (net, average))
    horizon = max(10, steps // 40)  # steps of the weights' average: few, because the rate falls to zero anyway
    warm = 0 if run.plain else steps // 20

    def guess(module: nn.Module, z: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=not run.plain, cache_enabled=False):
            return module(z).float()

    def body() -> None:
        x = take(images, order.index_select(0, turn).squeeze(0), run.augment)
        loss = F.mse_loss(guess(net, target.send(x)), x)  # fresh noise at every step
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        cosine = 1e-5 + (run.lr - 1e-5) * 0.5 * (1 + torch.cos(pi * done / steps))
        lr.copy_(cosine * ((done + 1) / max(1, warm)).clamp_max(1))
        if not run.plain:
            nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        torch._foreach_lerp_(mean, live, 1 / horizon)
        loss_sum.index_add_(0, (done / per_epoch).long().view(1), loss.detach().view(1))
        done.add_(1)
        turn.add_(1)

    @torch.no_grad()
    def error(module: nn.Module, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Squared error of each image, and the images."""
        module.eval()
        found = torch.cat([guess(module, z).clamp(0, 1) for z in pair[0].split(CHUNK)])
        return (found - pair[1]).square().mean((1, 2, 3)), found

    step, chosen = Captured(body, device), net if run.plain else average
    best, least = copy.deepcopy(chosen), torch.full((), torch.inf, device=device)
    kept, shown = ([v for v in m.state_dict().values() if v.is_floating_point()] for m in (best, chosen))
    curves = torch.zeros(2, run.epochs, device=device)  # held-out error of the live and of the averaged weights
    before, marks = None, []
    for epoch in range(run.epochs):
        order.copy_(torch.randperm(len(images), device=device)[: per_epoch * batch].view(per_epoch, batch))
        turn.zero_()
        net.train()
        for _ in range(per_epoch):
            step()
        for row, module in enumerate((net, average)):
            curves[row, epoch] = error(module, target.held_out)[0].mean()
        better = curves[int(chosen is average), epoch] < least
        least = torch.where(better, curves[int(chosen is average), epoch], least)
        for old, new in zip(kept, shown):
            old.copy_(torch.where(better, new, old))
        if on_gpu:  # the host runs one epoch ahead of the device, and no more
            before, now = torch.cuda.current_stream().record_event(), before
            if now is not None:
                now.synchronize()
        marks.append(time.perf_counter())
        if marks[-1] > deadline + 20:
            raise TimeoutError(f"out of time in epoch {epoch + 1} of {run.epochs}")
    errors, found = error(best, target.test)
    half = len(marks) // 2
    live_curve, mean_curve = curves.tolist()
    return {
        "mse": errors.mean().item(), "mse_live": error(net, target.test)[0].mean().item(),
        "mse_average": error(average, target.test)[0].mean().item(), "seconds": time.perf_counter() - began,
        "ms_per_step": 1e3 * (marks[-1] - marks[half - 1]) / per_epoch / (len(marks) - half) if half else None,
        "parameters": sum(p.numel() for p in weights), "captured": step.graph is not None, "why_not": step.why_not,
        "train": (loss_sum / per_epoch).tolist(), "held_out_live": live_curve, "held_out_average": mean_curve,
        "errors": errors.cpu().numpy(),
    }, found  # fmt: skip


def finish(run: Run, target: Target, key: str, cache: dict[Any, Any], deadline: float) -> dict[str, Any]:
    """All members of a run; a member that another run has trained already is taken from the cache."""
    found = []
    for seed in range(run.members):
        shape = key, seed, replace(run, name="", decides="", seconds=0, against="", targets=(), members=1)
        if shape not in cache:
            measured, images = train_decoder(run, target, seed, deadline)
            cache[shape] = measured, images.half().cpu()
        found.append(cache[shape])
    result = dict(found[0][0])
    if run.members > 1:
        mean = torch.stack([images.float() for _, images in found]).mean(0)
        result["errors"] = (mean - target.test[1].cpu()).square().mean((1, 2, 3)).numpy()
        result |= {"mse": float(result["errors"].mean()), "mse_members": [measured["mse"] for measured, _ in found]}
        result["seconds"] = sum(measured["seconds"] for measured, _ in found)
    return result


def gain(new: np.ndarray, old: np.ndarray) -> tuple[float, float]:
    """Share of the error that is gone, and its standard error over paired images."""
    ratio = new.mean() / old.mean()
    return float(1 - ratio), float((new - ratio * old).std() / len(new) ** 0.5 / old.mean())


def table(results: dict[str, Any], errors: dict[str, np.ndarray]) -> None:
    """Add every run's gain over the run it is compared with, and print all of them."""
    heads = {"mse": 9, "live": 9, "average": 9, "gain": 8, "se": 7, "seconds": 9, "ms/step": 9, "M par": 7}
    print(f"\n{'run':20}" + "".join(f"{head:>{width}}" for head, width in heads.items()))
    for key, line in results["runs"].items():
        if line["status"] != "done":
            print(f"{key:20} {line['status']}: {line.get('error', '')}")
            continue
        other = f"{key.split('/')[0]}/{line['against']}"
        if other in errors and other != key:
            line["gain"], line["se"] = gain(errors[key], errors[other])
        shown = f"{line['gain']:8.1%}{line['se']:7.1%}" if "gain" in line else " " * 15
        print(f"{key:20}{line['mse']:9.5f}{line['mse_live']:9.5f}{line['mse_average']:9.5f}{shown}{line['seconds']:9.1f}"
              f"{line['ms_per_step'] or 0:9.2f}{line['parameters'] / 1e6:7.2f}")  # fmt: skip
    for name in results["targets"]:
        tests = {test: results["runs"].get(f"{name}/{test}", {}).get("gain") for test in ("epochs", "width", "images")}
        if None not in tests.values():
            verdict = "has" if max(tests.values()) < 0.02 else "has not"
            print(f"{name}: base {verdict} converged ({', '.join(f'{k} x 2 gains {v:.1%}' for k, v in tests.items())})")


def toy(run: Run) -> Run:
    """The run at a size that a CPU finishes in seconds."""
    return replace(run, width=max(4, run.width // 16), epochs=min(2, run.epochs // 50), batch=run.batch // 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with medlz.py and the shards")
    parser.add_argument("--out", type=Path, required=True, help="results.json, per_image.npz and the edges go here")
    parser.add_argument("--minutes", type=float, default=9, help="no run is started that would end later")
    parser.add_argument("--only", default="", help="names of runs, with commas")
    parser.add_argument("--targets", default=",".join(TARGETS), help="with commas")
    parser.add_argument("--target-epochs", type=int, default=60)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    began = time.perf_counter()
    deadline = began + 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    options.out.mkdir(parents=True, exist_ok=True)

    def said(text: str) -> None:
        print(f"[{time.perf_counter() - began:5.0f} s] {text}", flush=True)

    parts = read_images(options.data, 512 if options.smoke else None)
    said("images read: " + ", ".join(f"{part} {len(labels)}" for part, (_, labels) in parts.items()))
    names = options.targets.split(",")
    accuracy = train_targets(options.out, parts, 1 if options.smoke else options.target_epochs, names)
    said(f"targets ready, validation accuracy {accuracy}")
    edges = {name: options.out / f"edge_{name}.safetensors" for name in names}
    targets = {name: make_target(edge, TARGETS[name][0], parts, device) for name, edge in edges.items()}
    record, kept = options.out / "results.json", options.out / "per_image.npz"
    results: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {"targets": {}, "runs": {}}
    errors = dict(np.load(kept)) if kept.exists() else {}
    for name, target in targets.items():
        x = target.test[1]
        floor = (x - (target.images[: len(target.images) // 2].float() / 255).mean(0)).square().mean().item()
        told = {"sigma": target.sigma, "z_std": target.test[0].std().item(), "mean_image_mse": floor}
        results["targets"].setdefault(name, told).update({"accuracy": accuracy[name]} if name in accuracy else {})
    results["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"

    cache: dict[Any, Any] = {}
    spent = planned = 1e-9  # seconds of the runs so far, measured and estimated
    for run in RUNS:
        for name in [name for name in names if name in run.targets]:
            key = f"{name}/{run.name}"
            skipped = options.only and run.name not in options.only.split(",")
            if skipped or results["runs"].get(key, {}).get("status") == "done":
                continue
            started, wanted = time.perf_counter(), spent / planned * run.seconds
            if started + wanted > deadline:
                said(f"{key} is left out: it needs about {wanted:.0f} s")
                continue
            line: dict[str, Any] = asdict(run)
            try:
                size = toy(run) if options.smoke else run
                line |= finish(size, targets[name], name, cache, deadline) | {"status": "done"}
                errors[key] = line.pop("errors")
                said(f"{key}: mse {line['mse']:.5f} in {line['seconds']:.1f} s, captured: {line['captured']}")
            except Exception as error:  # the other runs are still worth their time
                traceback.print_exc()
                line |= {"status": "failed", "error": f"{type(error).__name__}: {error}"[:300]}
            spent, planned = spent + time.perf_counter() - started, planned + run.seconds
            results["runs"][key] = line
            np.savez(kept, **errors)
            record.write_text(json.dumps(results))
            gc.collect()
            torch.cuda.empty_cache()
    table(results, errors)
    record.write_text(json.dumps(results))
    said("done")


if __name__ == "__main__":
    main()
