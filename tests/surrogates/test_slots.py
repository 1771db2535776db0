import copy
from typing import Any

import numpy as np
import pytest
import torch
from cheating import CLASSES, DIM, OTHERS, SAMPLES, frozen, mixture, trained
from sklearn.cluster import KMeans
from torch import Tensor

from splitveil.cem import CEM
from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.shared.groups import weighted_moments
from splitveil.surrogates.slots import Slots, within_slots
from splitveil.surrogates.slots_as_written import SlotsAsWritten


def slots(z: Tensor, y: Tensor, classes: int, seed: int = 0, **options: Any) -> Slots:
    torch.manual_seed(seed)
    options = {"capacity": len(z), "bank": 0, "offset": 0.01} | options
    surrogate = build("slots", dim=z.shape[1], classes=classes, sigma=0.1, **options).to(z.dtype)
    assert isinstance(surrogate, Slots)
    if surrogate.refresh_every:
        surrogate.refresh(z, y)
    return surrogate


def loss_of(x: Tensor, r: Tensor) -> Tensor:
    """The equation of the loss for samples [m, d] and shares [m, s], one class, with numpy's order of thought."""
    d, mass = x.shape[1], r.sum(0)
    inside, freedom = torch.zeros(d, dtype=x.dtype), torch.zeros(())
    for s in range(r.shape[1]):
        if mass[s] > 0:
            mean = (r[:, s, None] * x).sum(0) / mass[s]
            inside = inside + (r[:, s, None] * (x - mean) ** 2).sum(0)
            freedom = freedom + mass[s] * (1 - (r[:, s] / mass[s]).square().sum())
    share = mass[mass > 0] / len(x)
    hinge = torch.log((inside / freedom + 0.01) / (0.125 * 0.1**2 + 0.01)).clamp_min(0).mean()
    return hinge - 2 / d * (share * share.log()).sum()


def test_the_loss_is_that_of_a_loop_over_classes_and_slots() -> None:
    z, y = frozen("gaussian")
    z, y = z.double(), y.flip(0) % 2  # unequal classes
    surrogate = slots(z, y, 2)
    groups = surrogate.grouped(z, y)
    r, _, _ = surrogate.shares(groups)
    expected = torch.zeros(())
    for c in range(2):
        m = int(groups.count[c])
        assert torch.equal(groups.x[c, :m], z[y == c])
        torch.testing.assert_close(r[c, :m].sum(1), torch.ones(m).double())  # mass is conserved
        v = z[y == c].var(0, unbiased=False)
        biased, unbiased = (torch.log((v * f + 0.01) / (0.125 * 0.1**2 + 0.01)).clamp_min(0).mean() for f in (1, m / (m - 1)))
        found = loss_of(z[y == c], r[c, :m])
        expected = expected + m / len(z) * (found if found <= unbiased else biased)
    torch.testing.assert_close(surrogate(z, y).loss, expected)


