"""Networks to split. A model is a function that returns a chain of named stages; `splitveil.split_model` cuts the chain.

    @MODELS.register("small", Config)
    def small(channels: int, size: int, classes: int, cut: str, …) -> nn.Sequential

`channels` and `size` describe the images (any number of channels, square of `size` pixels); the Config must have a field
`cut`, the name of the last stage on the edge. Normalisation is added in front by `split.build_model`.
"""

from torch import nn


def he_start(stages: nn.Sequential) -> nn.Sequential:
    """He et al. 2015: convolutions start with variance 2 / fan-out, the linear head small.

    torch's own start has a sixth of that variance: BatchNorm hides this in the forward pass, but smaller weights turn faster
    under the same learning rate.
    """
    for layer in stages.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return stages
