import pytest
import torch
from torch import Tensor, nn

from splitveil import Channel, defences
from splitveil.auditing.channel import channel_of, names_of
from splitveil.defences import Defence
from splitveil.registry import DEFENCES, UserError
from splitveil.split_model import SplitModel

MODEL = SplitModel(nn.Identity(), nn.Flatten(), (2, 4, 4), (2, 4, 4))


class Own(Defence):
    """A user's defence that is not registered."""

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z.round()


def test_defences_may_be_given_in_every_form() -> None:
    table = {"name": "gaussian", "sigma": 0.5}
    forms = [table, [table], [defences.build("gaussian", sigma=0.5)], Channel([defences.build("gaussian", sigma=0.5)])]
    for given in forms:
        channel = channel_of(given, MODEL)
        assert (channel.noise_std, names_of(channel)) == (0.5, ("gaussian",))
    assert names_of(channel_of(["quantise", Own()], MODEL)) == ("quantise", "Own")
    assert names_of(channel_of((), MODEL)) == names_of(channel_of(None, MODEL)) == ()


def test_what_was_given_is_copied() -> None:
    given = defences.build("local_dp", epsilon=1.0)
    before = given.noise_std
    used = channel_of([given], MODEL)
    used.send(torch.rand(2, 2, 4, 4), torch.rand(2, 2, 4, 4), torch.Generator())
    assert int(used.defences[0].seen) == 64  # type: ignore[union-attr, arg-type]
    assert int(given.seen) == 0 and given.noise_std == before  # type: ignore[arg-type]


def test_a_defence_sees_the_shape_of_z() -> None:
    with pytest.raises(UserError, match=r"topk: drop is 0\.001, which is 0 of the 32 entries"):
        channel_of([{"name": "topk", "drop": 0.001}], MODEL)


def test_a_trained_defence_brings_what_it_learned() -> None:
    trained = defences.build("shredder")
    trained.attach(MODEL)
    sent = channel_of([trained], MODEL).defences[0].library  # type: ignore[union-attr]
    assert torch.equal(sent, trained.library) and sent is not trained.library  # type: ignore[arg-type]


TRAINED = {"adversarial", "bottleneck", "disco", "finite_code", "pruning", "shredder", "sparse_coding", "vib"}


@pytest.mark.parametrize("name", sorted(set(DEFENCES.names()) - {"adversarial_noise"}))  # which needs `adversarial` before it
def test_by_name_a_defence_acts_at_once_or_is_refused_because_it_must_be_trained(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITVEIL_KEY", "0123456789abcdef" * 2)
    if name in TRAINED:
        with pytest.raises(UserError, match=f"{name} (changes the network|has to be trained)"):
            channel_of([name], MODEL)
        return
    x = torch.rand(4, 2, 4, 4)
    assert channel_of([name], MODEL).send(x, x, torch.Generator().manual_seed(0)).shape == x.shape


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["gausian"], "unknown defence 'gausian'; did you mean 'gaussian'"),
        ([{"name": "gaussian", "sgma": 1}], "did you mean 'sigma'"),
        ([3], "channel holds 3, must hold defences"),
        ([{"sigma": 1}], "channel holds .'sigma': 1., must hold defences"),
        (["bottleneck"], "bottleneck changes the network and is trained with it"),
        (["disco"], "disco has to be trained with the network; give the trained defence itself"),
    ],
)
def test_a_channel_that_makes_no_sense_is_refused(given: list[object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        channel_of(given, MODEL)