def shares_of(surrogate: Slots, rows: list[Tensor], centres: Tensor, weight: Tensor, variance: Tensor) -> Tensor:
    """r [m, s] of the samples of one class by the equations, sample by sample and slot by slot."""
    attention, cross, living = surrogate.attention, surrogate.cross, [s for s in range(len(weight)) if weight[s] > 0]
    middle = sum(weight[s] * centres[s] for s in living)
    scale = sum(weight[s] * (variance[s] + (centres[s] - middle).square().mean()) for s in living) ** -0.5  # type: ignore[operator]
    x = [surrogate.project @ ((row - middle) * scale) for row in rows]
    slots_ = [surrogate.project @ ((centres[s] - middle) * scale) for s in living]
    W, beta, h = attention.to_k.weight, attention.log_beta.exp(), len(surrogate.project)

    def belongs(points: list[Tensor], power: float) -> Tensor:
        apart = [[(W @ (point - slot)).square().sum() / (2 * h**0.5) for slot in slots_] for point in points]
        return torch.stack([(-power * beta * torch.stack(row)).softmax(0) for row in apart])

    for i in range(attention.rounds):
        slots_ = [slot.detach() if i > 0 else slot for slot in slots_]  # the gradient goes through the last round alone
        r, new = belongs(x, 1), []
        for s, slot in enumerate(slots_):
            u = attention.to_v.weight @ sum(r[i, s] * x[i] for i in range(len(x))) / r[:, s].sum()
            gru = attention.gru(u[None], slot[None])[0]
            new.append(u + torch.tanh(attention.alpha) * (gru + attention.mlp(attention.norm(gru)) - u))
        slots_ = new
    keys, values = zip(*(cross.to_kv(cross.norm_slots(slot)).chunk(2) for slot in slots_))
    after = []
    for point in x:
        q, parts = cross.to_q(cross.norm(point)).chunk(cross.heads), []
        for head in range(cross.heads):
            k, v = ([each.chunk(cross.heads)[head] for each in both] for both in (keys, values))
            weights = torch.stack([q[head] @ each / len(each) ** 0.5 for each in k]).softmax(0)
            parts.append(sum(w * each for w, each in zip(weights, v)))
        y = point + torch.tanh(cross.alpha_attention) * (cross.out.weight @ torch.cat(parts))
        after.append(y + torch.tanh(cross.alpha_ffn) * cross.ffn(y))
    return belongs(after, surrogate.config.slot_power)


def tokens_of_a_class(maps: Tensor, cells: int) -> list[Tensor]:
    """The cells of samples [m, c, h, w] less the mean of the class at each place; whole samples, as they are, if there is one."""
    if cells == 1:
        return list(maps.flatten(1))
    apart, high, wide = maps - maps.mean(0), maps.shape[2] // cells, maps.shape[3] // cells
    places = [(i, row, column) for i in range(len(maps)) for row in range(cells) for column in range(cells)]
    return [apart[i, :, r * high : (r + 1) * high, k * wide : (k + 1) * wide].flatten() for i, r, k in places]


@pytest.mark.parametrize(("cells", "options"), [(1, {}), (1, {"slot_dim": 4, "rounds": 1}), (2, {}), (4, {"slot_power": 1.0})])
@pytest.mark.parametrize("seed", range(3))
def test_shares_loss_and_gradients_are_those_of_a_loop_over_classes_samples_and_slots(
    cells: int, options: dict[str, Any], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 2, (26, 2, 1, 1), generator=generator)
    z = (4 * kind + torch.randn(26, 2, 4, 4, generator=generator)).double()
    y = (torch.arange(26) > 11).long()  # unequal classes
    surrogate = slots(z.flatten(1), y, 2, seed, slots=3, heads=2, tokens=cells, z_shape=(2, 4, 4), **options)
    with torch.no_grad():
        for parameter in surrogate.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).double())
        surrogate.weight[1] = torch.tensor([0.6, 0.0, 0.4])  # a slot that does not exist
    z.requires_grad_()
    expected, fits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for c in range(2):
        rows = tokens_of_a_class(z[y == c], cells)
        stored = surrogate.centre[c], surrogate.weight[c], surrogate.variance[c]
        r = shares_of(surrogate, [row.detach() for row in rows], *stored)
        x, share = torch.stack(rows), len(z[y == c]) / len(z)
        m, v = len(x), x.var(0, unbiased=False)
        biased, unbiased = (torch.log((v * f + 0.01) / (0.125 * 0.1**2 + 0.01)).clamp_min(0).mean() for f in (1, m / (m - 1)))
        found = loss_of(x, r.detach())
        one_has_all = (r.sum(0) > 0.01 * m).sum() < 2
        expected = expected + share * (found if found <= unbiased and not one_has_all else biased)
        fits = fits + share * loss_of(x.detach(), r)
    output = surrogate(z, y)
    torch.testing.assert_close(output.loss, expected)
    learned = list(surrogate.parameters())
    pulls = torch.autograd.grad(output.loss, [z, *learned])
    goals = *torch.autograd.grad(expected, z), *torch.autograd.grad(fits, learned)  # attention learns where equal weights win too
    torch.testing.assert_close(pulls, goals, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 8.0])
