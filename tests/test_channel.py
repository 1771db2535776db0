import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from splitveil import defences
from splitveil.channel import Channel
from splitveil.defences import AttackHints, Batch, Defence
from splitveil.noise import AHEAD
from splitveil.registry import UserError
from splitveil.split_model import SplitModel


class Scale(Defence):
    """Multiplies z, asks for a penalty, and notes what it was called with."""

    def __init__(self, factor: float, penalty: float | None = None) -> None:
        super().__init__()
        self.factor, self.cost, self.calls = factor, penalty, []

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z * self.factor + 1

    def penalty(self, batch: Batch) -> Tensor | None:
        return None if self.cost is None else self.cost * batch.z.mean()

    def inner_step(self, batch: Batch) -> None:
        self.calls.append(("inner_step", batch))

    def on_epoch(self, epoch: int, model: SplitModel) -> None:
        self.calls.append(("on_epoch", epoch))

    @property
    def attack_hints(self) -> AttackHints:
        return AttackHints(side_information={"factor": self.factor})


@pytest.fixture
def served() -> Iterator[Callable[..., Channel]]:
    yield lambda *stack: Channel(stack).serve()
    AHEAD.stop()


def model() -> SplitModel:
    return SplitModel(nn.Identity(), nn.Flatten(), (2, 4, 4), (2, 4, 4))


def test_defences_act_in_their_order() -> None:
    z = torch.randn(3, 2)
    torch.testing.assert_close(Channel([Scale(2), Scale(10)]).send(z, z), (z * 2 + 1) * 10 + 1)
    torch.testing.assert_close(Channel([Scale(10), Scale(2)]).send(z, z), (z * 10 + 1) * 2 + 1)


@pytest.mark.parametrize("stack", [[], ["none"], ["none", "none"], ["gaussian"], ["bottleneck"]], ids=str)
def test_what_is_sent_is_a_new_tensor_that_may_be_written_into(stack: list[str]) -> None:
    z = torch.randn(3, 4)
    before = z.clone()
    sent = Channel(defences.build(name) for name in stack).send(z, z)
    assert sent.data_ptr() != z.data_ptr()
    sent.relu_()
    assert torch.equal(z, before)


def test_an_empty_channel_lets_the_gradient_through() -> None:
    z = torch.randn(3, 4, requires_grad=True)
    (2 * Channel().send(z, z)).sum().backward()
    assert z.grad is not None
    assert torch.equal(z.grad, torch.full((3, 4), 2.0))


