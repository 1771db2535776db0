import pytest
import torch
from torch import nn

from splitveil.attacks.threat import ThreatModel, why_denied
from splitveil.evaluation.flags import FLAGS, not_checked
from splitveil.evaluation.victim import DEFENCES, FOLDER, LOG, NoCloud
from splitveil.registry import UserError


def test_a_cloud_that_is_not_there_says_so() -> None:
    with pytest.raises(UserError, match="there is no cloud here"):
        nn.Sequential(nn.Identity(), NoCloud())(torch.zeros(1))


@pytest.mark.parametrize(
    ("threat", "lacking"),
    [
        (ThreatModel(encoder_weights=True), "encoder_weights"),
        (ThreatModel(architecture=True), "architecture"),
        (ThreatModel(cloud_weights=True), "cloud_weights"),
        (ThreatModel(labels=True), "labels"),
        (ThreatModel(cloud_weights=True, queries=False), "labels"),  # it learns from the classes of its own images
        (ThreatModel(observations=2), "observations"),
    ],
)
def test_what_does_not_exist_is_denied_with_its_reason(threat: ThreatModel, lacking: str) -> None:
    assert why_denied(threat, {lacking: "it is lost"}) == "it is lost"
    assert why_denied(threat, {}) is None
    assert why_denied(ThreatModel(), {lacking: "it is lost"}) is None


def test_an_attack_does_without_knowledge_of_the_channel() -> None:
    assert why_denied(ThreatModel(channel=True), {"channel": "nobody knows it"}) is None


def test_flags_that_cannot_be_checked_are_named_with_the_reason() -> None:
    assert not_checked({}) == {}
    assert not_checked({LOG: "no log"}) == {"attention-collapsed": "no log"}
    assert set(not_checked({DEFENCES: "unknown"})) == {"defence-inactive", "bound-violated", "channel-off-at-inference"}
    assert all(flag.needs in ("", LOG, FOLDER, DEFENCES, *vars(ThreatModel())) for flag in FLAGS.values())