@pytest.mark.parametrize("seed", range(5))
def test_slots_find_the_variance_inside_four_modes_and_stay_alive(seed: int, offset: float) -> None:
    z, inside = mixture(seed)
    z, y = (
        z + offset * torch.randn(64, generator=torch.Generator().manual_seed(99)),
        torch.zeros(len(z), dtype=torch.long),
    )
    surrogate = slots(z, y, 1, seed)
    before, after = trained(surrogate, z, y, 1e-3, steps=100)
    assert before.diagnostics["slots_alive"] >= 6
    assert after.diagnostics["slots_alive"] >= 4
    for output in (before, after):
        assert output.diagnostics["variance"].item() == pytest.approx(inside, rel=0.05)
        assert output.diagnostics["attention_entropy"] < 0.98
        assert output.diagnostics["slot_information"] > 0.9 * np.log(4)
        assert output.diagnostics["collapsed"] == output.diagnostics["fallback"] == 0
        assert output.loss < output.loss_uniform
    still = [name for name, parameter in surrogate.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert still == []  # every part of the attention is trained


def best_hard_partition(x: Tensor, start: np.ndarray, surrogate: Slots) -> float:
    """Single moves of a sample to another slot, as long as one lowers the loss."""
    m, s = len(x), surrogate.config.slots
    own = torch.as_tensor(start, dtype=torch.long)

    def losses(owners: Tensor) -> Tensor:  # [k, m] -> [k]
        r = torch.nn.functional.one_hot(owners, s).to(x.dtype)
        spread = within_slots(x.expand(len(r), *x.shape), torch.ones_like(r[..., 0]), r)
        return surrogate.hinge(spread.variance).mean(1) + 2 / x.shape[1] * spread.entropy

    best = losses(own.unsqueeze(0))[0]
    improved = True
    while improved:
        improved = False
        for i in range(m):
            moved = own.repeat(s, 1)
            moved[:, i] = torch.arange(s)
            values = losses(moved)
            if values.min() < best - 1e-9:
                best, own, improved = values.min(), moved[values.argmin()], True
    assert best.item() == pytest.approx(loss_of(x, torch.nn.functional.one_hot(own, s).to(x.dtype)).item(), rel=1e-4)
    return best.item()


CHEATS = [(torch.optim.Adam, lr, 200, tails) for tails in ("gaussian", "heavy") for lr in (1e-3, 1e-2)]
MORE_CHEATS = [
    (torch.optim.Adam, 1e-2, 200, "low_rank"),
    *((*by, tails) for by in OTHERS for tails in ("gaussian", "heavy", "low_rank")),
]


@pytest.mark.parametrize(
    ("by", "lr", "steps", "tails"), [*CHEATS, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE_CHEATS)]
)
def test_slots_cannot_cheat(by: type[torch.optim.Optimizer], lr: float, steps: int, tails: str) -> None:
    x = frozen(tails)[0][::CLASSES]
    y = torch.zeros(SAMPLES, dtype=torch.long)
    surrogate = slots(x, y, 1)
    before, after = trained(surrogate, x, y, lr, steps, by)
    assert before.loss_uniform >= 0.5
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    with torch.no_grad():
        r, _, _ = surrogate.shares(surrogate.grouped(x, y))
        mass, _, variance = weighted_moments(x.unsqueeze(0), r)
        inside = (mass / SAMPLES * variance.mean(2)).sum().item()
        # On data without clusters, trained slots find partitions that 2,000 starts of k-means do not. So it starts there too.
        rows, own = x.double().numpy(), r[0].argmax(1).numpy()
        k = surrogate.config.slots
        centres = np.stack([rows[own == s].mean(0) if (own == s).any() else rows[s] for s in range(k)])
        tries = [KMeans(k, n_init=20, random_state=0), KMeans(k, init=centres, n_init=1)]
        best = min((each.fit(rows) for each in tries), key=lambda each: each.inertia_)
        assert inside >= 0.99 * best.inertia_ / (SAMPLES * DIM)
        assert inside >= 0.95 * tries[0].inertia_ / (SAMPLES * DIM)
        singles = np.minimum(np.random.default_rng(0).permutation(SAMPLES), k - 1)
        bound = min(best_hard_partition(x, start, surrogate) for start in (best.labels_, singles))
    assert after.loss >= 0.95 * bound


