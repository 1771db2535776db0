"""The paper's rows on real CIFAR-10, with and without CEM, beside the published numbers.

    python -m benchmarks.cifar10 --data DIR                          # DIR holds cifar-10-batches-bin/; for a GPU; resumable
    python -m benchmarks.cifar10 --data DIR --rows bottleneck --epochs 240 --out results/cifar10_240.json

Each row is recipes/paper/cifar10.toml with the recipe of its defence and, for "+ CEM", recipes/paper/cem.toml: the published
surrogate, strength and learning-rate rule. Where `--epochs` is not the paper's 240, warm-up of the proxy decoder and time of the
pruning are shortened in proportion. The attacker trains the paper's inverse network (res N8 C64, 50 epochs) on 9,000 images that
the model has not seen: the column "infer" of the paper's Table 1, whose attacker has 9,000 images too.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.finish import finish
from splitveil.cli.arguments import parse
from splitveil.config import Config
from splitveil.evaluation.claims import write_claim
from splitveil.evaluation.summary import Summary

RECIPES = Path(__file__).parent.parent / "recipes" / "paper"
PUBLISHED = {  # Xia et al., CVPR 2025, Tables 1 and 4: accuracy, decoder MSE ("infer"), SSIM, PSNR; without CEM and with it
    "none": ((91.86, 0.0014, None, None), None),
    "bottleneck": ((90.87, 0.0041, 0.863, 23.82), (90.69, 0.0058, 0.813, 22.36)),
    "distcorr": ((89.52, 0.0082, 0.779, 20.86), (89.80, 0.0093, 0.757, 20.31)),
    "dropout": ((87.75, 0.0104, 0.729, 19.82), (87.53, 0.0134, 0.682, 18.72)),
    "patrol": ((89.58, 0.0293, 0.537, 15.33), (89.67, 0.0335, 0.506, 14.74)),
    "ressfl": ((89.68, 0.0240, 0.595, 16.19), (90.11, 0.0251, 0.571, 16.00)),
    "noise_nopeek": ((87.19, 0.0159, 0.664, 17.98), (87.08, 0.0174, 0.643, 17.59)),
    "noise_arl": ((87.78, 0.0336, 0.501, 14.73), (87.62, 0.0355, 0.484, 14.48)),
}
PAPER_EPOCHS = 240
FORMATS = {"accuracy": ".4f", "mse": ".5f", "ssim": ".3f", "psnr": ".2f"}
PRINTED = FORMATS | {"mse": ".4f"}  # the paper gives no more digits


def config_of(row: str, cem: bool, options: argparse.Namespace) -> Config:
    recipes = [RECIPES / "cifar10.toml", RECIPES / f"{row}.toml", *([RECIPES / "cem.toml"] if cem else [])]
    flags = ["--data.path", str(options.data), "--train.epochs", str(options.epochs), "--seed", str(options.seed)]
    flags += ["--name", f"{row}{'+cem' if cem else ''}-{options.epochs}-seed{options.seed}", *options.flags]
    shortened = {"adversarial": ("warmup", 30), "pruning": ("at", 180)}
    config = parse([*map(str, recipes), *flags])
    for i, defence in enumerate(config.defences):
        if type(defence).method in shortened:
            name, epoch = shortened[type(defence).method]
            flags += [f"--defences.{i}.{name}", str(max(1, epoch * options.epochs // PAPER_EPOCHS))]
    return parse([*map(str, recipes), *flags])


def line_of(row: str, cem: bool, summary: Summary) -> dict[str, Any]:
    attack = summary.strongest
    assert attack is not None
    given = PUBLISHED[row][cem]
    published = None if given is None else dict(zip(("accuracy", "mse", "ssim", "psnr"), (given[0] / 100, *given[1:])))
    return {
        "row": row + (" + CEM" if cem else ""), "seed": summary.seed, "accuracy": summary.accuracy, "attack": attack.attack,
        "mse": attack.mse, "mse_ci95": attack.mse_ci95, "ssim": attack.ssim, "psnr": attack.psnr, "bits": summary.bits,
        "published": published, "flags": summary.flag_names,
    }  # fmt: skip


def markdown(lines: list[dict[str, Any]]) -> str:
    """The table of the docs: ours, and the published numbers in columns of their own."""
    table = [
        "| row | accuracy | decoder MSE | SSIM | PSNR | published: accuracy | MSE | SSIM | PSNR |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        theirs = line["published"] or {}
        given = [f"{theirs[name]:{form}}" if theirs.get(name) else "" for name, form in PRINTED.items()]
        ours = [f"{line[name]:{form}}" for name, form in FORMATS.items()]
        table.append(f"| {' | '.join([line['row'], *ours, *given])} |")
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="where cifar-10-batches-bin/ lies")
    parser.add_argument("--rows", default="none,bottleneck,dropout,noise_arl", help=", ".join(PUBLISHED))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=8, help="runs that are trained side by side")
    parser.add_argument("--runs", type=Path, default=Path("runs/cifar10"))
    parser.add_argument("--out", type=Path, default=Path("results/cifar10.json"))
    parser.add_argument("flags", nargs="*", help="flags of `splitveil train` for every run, after --")
    options = parser.parse_args()
    rows = [(row, cem) for row in options.rows.split(",") for cem in (False, True) if PUBLISHED[row][cem]]
    configs = [config_of(row, cem, options) for row, cem in rows]
    summaries = finish(configs, options.runs, options.together)
    lines = [line_of(row, cem, summary) for (row, cem), summary in zip(rows, summaries)]
    for line in lines:
        print("{row:20} accuracy {accuracy:.4f}  MSE {mse:.5f}  SSIM {ssim:.3f}  published {published}".format(**line))
    claim = f"the paper's rows on CIFAR-10, {options.epochs} epochs instead of {PAPER_EPOCHS}, seed {options.seed}"
    claim = claim.replace(" instead of 240", "") if options.epochs == PAPER_EPOCHS else claim
    command = f"python -m benchmarks.cifar10 --data DIR --rows {options.rows} --epochs {options.epochs}"
    write_claim(options.out, claim, command, summaries, lines=lines)


if __name__ == "__main__":
    main()