def test_the_generator_decides_the_noise_of_the_whole_stack() -> None:
    channel = Channel([defences.build("gaussian"), defences.build("gaussian")])
    z = torch.zeros(5)
    one, same, other = (channel.send(z, z, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_penalties_are_those_of_the_defences_that_ask_for_one() -> None:
    z = torch.ones(2, 3)
    terms = Channel([Scale(1), Scale(1, 3.0), Scale(1, 4.0)]).penalties(Batch(z, z, z, torch.zeros(2)))
    assert [term.item() for term in terms] == [3, 4]


def test_every_defence_hears_of_steps_and_epochs_and_gives_its_hints() -> None:
    first, second = Scale(2), Scale(3)
    channel, z = Channel([first, second]), torch.ones(2, 3)
    batch = Batch(z, z, z, torch.zeros(2))
    channel.on_epoch(7, model())
    channel.inner_step(batch)
    assert first.calls == second.calls == [("on_epoch", 7), ("inner_step", batch)]
    assert [hint.side_information["factor"] for hint in channel.hints] == [2, 3]


class Widened(Defence):
    """Another layer behind the edge, and what it was told about the model in the end."""

    def rebuild(self, model: SplitModel) -> SplitModel:
        edge = nn.Sequential(model.edge, nn.Conv2d(model.z_shape[0], model.z_shape[0], 1))
        return SplitModel(edge, model.cloud, model.z_shape, model.x_shape)

    def attach(self, model: SplitModel) -> None:
        self.told = model.z_shape


def test_architectures_are_rebuilt_one_after_the_other_and_all_are_told_the_outcome() -> None:
    first = Widened()
    rebuilt = Channel([first, defences.build("bottleneck", channels=3)]).rebuild(model())
    assert rebuilt.z_shape == first.told == (3, 4, 4)
    assert rebuilt(torch.rand(5, 2, 4, 4)).shape == (5, 32)


def test_two_defences_that_decide_what_z_is_are_refused() -> None:
    stack = [defences.build("bottleneck", channels=6), defences.build("bottleneck", channels=3)]
    with pytest.raises(UserError, match="the stack has 2 of them, and each decides what z is; keep one"):
        Channel(stack).rebuild(model())


class Peek(Defence):
    """Sends what it knows of x."""

    reads_x = True

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z + x


def noise(sigma: float) -> Defence:
    return defences.build("gaussian", sigma=sigma)


def test_a_walk_sends_what_send_sends() -> None:
    z = torch.randn(5, 2, 4, 4)
    for stack in ([], [noise(0.3)], [Scale(2), noise(0.3), defences.build("dropout"), noise(0.4), Scale(3)]):
        channel = Channel(stack)
        sent, _ = channel.walk(z, z, torch.Generator().manual_seed(0))
        assert torch.equal(sent, channel.send(z, z, torch.Generator().manual_seed(0)))
        assert sent.data_ptr() != z.data_ptr()


def test_a_walk_finds_what_each_noise_is_added_to() -> None:
    z = torch.randn(3, 4)
    channel = Channel([Scale(2), noise(0.3), Scale(10), noise(0.4)])
    _, (first, second) = channel.walk(z, z, torch.Generator().manual_seed(0))
    torch.testing.assert_close(first.clean, z * 2 + 1)
    noisy = noise(0.3).send(z * 2 + 1, z, torch.Generator().manual_seed(0))
    torch.testing.assert_close(second.clean, noisy * 10 + 1)
    assert (first.sigma, second.sigma) == (0.3, 0.4)


@pytest.mark.parametrize("between", [[], ["bottleneck"], ["none"]], ids=str)
def test_noises_with_nothing_between_them_are_one(between: list[str]) -> None:
    z = torch.randn(3, 4)
    ((clean, sigma, _),) = Channel([noise(0.3), *map(defences.build, between), noise(0.4)]).walk(z, z)[1]
    assert clean is z
    assert sigma == pytest.approx(0.5)


def test_a_noise_that_clips_first_stands_for_itself_and_one_behind_it_joins() -> None:
    z = 100 * torch.randn(3, 4)
    private = defences.build("local_dp", bound=2.0)
    first, second = Channel([noise(0.3), private, noise(0.4)]).walk(z, z)[1]
    assert first == (z, 0.3, False)
    assert private.noise_std is not None
    step = private.noise_std / 4096  # each of the 4 entries is rounded towards 0 by less than this
    assert ((second.clean.norm(dim=1) <= 2.0) & (second.clean.norm(dim=1) > 2.0 - 2 * step)).all()
    assert second.sigma == pytest.approx((private.noise_std**2 + 0.4**2) ** 0.5)


def test_behind_a_look_at_x_no_earlier_noise_bounds_anything() -> None:
    z = torch.randn(3, 4)
    assert Channel([noise(0.3), Peek()]).walk(z, z)[1] == []
    ((clean, sigma, _),) = Channel([noise(0.3), Peek(), noise(0.4)]).walk(z, z, torch.Generator().manual_seed(0))[1]
    assert not torch.equal(clean, z)
    assert sigma == 0.4


@pytest.mark.parametrize(("stack", "first", "total"), [
    ([], None, None),
    ([defences.build("none"), defences.build("bottleneck")], None, None),
    ([defences.build("bottleneck"), noise(0.2)], 0.2, 0.2),
    ([noise(0.3), defences.build("quantise"), noise(0.4)], 0.3, 0.5),
    ([noise(0.3), Peek()], None, 0.3),
    ([noise(0.3), Peek(), noise(0.4)], 0.4, 0.5),
])  # fmt: skip
def test_sigma_is_that_of_the_first_noise_that_bounds_and_the_total_that_of_all(
    stack: list[Defence], first: float | None, total: float | None
) -> None:
    channel, z = Channel(stack), torch.randn(3, 4)
    assert (channel.noise_std, channel.total_noise_std) == (pytest.approx(first), pytest.approx(total))
    assert channel.noise_std == next((place.sigma for place in channel.walk(z, z)[1]), None)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6))