@pytest.mark.parametrize(
    ("by", "lr", "steps"), [(torch.optim.Adam, 1e-2, 40), *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)]
)
def test_nor_can_slots_over_tokens_on_data_without_modes(by: type[torch.optim.Optimizer], lr: float, steps: int) -> None:
    """A finer mixture of one Gaussian gains in spread what it pays in which slot a token is in."""
    x, y = frozen("gaussian")[0][::CLASSES], torch.zeros(SAMPLES, dtype=torch.long)
    surrogate = slots(x, y, 1, bank=0, tokens="positions", z_shape=(2, 4, 4))
    before, after = trained(surrogate, x, y, lr, steps, by)
    assert before.loss_uniform >= 0.5
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    assert after.loss >= 0.95 * before.loss_uniform


def test_slots_over_tokens_find_kinds_of_tokens_that_no_two_samples_share_in_all_positions() -> None:
    """Every position is one of four kinds, drawn anew for each sample: 4^16 kinds of samples, but four of tokens."""
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 4, (SAMPLES, 16), generator=generator)
    centre = 3 * torch.tensor([[1.0, 1], [-1, 1], [1, -1], [-1, -1]])
    x = (centre[kind] + 0.3 * torch.randn(SAMPLES, 16, 2, generator=generator)).mT.flatten(1)
    y = torch.zeros(SAMPLES, dtype=torch.long)
    whole, tokens = slots(x, y, 1, bank=0), slots(x, y, 1, bank=0, tokens="positions", z_shape=(2, 4, 4), slots=4)
    _, said = trained(tokens, x, y, 1e-2, steps=100)
    assert said.diagnostics["fallback"] == 0
    assert said.loss < 0.9 * said.loss_uniform
    assert said.diagnostics["variance"].item() < 1  # 0.09 within a kind, and 9 / 64 by how often a position was of each kind
    assert whole(x, y).diagnostics["variance"].item() > 5


def test_where_equal_weights_win_the_attention_still_learns_and_fallback_says_so() -> None:
    """Data without modes: eight slots cost more than one. The attention got no gradient at all, and fallback was 0."""
    z, y = frozen("gaussian")[0][::CLASSES], torch.zeros(SAMPLES, dtype=torch.long)
    surrogate = slots(z, y, 1)
    z.requires_grad_()
    output = surrogate(z, y)
    assert torch.equal(output.loss, output.loss_uniform)
    assert output.diagnostics["fallback"] == 1
    output.loss.backward()
    assert z.grad is not None
    (expected,) = torch.autograd.grad(build("uniform", dim=DIM, classes=1, sigma=0.1, offset=0.01)(z, y).loss, z)
    torch.testing.assert_close(z.grad, expected)  # z feels equal weights and nothing of the attention
    assert sum(parameter.grad is not None and bool(parameter.grad.any()) for parameter in surrogate.parameters()) > 5


def test_slots_and_equal_weights_are_compared_by_variances_of_one_kind() -> None:
    """With a single slot the two are the same spread. Divided by m - 1 and by m, equal weights always won."""
    z, y = frozen("gaussian")[0][::CLASSES], torch.zeros(SAMPLES, dtype=torch.long)
    assert slots(z, y, 1, slots=1)(z, y).diagnostics["fallback"] == 0
    assert slots(z, y, 1, slots=1, equal_weights="biased")(z, y).diagnostics["fallback"] == 1


@pytest.mark.parametrize("seed", range(3))
def test_on_low_rank_data_training_helps(seed: int) -> None:
    z, y = frozen("low_rank", seed)[0][::CLASSES], torch.zeros(SAMPLES, dtype=torch.long)
    before, after = trained(slots(z, y, 1), z, y, 1e-3, steps=200)
    assert after.loss < before.loss


