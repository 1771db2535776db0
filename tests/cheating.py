"""The cheating tests: z is frozen and only the surrogate's own parameters are trained, so whatever the loss loses is hidden.

A gate that can cheat has done so after 50 steps with every seed that was tried, and an honest one has settled after 200.
"""

import torch
from torch import Tensor

from splitveil.surrogates import Surrogate, SurrogateOutput

DIM, CLASSES, SAMPLES = 32, 3, 64


def frozen(tails: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """64 samples of each of 3 classes: Gaussian; heavy, Student t with 2 degrees of freedom; or low_rank, with nearly all spread
    in 4 of the 32 directions. loss_uniform is far above 0.5."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(CLASSES * SAMPLES, DIM, generator=generator)
    if tails == "heavy":
        chi = torch.randn(2, CLASSES * SAMPLES, DIM, generator=generator).square().sum(0)
        z = z / (chi / 2).sqrt()
    if tails == "low_rank":
        z = 0.05 * z + z[:, :4] @ torch.randn(4, DIM, generator=generator) / 2
    return z, torch.arange(CLASSES * SAMPLES) % CLASSES


def trained(
    surrogate: Surrogate, z: Tensor, y: Tensor, lr: float, steps: int = 200, by: type[torch.optim.Optimizer] = torch.optim.Adam,
    x: Tensor | None = None,
) -> tuple[SurrogateOutput, SurrogateOutput]:  # fmt: skip
    """What it says before and after its own parameters were trained on the same z, made of the same images x."""
    before = surrogate(z, y, x)
    parameters = [parameter for parameter in surrogate.parameters() if parameter.requires_grad]
    if parameters:
        optimizer = by(parameters, lr=lr)  # type: ignore[call-arg]

        def loss() -> Tensor:
            optimizer.zero_grad()
            now = surrogate(z, y, x).loss
            now.backward()
            return now

        for _ in range(steps):
            optimizer.step(loss)
            surrogate.after_step(z, y, torch.tensor(False), x)  # counted, not remembered: z stays what it is
    return before, surrogate(z, y, x)


OTHERS = [(torch.optim.SGD, 0.1, 200), (torch.optim.AdamW, 3e-2, 200), (torch.optim.LBFGS, 1.0, 10)]
"""Other optimisers than the one that CEM has, with their rate and steps; a step of LBFGS is twenty."""


def mixture(seed: int, samples: int = 512, dim: int = 64) -> tuple[Tensor, float]:
    """One class made of 4 well separated Gaussians of variance 1, and the variance inside them as it was drawn."""
    generator = torch.Generator().manual_seed(seed)
    centre = 2 * torch.randn(4, dim, generator=generator)
    mode = torch.randint(0, 4, (samples,), generator=generator)
    noise = torch.randn(samples, dim, generator=generator)
    member = torch.nn.functional.one_hot(mode, 4).float()
    inside = noise - member @ (member.T @ noise / member.sum(0).unsqueeze(1))
    return centre[mode] + noise, float(inside.square().sum() / dim / (samples - 4))
