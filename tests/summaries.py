"""Summaries of runs that never were: the least that the types demand, with whatever a test wants to be different."""

from typing import Any

from splitveil.attacks.threat import ThreatModel
from splitveil.evaluation.summary import AttackResult, Part, Summary, WorstCase
from splitveil.metrics.cost import Cost

CEILING = 0.1


def attack_result(name: str = "decoder", mse: float = 0.05, **changes: Any) -> AttackResult:
    """An attack with one release and 1,000 images of its own, whose mean is known exactly."""
    usual = {
        "attack": name, "method": name, "seed": 0, "options": {}, "weights_sha256": "w", "threat": ThreatModel(), "n_images": 40,
        "auxiliary_images": 1000, "seconds": 3.25, "device": "cpu", "mse": mse, "mse_ci95": (mse, mse), "ssim": 0.5,
        "ssim_ci95": (0.5, 0.5), "psnr": 13.0, "psnr_ci95": (13.0, 13.0), "mse_over_ceiling": mse / CEILING,
    }  # fmt: skip
    return AttackResult(**usual | changes)


def summary(name: str = "first", *attacks: AttackResult, **changes: Any) -> Summary:
    half = Cost(7160, 1474560, 2048)
    usual = {
        "name": name, "seed": 0, "accuracy": 0.9, "accuracy_ci95": (0.85, 0.94), "n_test": 1000, "ceiling_mse": CEILING,
        "sigma": None, "bits": None, "attacks": {attack.attack: attack for attack in attacks}, "defences": ("bottleneck",),
        "surrogate": None, "strength": 0.0, "tau": None, "variance_histogram": (0,) * 20 + (5,) * 30,
        "histogram_range": (-8.0, 2.0, 50), "acting": {}, "cost": {"edge": half, "cloud": half}, "z_shape": (8, 8, 8),
        "config_sha256": "c", "weights_sha256": "w", "splits": {"test": Part(1000, "test1")},
        "environment": {"torch": "2", "commit": None},
    }  # fmt: skip
    return Summary(**usual | changes)


def worst_of(mse: float = 0.02, ssim: float = 0.6, psnr: float = 17.5) -> WorstCase:
    """A worst case over two attacks: means as given, tails beyond them, intervals of 0.001 on both sides."""
    means = {"mse": mse, "mse_q05": mse / 4, "ssim": ssim, "ssim_q95": ssim + 0.15, "psnr": psnr, "psnr_q95": psnr + 4}
    intervals = {f"{name}_ci95": (value - 0.001, value + 0.001) for name, value in means.items()}
    return WorstCase(attacks=("ridge", "decoder"), n_images=50, lowest={"ridge": 1.0}, **means, **intervals)  # type: ignore[arg-type]