def test_noises_that_follow_each_other_are_one_wherever_their_sigma_is_asked_for(sigmas: list[float]) -> None:
    channel, z = Channel(map(noise, sigmas)), torch.zeros(1, 2)
    ((clean, sigma, _),) = channel.walk(z, z)[1]
    assert clean is z
    assert channel.noise_std == sigma == pytest.approx(math.hypot(*sigmas))
    assert channel.total_noise_std == pytest.approx(sigma)


def test_the_task_trains_all_parameters_but_the_proxies_whose_optimisers_come_in_the_order_of_the_stack() -> None:
    adversarial, vib, disco = map(defences.build, ("adversarial", "vib", "disco"))
    channel = Channel([adversarial, vib, disco])
    channel.rebuild(SplitModel(nn.Identity(), nn.Flatten(), (4, 8, 8), (3, 8, 8)))
    assert channel.optimizers() == [adversarial.proxy.optimizer, disco.proxy.optimizer]
    expected = [*vib.head.parameters(), *disco.score.parameters()]
    assert list(map(id, channel.task_parameters())) == list(map(id, expected))


def test_every_defence_reports_in_its_place() -> None:
    plain, private = Channel([noise(0.3), defences.build("local_dp")]).reports()
    assert plain == {}
    assert private["mechanism"] == "gaussian"


class Reckless(Defence):
    """Draws from torch's own generator, whatever it is given."""

    def send(self, z: Tensor, x: Tensor, generator: torch.Generator | None) -> Tensor:
        return z + torch.randn_like(z)


def test_in_service_a_generator_is_refused_in_one_line(served: Callable[..., Channel]) -> None:
    channel, z = served(noise(0.3)), torch.zeros(3, 4)
    assert channel.in_service
    for send in (channel.send, channel.walk):
        with pytest.raises(UserError, match=r"is in service and was given a generator.*send without one") as caught:
            send(z, z, torch.Generator())
        assert "\n" not in str(caught.value)
    assert not torch.equal(channel.send(z, z), channel.send(z, z))


def test_in_service_nothing_is_sent_of_a_defence_that_draws_from_torchs_own_generator(served: Callable[..., Channel]) -> None:
    z = torch.zeros(3, 4)
    Channel([Reckless()]).send(z, z)  # its own business
    channel = served(Reckless())
    for _ in range(2):  # a first refusal must not let the second release through
        with pytest.raises(UserError, match=r"draws by randn_like of torch in service.*draw by splitveil.noise"):
            channel.send(z, z)


def test_outside_of_service_noise_without_a_generator_does_not_follow_torchs_seed() -> None:
    channel, z, sent = Channel([noise(0.3)]), torch.zeros(3, 4), []
    for _ in range(2):
        torch.manual_seed(0)
        sent.append(channel.send(z, z))
    assert not torch.equal(*sent)


def test_a_bound_is_exact_only_where_all_of_its_noise_is_whole_numbers() -> None:
    z = torch.randn(3, 4)
    stepped = defences.build("gaussian", sigma=0.3, grid=True)
    assert [place.exact for place in Channel([stepped, defences.build("local_dp")]).walk(z, z)[1]] == [True, True]
    ((clean, sigma, exact),) = Channel([stepped, noise(0.4)]).walk(z, z)[1]
    assert (sigma, exact) == (pytest.approx(0.5), False)
    torch.testing.assert_close(clean, z, rtol=0, atol=0.3 / 4096)
    assert [place.exact for place in Channel([noise(0.4), stepped]).walk(z, z)[1]] == [False, True]