@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
def test_as_written_the_gates_close_and_the_alarm_says_so(tails: str) -> None:
    z, y = frozen(tails)[0][::CLASSES], torch.zeros(SAMPLES, dtype=torch.long)
    surrogate = slots(z, y, 1, preset="as_written", print_every=0)
    surrogate.calls.fill_(100)
    before, after = trained(surrogate, z, y, 1e-2, steps=100)
    assert before.loss > 0
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    assert after.loss < 0.05 * before.loss_uniform
    assert after.diagnostics["collapsed"] == 1


def test_as_written_it_is_off_for_a_hundred_calls_and_prints_every_two_hundred_inside_an_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    z, y = frozen("gaussian")
    cem = CEM(slots(z, y, CLASSES, preset="as_written"), warmup=0, lr=1e-5)
    cem.schedule(0, 1e-3)
    z.requires_grad_()
    for _ in range(199):
        cem.backward(z.sum() * 0, z, y)
    assert "slots:" not in capsys.readouterr().err
    for _ in range(2):
        cem.backward(z.sum() * 0, z, y)
    cem.surrogate.tell()  # at the end of an epoch: nothing new
    assert 100 <= cem.inactive < 110  # a zero that is still part of the graph
    assert cem.skipped == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("slots:")]
    assert len(lines) == 1
    assert "gate_mean" in lines[0]


def test_slots_that_wait_for_centres_are_off_until_a_refresh() -> None:
    z, y = frozen("gaussian")
    options: dict[str, Any] = {"preset": "as_written", "shutoff": 0, "gates": "off", "wait_for_centres": True}
    surrogate = build("slots", dim=DIM, classes=CLASSES, sigma=0.1, **options)
    assert surrogate.refresh_every == 1
    output = surrogate(z, y)
    assert output.loss == 0
    assert output.diagnostics["fallback"] == 1
    surrogate.refresh(z, y)
    assert surrogate(z, y).loss > 0


@pytest.mark.parametrize("ffn", [2, 4])
def test_the_feed_forward_part_has_the_width_that_is_asked_for(ffn: int) -> None:
    surrogate: Any = build("slots", dim=16, classes=2, sigma=0.1, ffn=ffn)
    assert surrogate.cross.ffn[1].weight.shape == (ffn * 16, 16)


def test_only_an_option_of_the_comparison_brings_in_its_class_and_both_can_be_copied() -> None:
    plain: list[dict[str, Any]] = [{}, {"slots": 3, "bank": 0, "gates": "off"}]
    compared: list[dict[str, Any]] = [{"preset": "as_written"}, {"margin": "softplus"}, {"print_every": 5}]
    for options in plain + compared:
        surrogate = build("slots", dim=4, classes=2, sigma=0.1, **options)
        assert type(surrogate) is type(copy.deepcopy(surrogate)) is (Slots if options in plain else SlotsAsWritten)


def test_the_class_of_the_comparison_measures_as_slots_does_where_nothing_is_compared() -> None:
    z, y = frozen("gaussian")
    plain, told = slots(z, y, CLASSES)(z, y), slots(z, y, CLASSES, print_every=1)(z, y)
    torch.testing.assert_close(told, plain, rtol=1e-6, atol=1e-6)


def test_before_the_first_refresh_it_falls_back_to_equal_weights_and_says_so() -> None:
    z, y = frozen("gaussian")
    surrogate = build("slots", dim=DIM, classes=CLASSES, sigma=0.1)
    output = surrogate(z, y)
    assert output.diagnostics["fallback"] == 1
    # With a bank the two are summed in another order: float32's own error over 64 samples and 32 dimensions.
    torch.testing.assert_close(output.loss, output.loss_uniform, rtol=1e-5, atol=0)


def test_with_fewer_than_two_samples_a_slot_it_falls_back_until_the_bank_is_filled() -> None:
    z, y = frozen("gaussian")
    z = z + 5 * torch.randn(4, DIM)[torch.arange(len(z)) % 4]  # modes, or equal weights would cost less
    torch.manual_seed(0)
    surrogate = build("slots", dim=DIM, classes=CLASSES, sigma=0.1)  # remembers 32 of each class
    surrogate.refresh(z, y)
    few, labels = z[:18], y[:18]
    assert surrogate(few, labels).diagnostics["fallback"] == 1
    surrogate.after_step(z, y, torch.tensor(True))
    output = surrogate(few, labels)
    assert output.diagnostics["fallback"] == 0
    assert output.loss != output.loss_uniform


