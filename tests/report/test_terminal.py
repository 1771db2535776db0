from typing import Any

import pytest

from splitveil.report.terminal import closest, print_table, strongest


def summary(**attacks: tuple[float, float, float]) -> dict[str, Any]:
    rows = {name: {"mse": mse, "ssim": ssim, "psnr": psnr} for name, (mse, ssim, psnr) in attacks.items()}
    return {
        "name": "a[b]", "n_test": 50, "accuracy": 0.9, "accuracy_ci95": (0.85, 0.94), "ceiling_mse": 0.05, "bits": None,
        "attacks": rows, "flags": [{"flag": "metric-ceiling", "detail": "why"}],
    }  # fmt: skip


def test_every_figure_is_that_of_the_attack_that_does_best_by_it() -> None:
    seen = summary(ridge=(0.02, 0.7, 17.0), decoder=(0.01, 0.6, 20.0), broken=(float("nan"), 0.99, 99.0))
    assert strongest(seen) == ("decoder", seen["attacks"]["decoder"])
    assert closest(seen, "ssim") == 0.7
    assert closest(seen, "psnr") == 20.0


def test_the_table_fits_eighty_columns_and_shows_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([summary(ridge=(0.02, 0.7, 17.0), decoder=(0.01, 0.6, 20.0)), summary()])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    words = next(line.split() for line in out.splitlines() if "decoder" in line)
    assert words == ["a[b]", "0.900", "±", "0.045", "decoder", "0.0100", "0.700", "20.0", "20%", "∞"]
    assert "none run" in out
    assert "flag a[b]: metric-ceiling (why)" in out


def test_the_worst_case_stands_below_and_several_seeds_have_one_more_line(capsys: pytest.CaptureFixture[str]) -> None:
    worst = {
        "mse": 0.008, "mse_ci95": (0.007, 0.009), "ssim": 0.75, "psnr": 21.0, "mse_q05": 0.002, "ssim_q95": 0.9,
    }  # fmt: skip
    runs = [
        summary(ridge=(0.02, 0.7, 17.0))
        | {"name": f"a-seed{seed}-strength4", "seed": seed, "weights_sha256": str(seed), "worst_case": worst}
        for seed in (0, 1)
    ]
    print_table([*runs, summary(), summary() | {"worst_case": None, "skipped": {"mask": "why [not]"}}])
    out = " ".join(capsys.readouterr().out.split())
    assert "worst case a-seed1-strength4: MSE 0.0080 (0.0070 to 0.0090), SSIM 0.750, PSNR 21.0;" in out
    assert "unluckiest 5 %: MSE below 0.0020, SSIM above 0.900" in out
    assert "worst case a-strength4 over 2 seeds: MSE 0.0080 (0.0080 to 0.0080)" in out
    assert out.count("worst case") == 3
    assert "a[b]: mask skipped, why [not]" in out
