"""Networks to split. A model is a function that returns a chain of named stages; `splitveil.split` cuts the chain.

    @MODELS.register("small", Config)
    def small(channels: int, size: int, classes: int, cut: str, …) -> nn.Sequential

`channels` and `size` describe the images (any number of channels, square of `size` pixels); the Config must have a field
`cut`, the name of the last stage on the edge. Normalisation is added in front by `split.build_model`.
"""