@pytest.mark.parametrize("tails", ["gaussian", "heavy"])
@pytest.mark.parametrize("options", [{"gates": "adversarial"}, {"margin": "softplus"}], ids=str)
def test_neither_adversarial_gates_nor_a_soft_margin_hide_spread(options: dict[str, Any], tails: str) -> None:
    z, y = frozen(tails)[0][::CLASSES], torch.zeros(SAMPLES, dtype=torch.long)
    plain = trained(slots(z, y, 1), z, y, 1e-2, steps=100)[1].loss
    before, after = trained(slots(z, y, 1, **options), z, y, 1e-2, steps=100)
    assert torch.equal(after.loss_uniform, before.loss_uniform)
    assert after.loss >= 0.99 * plain
    assert after.diagnostics["gate_mean"].item() == pytest.approx(1, abs=1e-4)


def test_gates_that_are_free_to_close_are_replaced_by_equal_weights() -> None:
    z, y = frozen("gaussian")[0][::CLASSES], torch.zeros(SAMPLES, dtype=torch.long)
    _, after = trained(slots(z, y, 1, gates="cooperative"), z, y, 1e-2, steps=100)
    assert after.diagnostics["collapsed"] == after.diagnostics["fallback"] == 1
    assert torch.equal(after.loss, after.loss_uniform)


def test_the_pull_is_that_on_the_spread_and_a_flat_sample_does_not_take_it_all() -> None:
    """Through a LayerNorm in the attention, a sample of equal numbers would get nearly the whole gradient."""
    z, y = frozen("gaussian")
    z[0] = 0.0
    surrogate = slots(z, y, CLASSES)
    z.requires_grad_()
    (pull,) = torch.autograd.grad(surrogate(z, y).loss, z)
    assert pull[0].norm() < 3 * pull.norm(dim=1).median()


def test_below_tau_it_is_off() -> None:
    z, y = frozen("gaussian")
    z = (0.01 * z).requires_grad_()
    output = slots(z.detach(), y, CLASSES)(z, y)
    assert output.loss == output.loss_uniform == 0
    assert not torch.autograd.grad(output.loss, z)[0].any()


def test_as_written_without_gates_is_not_switched_off() -> None:
    z, y = frozen("gaussian")
    output = slots(z, y, CLASSES, preset="as_written", gates="off", shutoff=0)(z, y)
    assert output.loss > 0
    assert output.diagnostics["fallback"] == 0


def test_features_wider_than_the_slots_are_projected_for_the_attention_only() -> None:
    z, _ = mixture(0, samples=128, dim=300)
    y = torch.zeros(128, dtype=torch.long)
    surrogate = slots(z, y, 1)
    assert surrogate.project.shape == (128, 300)
    assert surrogate(z, y).diagnostics["variance"].item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 0},
        {"rounds": 0},
        {"slot_power": 0.0},
        {"refresh": 0},
        {"bank": -1},
        {"slot_dim": 0},
        {"mass_power": 2.0},
        {"gates": "offf"},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        build("slots", dim=4, classes=2, sigma=0.1, **options)


def test_a_slot_without_a_centre_has_no_share_at_all_and_all_are_equal_where_none_has_one() -> None:
    z, y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 2
    surrogate = build("slots", dim=4, classes=2, sigma=0.1, slots=3, bank=0)
    assert isinstance(surrogate, Slots)
    surrogate.weight[0], surrogate.centre[0] = torch.tensor([0.5, 0.0, 0.5]), torch.randn(3, 4)
    groups = surrogate.grouped(z, y)
    r = surrogate.shares(groups)[0]
    assert (r[0, :, 1] == 0).all()
    torch.testing.assert_close(r[0].sum(1), groups.mask[0])
    torch.testing.assert_close(r[1], groups.mask[1].unsqueeze(1).expand(-1, 3) / 3)
