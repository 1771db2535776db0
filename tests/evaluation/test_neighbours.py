"""An attacker with copies of the test images is flagged, from the attack to the summary; one without is not."""

from pathlib import Path

import numpy as np
import pytest

from splitveil.cli.arguments import parse
from splitveil.evaluation.evaluate import evaluate_run
from splitveil.evaluation.run_attacks import attack_run
from splitveil.training.train_runs import train_run


@pytest.mark.parametrize("planted", [True, False])
def test_copies_among_the_attackers_images_raise_the_flag(
    planted: bool, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = dict(np.load(pictures))
    if planted:  # flipped copies of all test images take the place of training images, of which the attacker gets half
        data["images"][: len(data["test_images"])] = data["test_images"][..., ::-1]
        data["labels"][: len(data["test_labels"])] = data["test_labels"]
    np.savez(tmp_path / "data.npz", **data)
    flags = f"""
        --name run --data npz --data.path {tmp_path}/data.npz --splits.task 300 --splits.validation 40 --splits.auxiliary 400
        --model.width 4 --train.epochs 1 --train.batch 64 --device cpu --attacks mean_image,ridge
    """
    run, splits, device = train_run(tmp_path / "run", parse(flags.split()))
    attack_run(run, splits, device)
    err = " ".join(capsys.readouterr().err.split())
    summary = evaluate_run(run, splits, device)
    facts = summary.attacks["ridge"].facts
    own = {image[0].tobytes() for image in splits.auxiliary.images[..., ::-1]}
    copies = sum(image[0].tobytes() in own for image in splits.test.images)
    assert facts["neighbours_of"] == len(splits.test.images) == 120
    assert (copies > 30) == planted
    assert facts["neighbours"] == copies
    assert ("neighbours-in-attacker-images" in summary.flag_names) == planted
    assert (f"{copies} of 120 test images that were looked at have a near-duplicate among the attacker's 400" in err) == planted
    assert ("test image" in err and "and own image" in err) == planted
