"""A worked example, computed by hand to eight digits: three classes of four points in the plane."""

import torch

Z = torch.tensor([
    [(0, 0), (0.2, 0.1), (-0.1, 0.05), (0.15, -0.05)],
    [(1, 1), (1.2, 1.1), (0.8, 0.9), (1.1, 0.95)],
    [(1, -1), (0.8, -0.9), (1.1, -1.2), (0.9, -1.05)],
], dtype=torch.float64)  # fmt: skip
FEATURES, LABELS = Z.flatten(0, 1), torch.arange(3).repeat_interleave(4)
