"""loop and memory: a surrogate's forward and backward pass without the rest of the step."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.bench.steps import asked, features_like, parts_of, task_of
from benchmarks.bench.timing import Advance, Row, Setting, Work, in_turns, speedup
from splitveil.config import Config
from splitveil.registry import SURROGATES, UserError
from splitveil.rng import stream
from splitveil.surrogates import FeatureSpace, Surrogate
from splitveil.training.build import Parts


def alone(config: Config, full: Surrogate, c: int, sigma: float | None, device: torch.device) -> Surrogate:
    """The surrogate of one class on `full`'s device: the parameters are `full`'s own, the statistics its row of them."""
    entry = SURROGATES.of(config.cem.surrogate)
    surrogate = entry.make_from(config.cem.surrogate, space=FeatureSpace(full.dim, 1, sigma, image=full.space.image))
    without_banks(surrogate)
    surrogate.to(device)  # what no state holds, such as recall's sharpness, comes from nowhere else
    shapes = {name: value.shape for name, value in surrogate.state_dict().items()}
    state = full.state_dict(keep_vars=True)
    own = {name: value if value.shape == shapes[name] else value[c : c + 1] for name, value in state.items()}
    surrogate.load_state_dict(own, assign=True)
    return surrogate


def without_banks(surrogate: Surrogate) -> None:
    for part in surrogate.modules():  # hybrid holds another surrogate
        if isinstance(part, Surrogate):
            part.bank = None


def one_by_one(each: list[Surrogate], z: Tensor, y: Tensor, x: Tensor) -> Tensor:
    total = z.new_zeros(())
    for c in y.unique().tolist():
        own = z[y == c]
        total = total + len(own) / len(z) * each[c](own, torch.zeros_like(y[: len(own)]), x[y == c]).loss
    return total


def with_backward(surrogate: Surrogate, z: Tensor, loss: Callable[[], Tensor]) -> Callable[[], None]:
    def work() -> None:
        z.grad = None
        surrogate.zero_grad(set_to_none=True)
        loss().backward()

    return work


def at_once_and_looped(config: Config, parts: Parts, z: Tensor, y: Tensor, x: Tensor) -> list[Callable[[], None]]:
    """Forward and backward, all classes at once and one by one; they must agree."""
    assert parts.cem is not None
    full = parts.cem.surrogate
    without_banks(full)  # the loop would need one for each class
    each = [alone(config, full, c, parts.channel.noise_std, z.device) for c in range(full.classes)]
    losses = [lambda: full(z, y, x).loss, lambda: one_by_one(each, z, y, x)]
    values = [loss() for loss in losses]
    if values[0] == 0:
        raise UserError(f"in a batch of {len(z)} no class of {full.classes} has company; measure a larger one")
    expected, found = (torch.autograd.grad(value, z)[0] for value in values)
    torch.testing.assert_close(values[1], values[0], rtol=1e-4, atol=1e-7)
    apart = torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected)
    assert apart < 1e-3, f"{config.cem.surrogate}: gradients of the loop are off by {apart:.2g}"
    return [with_backward(full, z, loss) for loss in losses]


def scene(setting: Setting) -> tuple[dict[str, tuple[Config, Parts]], Tensor, Tensor, Tensor]:
    """The variants with a surrogate, features of a batch, their labels and images."""
    task, device = task_of(setting), setting.device
    made = {name: (config, parts_of(config, task, device)) for name, config in asked(setting).items()}
    made = {name: (config, parts) for name, (config, parts) in made.items() if parts.cem is not None}
    z, _ = features_like(next(iter(made.values()))[1], task, setting.batch, device)
    y = torch.randint(setting.classes, (setting.batch,), generator=stream(device, 0, "bench", setting.batch), device=device)
    x = torch.rand(setting.batch, *task.shape, device=device)
    return made, z.requires_grad_(), y, x


def loop_rows(setting: Setting, advance: Advance) -> list[Row]:
    """How many times as fast all classes at once are as one after the other, z[y == c]; same loss and gradient, asserted."""
    made, z, y, x = scene(setting)
    works: dict[str, Work] = {}
    for name, (config, parts) in made.items():
        works[name], works[f"{name}, looped"] = at_once_and_looped(config, parts, z, y, x)
    taken = in_turns(works, setting.slow_rounds, setting.device, advance)
    return [setting.row("loop", name, "plain loop over classes", speedup(taken[name], taken[f"{name}, looped"])) for name in made]


def memory_rows(setting: Setting, advance: Advance) -> list[Row]:
    """The most memory that forward and backward hold beside z, over that of z and its gradient."""
    made, z, y, x = scene(setting)
    rows = []
    for name, (_, parts) in made.items():
        advance(0, name)
        assert parts.cem is not None
        surrogate = parts.cem.surrogate
        work = with_backward(surrogate, z, lambda surrogate=surrogate: surrogate(z, y, x).loss)
        work()  # libraries take their workspace at the first use
        z.grad = None
        surrogate.zero_grad(set_to_none=True)
        torch.cuda.synchronize(setting.device)
        before = torch.cuda.memory_allocated(setting.device)
        torch.cuda.reset_peak_memory_stats(setting.device)
        work()
        added, base = torch.cuda.max_memory_allocated(setting.device) - before, 2 * z.numel() * z.element_size()
        ratio = added / base
        numbers = {"ratio": ratio, "quartiles": [ratio, ratio], "ms": None, "base_ms": None, "mib": added / 2**20}
        rows.append(setting.row("memory", name, "z and its gradient", numbers))
    return rows
