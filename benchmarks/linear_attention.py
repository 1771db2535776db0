"""Time and memory of norm-aware linear attention over those of a softmax, with as many queries as keys.

    python -m benchmarks.linear_attention                    # the CPU, float32
    python -m benchmarks.linear_attention --device cuda      # bfloat16 and float32; SDPA then is a fused kernel
    python -m benchmarks.linear_attention --device cuda --compile
    python -m benchmarks.linear_attention --least 4 --most 64 --queries 8192

For each number of keys S it prints how many times as long the softmax takes as the linear attention: once in the way that torch
chooses (scaled_dot_product_attention, SDPA), and once as an explicit matrix. Given are the median over rounds and the
quartiles; all three are measured in turn in each round. Then it prints the same for the most memory that is held beside the
inputs. A call is one forward pass, or one forward and backward pass, with 4 heads of width 32. Above 1 the linear attention is
better. On a CPU it counts CPU time, and measures each memory in a process of its own. On a GPU each call is the replay of a
CUDA graph, as in a captured training step; with --compile all go through torch.compile.
"""

import argparse
import math
import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.start import start
from splitveil.compute.cuda_graph import WARMUP, Captured
from splitveil.statistics.linear_attention import linear_attention, softmax_attention

HEADS, WIDTH, SHORTEST = 4, 32, 0.05


def explicit_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


METHODS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": linear_attention, "SDPA": softmax_attention, "explicit": explicit_softmax,
}  # fmt: skip


def inputs(queries: int, keys: int, device: torch.device, dtype: torch.dtype, backward: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, HEADS, queries, WIDTH), (1, HEADS, keys, WIDTH), (1, HEADS, keys, WIDTH))
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [part.requires_grad_(backward) for part in drawn]


def call(method: str, parts: list[Tensor]) -> None:
    out = METHODS[method](*parts)
    if out.requires_grad:
        torch.autograd.grad(out.sum(), parts)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(run: Callable[[], None], device: torch.device, calls: int) -> float:
    wait(device)
    began = time.perf_counter() if device.type == "cuda" else time.process_time()
    for _ in range(calls):
        run()
    wait(device)
    return ((time.perf_counter() if device.type == "cuda" else time.process_time()) - began) / calls


def memory(which: str) -> int:
    """VmRSS, the bytes that this process holds, or VmHWM, the most that it held; on Linux."""
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index(f"{which}:") + 1])


def in_own_process(pipe: Connection, method: str, queries: int, keys: int, backward: bool) -> None:
    parts = inputs(queries, keys, torch.device("cpu"), torch.float32, backward)
    call(method, [part[:, :, :8].detach().requires_grad_(backward) for part in parts])  # what the first call loads
    Path("/proc/self/clear_refs").write_text("5")  # the most that it held is counted from now on
    before = memory("VmRSS")
    call(method, parts)
    pipe.send(memory("VmHWM") - before)


def peak(method: str, queries: int, keys: int, device: torch.device, dtype: torch.dtype, backward: bool) -> int:
    """Bytes held at most beside the inputs."""
    if device.type == "cuda":
        parts = inputs(queries, keys, device, dtype, backward)
        call(method, parts)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call(method, parts)
        return torch.cuda.max_memory_allocated(device) - before
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("spawn").Process(target=in_own_process, args=(sending, method, queries, keys, backward))
    child.start()
    child.join()
    return receiving.recv()


def quartiles(ratios: list[float]) -> str:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def row(queries: int, keys: int, device: torch.device, dtype: torch.dtype, backward: bool, rounds: int) -> str:
    parts = inputs(queries, keys, device, dtype, backward)
    runs = {method: Captured(partial(call, method, parts), device) for method in METHODS}
    for run in runs.values():
        for _ in range(WARMUP + 2):
            run()
    calls = {method: max(1, int(SHORTEST / max(seconds(run, device, 1), 1e-6))) for method, run in runs.items()}
    times = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, run in runs.items():
            times[method].append(seconds(run, device, calls[method]))
    held = {method: peak(method, queries, keys, device, dtype, backward) for method in METHODS}
    others = [name for name in METHODS if name != "linear"]
    cells = [quartiles([other / own for other, own in zip(times[name], times["linear"])]) for name in others]
    cells += [f"{held[name] / max(held['linear'], 1):.2f}" for name in others]
    own = f"{1000 * float(np.median(times['linear'])):.3g} ms, {held['linear'] / 2**20:.3g} MiB"
    return f"| {queries} | {keys} | {own} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--least", type=int, default=128, help="fewest keys; each row has four times those of the last")
    parser.add_argument("--most", type=int, default=8192)
    parser.add_argument("--queries", type=int, help="as many as keys, unless given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="through torch.compile")
    options = parser.parse_args()
    if options.compile:
        METHODS.update({name: torch.compile(method, dynamic=False) for name, method in METHODS.items()})
    device = torch.device(options.device)
    for dtype in [torch.bfloat16, torch.float32] if device.type == "cuda" else [torch.float32]:
        for backward in (False, True):
            print(f"\n{dtype}, forward{' and backward' * backward}, {HEADS} heads of width {WIDTH}\n")
            titles = "N", "S", "linear", "time: SDPA", "time: explicit", "memory: SDPA", "memory: explicit"
            print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
            keys = options.least
            while keys <= options.most:
                print(row(options.queries or keys, keys, device, dtype, backward, options.rounds), flush=True)
                keys *= 4


if __name__ == "__main__":
    start(main)
