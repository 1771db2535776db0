"""recall against an independent loop; what it must and must not see; and that nothing in it can be trained to look away."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cheating import CLASSES, DIM, OTHERS, SAMPLES, frozen, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.registry import UserError
from splitveil.surrogates import build
from splitveil.surrogates.recall import FLOOR, Recall, cells, errors, recalled, small_picture

IMAGE = 2, 8, 8
SIGMA = 0.2


def scene(seed: int, b: int, z_shape: tuple[int, ...], tells: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Features, labels of three classes and images: of what is in them, z tells a share and the rest is its own."""
    rng = np.random.default_rng(seed)
    d = int(np.prod(z_shape))
    common, own = rng.standard_normal((b, 4)), rng.standard_normal((b, 4))
    z = (tells * common + (1 - tells) * own) @ rng.standard_normal((4, d)) + 0.05 * rng.standard_normal((b, d)) + 5
    x = common @ rng.standard_normal((4, int(np.prod(IMAGE)))) / 5 + 0.5
    y = rng.integers(0, 3, b)
    return torch.from_numpy(z).view(b, *z_shape), torch.from_numpy(y), torch.from_numpy(x).view(b, *IMAGE)


def recall(z: Tensor, sigma: float = SIGMA, **options: Any) -> Recall:
    """For these features; without rate, unless it is asked for."""
    surrogate = build("recall", dim=z[0].numel(), classes=3, sigma=sigma, image=IMAGE, **({"rate": 0.0} | options)).to(z.dtype)
    assert isinstance(surrogate, Recall)
    return surrogate


def cell(array: Tensor, row: int, column: int, tokens: int) -> Tensor:
    """The part of a sample [c, h, w] in one of tokens x tokens cells."""
    if tokens == 1:
        return array.flatten()
    high, wide = array.shape[1] // tokens, array.shape[2] // tokens
    return array[:, row * high : (row + 1) * high, column * wide : (column + 1) * wide].flatten()


def answer_of_the_nearer(i: int, all_: list[int], f: dict[int, Tensor], t: dict[int, Tensor], asking: list[int],
                         sharpness: Sequence[Any], noise: float, heads: Sequence[Tensor]) -> Tensor:  # fmt: skip
    """x^_i by the mean of the attentions of `sharpness`, the last of which compare in the dimensions of `heads`."""
    others, answer = [j for j in all_ if j != i], torch.zeros_like(t[i])
    for s, P in zip(sharpness, [None] * (len(sharpness) - len(heads)) + [*heads]):
        P = torch.eye(len(f[i])).double() if P is None else P / P.square().sum(1).mean().sqrt()
        far = {(k, j): (P @ (f[k] - f[j])).square().sum() for k in asking for j in all_ if k != j}
        unit = torch.stack([*far.values()]).mean() + 2 * noise**2 * P.square().sum()
        for weight, j in zip(torch.stack([-s * far[i, j] / unit for j in others]).softmax(0), others):
            answer = answer + weight * t[j] / len(sharpness)
    return answer


def answer_of_ridge(i: int, all_: list[int], f: dict[int, Tensor], t: dict[int, Tensor], sigma: float) -> Tensor:
    """x^_i by the ridge regression from the z to the pictures of the others, whose penalty is n sigma^2."""
    rest = [j for j in all_ if j != i]
    a, b = torch.stack([f[j] for j in rest]), torch.stack([t[j] for j in rest])
    middle, centred = a.mean(0), a - a.mean(0)
    gram = centred.T @ centred + len(all_) * sigma**2 * torch.eye(len(middle)).double()
    return b.mean(0) + (f[i] - middle) @ torch.linalg.solve(gram, centred.T @ (b - b.mean(0)))


Scene = tuple[Tensor, Tensor, Tensor]


def looped(
    now: Scene, old: Scene | None, picture: int, tokens: int = 1, memory: str = "nearest", sharpness: Sequence[Any] = (2, 8, 32),
    noise: float = 0.0, sigma: float = SIGMA, heads: Sequence[Tensor] = (),
) -> Tensor:  # fmt: skip
    """The equation without the loss of rate, by loops over classes, cells and samples."""
    z, labels, x = (torch.cat(both) for both in zip(now, old)) if old else now
    side = IMAGE[1] // picture
    small = [image.view(IMAGE[0], picture, side, picture, side).mean((2, 4)) for image in x]
    loss = torch.zeros((), dtype=z.dtype)
    for c in range(3):
        all_ = [i for i in range(len(z)) if labels[i] == c]
        asking = [i for i in all_ if i < len(now[0])]
        if not asking or len(all_) < 2:
            continue
        errors, usual = [torch.zeros_like(loss) for _ in range(2)], torch.zeros_like(loss)
        for row in range(tokens):
            for column in range(tokens):
                f = {i: cell(z[i], row, column, tokens) for i in all_}
                t = {i: cell(small[i], row, column, tokens) for i in all_}
                for i in asking:
                    if memory != "linear":
                        found = answer_of_the_nearer(i, all_, f, t, asking, sharpness, noise, heads)
                        errors[0] = errors[0] + (t[i] - found).square().sum()
                    if memory != "nearest":
                        errors[1] = errors[1] + (t[i] - answer_of_ridge(i, all_, f, t, sigma)).square().sum()
                    usual = usual + (t[i] - torch.stack([t[j] for j in all_ if j != i]).mean(0)).square().sum()
        error = torch.stack({"nearest": errors[:1], "linear": errors[1:], "both": errors}[memory]).amin()
        value = -torch.log((error + FLOOR * usual) / ((1 + FLOOR) * usual))
        loss = loss + len(asking) / len(now[0]) * value.clamp_min(0)
    return loss


@pytest.mark.parametrize("memory", ["nearest", "linear", "both"])
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000), b=st.integers(2, 16), sharpness=st.lists(st.floats(0.5, 40), min_size=1, max_size=3),
    unit=st.sampled_from(["seen", "spread"]), picture=st.sampled_from([2, 4, 8]), tokens=st.sampled_from([1, 2]),
    banked=st.booleans(), sigma=st.floats(0.05, 2),
)  # fmt: skip
def test_the_loss_and_its_gradient_are_those_of_a_loop(
    memory: str, seed: int, b: int, sharpness: list[float], unit: str, picture: int, tokens: int, banked: bool, sigma: float
) -> None:
    now, old = scene(seed, b, (2, 4, 2)), scene(seed + 1, 20, (2, 4, 2)) if banked else None
    options = {"memory": memory, "sharpness": tuple(sharpness), "unit": unit, "picture": picture, "tokens": tokens}
    surrogate = recall(now[0], sigma, **options, bank=30 if banked else 0)
    if old is not None:
        surrogate.after_step(old[0], old[1], torch.tensor(True), old[2])
    z, again = (now[0].clone().requires_grad_() for _ in range(2))
    rest = picture, tokens, memory, sharpness, sigma if unit == "seen" else 0.0, sigma
    output, expected = surrogate(z, *now[1:]), looped((again, *now[1:]), old, *rest)
    # The error of a sample in ridge regression is divided by its share of the penalty, little at a small sigma: 5e-8 were seen.
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.loss_uniform, looped(now, None, *rest), rtol=1e-6, atol=1e-6)
    if expected > 1e-6:
        pulls = (torch.autograd.grad(loss, own)[0] for loss, own in ((output.loss, z), (expected, again)))
        torch.testing.assert_close(*pulls, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000), tokens=st.sampled_from([1, 2]), banked=st.booleans())
def test_learned_attentions_are_those_of_a_loop_and_climb_where_z_descends(seed: int, tokens: int, banked: bool) -> None:
    now, old = scene(seed, 14, (2, 4, 2)), scene(seed + 1, 20, (2, 4, 2)) if banked else None
    torch.manual_seed(seed)
    surrogate = recall(now[0], unit="seen", picture=4, tokens=tokens, heads=2, width=3, bank=30 if banked else 0)
    if old is not None:
        surrogate.after_step(old[0], old[1], torch.tensor(True), old[2])
    assert surrogate.heads is not None
    learned = [surrogate.heads.P, surrogate.heads.log_sharpness]
    z, again = (now[0].clone().requires_grad_() for _ in range(2))
    P, log_sharpness = (each.detach().clone().requires_grad_() for each in learned)
    told: dict[str, Any] = {"picture": 4, "tokens": tokens, "noise": SIGMA}
    expected, climb = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for c in range(3):  # one by one, as a class for which the learned ones recall less is measured without them
        own = now[1] == c
        if own.any():
            part = again[own], now[1][own], now[2][own]
            joined = looped(part, old, **told, sharpness=(2, 8, 32, *log_sharpness.exp()), heads=P)
            expected = expected + own.sum() / len(own) * torch.maximum(joined, looped(part, old, **told))
            climb = climb - own.sum() / len(own) * joined
    output = surrogate(z, *now[1:])
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=1e-9)
    pulls = torch.autograd.grad(output.loss, [z, *learned])
    goals = *torch.autograd.grad(expected, again, retain_graph=True), *torch.autograd.grad(climb, [P, log_sharpness])
    torch.testing.assert_close(pulls, goals, rtol=1e-5, atol=1e-8)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(6, 40), tells=st.floats(0, 1), sigma=st.floats(0.05, 2))
def test_both_memories_measure_each_class_by_the_one_that_recalls_more(seed: int, b: int, tells: float, sigma: float) -> None:
    z, y, x = scene(seed, b, (2, 4, 2), tells)
    options = {"dim": 16, "classes": 3, "sigma": sigma, "image": IMAGE, "rate": 0.0, "bank": 0}
    both, nearest, linear = (build("recall", memory=memory, **options).double() for memory in ("both", "nearest", "linear"))
    for c in range(3):
        own = y == c
        if own.any():
            alone = [surrogate(z[own], y[own], x[own]).loss.item() for surrogate in (both, nearest, linear)]
            assert alone[0] == pytest.approx(max(alone[1:]), abs=1e-12)
    losses = [surrogate(z, y, x).loss.item() for surrogate in (both, nearest, linear)]
    assert losses[0] >= max(losses[1:]) - 1e-9


@pytest.mark.parametrize(("sigma", "most"), [(1e-4, 0.05), (1e-2, 0.004)])
def test_the_linear_memory_has_its_digits_under_little_noise(sigma: float, most: float) -> None:
    """With weights in float32 all of the pictures' spread is left at sigma 1e-4, and 0.008 to 0.08 of it at 1e-2.

    At 1e-4 weights of both signs are large and pictures have seven digits: by CPU and seed 0.002 to 0.013 is left.
    """
    z, y, x = scene(0, 60, (40,))  # more dimensions than samples of a class
    exact = build("recall", dim=40, classes=3, sigma=sigma, image=IMAGE, rate=0.0, memory="linear", bank=0).double()
    narrow = build("recall", dim=40, classes=3, sigma=sigma, image=IMAGE, rate=0.0, memory="linear", bank=0)
    rows = z.float().requires_grad_()
    found = narrow(rows, y, x.float()).loss
    assert found.neg().exp().item() < most
    assert exact(rows.detach().double(), y, x.float().double()).loss.neg().exp().item() < most
    (pull,) = torch.autograd.grad(found, rows)
    assert torch.isfinite(pull).all()


def test_where_pictures_are_a_linear_map_of_z_the_linear_memory_recalls_more() -> None:
    z, y, x = scene(0, 240, (16,))
    assert recall(z, bank=0, memory="linear")(z, y, x).loss > 2 * recall(z, bank=0)(z, y, x).loss


def test_the_loss_of_rate_is_added_with_its_weight() -> None:
    z, y, x = scene(0, 40, (6,))
    alone, both = recall(z, bank=0)(z, y, x), recall(z, bank=0, rate=4.0)(z, y, x)
    rate = build("rate", dim=6, classes=3, sigma=SIGMA)(z, y)
    torch.testing.assert_close(both.loss, alone.loss + 4 * rate.loss)
    torch.testing.assert_close(both.diagnostics["bits"], rate.diagnostics["bits"])


VARIANTS: list[dict[str, Any]] = [
    {}, {"memory": "linear"}, {"memory": "both"}, {"unit": "seen"}, {"tokens": 2}, {"heads": 2, "width": 4},
    {"tokens": 2, "heads": 1},
]  # fmt: skip


@pytest.mark.parametrize("options", VARIANTS, ids=str)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_features_that_tell_nothing_beyond_the_class_have_next_to_no_loss_and_others_much(options: dict[str, Any], seed: int):
    z, y, x = scene(seed, 240, (2, 4, 2))
    surrogate = recall(z, bank=0, **options)
    other = x[torch.randperm(240, generator=torch.Generator().manual_seed(seed))]  # images that z was not made of
    # Eighty samples of a class with four directions each: what is recalled by chance is a few percent of their spread.
    assert surrogate(z, y, other).loss < 0.1
    assert surrogate(z, y, x).loss > 0.3
    assert surrogate(z, y, x.mean(0).expand_as(x)).loss == 0  # nothing to recall


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_more_z_tells_the_higher_the_loss(seed: int) -> None:
    losses = []
    for tells in (0.2, 0.5, 0.9):
        z, y, x = scene(seed, 240, (16,), tells)
        losses.append(recall(z, bank=0)(z, y, x).loss.item())
    assert losses[0] < losses[1] < losses[2]


def test_under_noise_a_narrow_z_is_told_apart_no_more_and_only_the_ratio_counts() -> None:
    z, y, x = scene(0, 120, (16,))
    seen, spread = recall(z, bank=0, unit="seen"), recall(z, bank=0)
    losses = [seen(z * scale, y, x).loss.item() for scale in (1, 0.1, 0.01, 0.001)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-3 * losses[0]
    assert spread(z * 0.001, y, x).loss.item() == pytest.approx(spread(z, y, x).loss.item(), rel=1e-6)
    louder = build("recall", dim=16, classes=3, sigma=3 * SIGMA, image=IMAGE, rate=0.0, bank=0, unit="seen").double()
    assert louder(3 * z, y, x).loss.item() == pytest.approx(losses[0], rel=1e-9)


def test_a_bank_of_the_past_recalls_more_than_the_batch_alone() -> None:
    z, y, x = scene(0, 400, (16,))
    surrogate = recall(z, bank=100)
    few = slice(0, 24)
    alone = surrogate(z[few], y[few], x[few]).loss
    surrogate.after_step(z[24:], y[24:], torch.tensor(True), x[24:])
    assert surrogate(z[few], y[few], x[few]).loss > 1.2 * alone
    assert surrogate(z[few], y[few], x[few]).loss_uniform == alone  # of this batch, whatever is remembered


def test_a_bank_keeps_features_and_small_pictures_and_nothing_of_a_skipped_step() -> None:
    z, y, x = scene(0, 12, (6,))
    surrogate = recall(z, bank=4, picture=2)
    assert surrogate.bank is not None
    surrogate.after_step(z, y, torch.tensor(False), x)
    assert not surrogate.bank.written.any()
    surrogate.after_step(z, y, torch.tensor(True), x)
    newest = int((y == y[-1]).sum() - 1) % 4
    row = surrogate.bank.rows[int(y[-1]) * 4 + newest]
    torch.testing.assert_close(row, torch.cat([z[-1], x[-1].view(2, 2, 4, 2, 4).mean((2, 4)).flatten()]))
    assert surrogate.bank.rows.shape == (3 * 4 + 1, 6 + 2 * 2 * 2)


@pytest.mark.parametrize(("classes", "size"), [(10, 102), (64, 16), (1000, 16)])
def test_a_bank_that_nobody_chose_holds_a_thousand_images(classes: int, size: int) -> None:
    surrogate = build("recall", dim=8, classes=classes, sigma=0.1, image=(3, 32, 32))
    assert surrogate.bank is not None
    assert surrogate.bank.size == size
    assert surrogate.bank.rows.shape[1] == 8 + 3 * 8 * 8


def test_a_bank_that_nobody_chose_never_has_more_than_half_a_gigabyte() -> None:
    with torch.device("meta"):
        huge = build("recall", dim=2**19, classes=100, sigma=0.1, batch=400, image=(3, 32, 32)).bank
    assert huge is not None
    assert huge.rows.numel() <= 2**27 + huge.rows.shape[1]


def test_far_from_zero_float32_still_has_its_digits() -> None:
    z, y, x = scene(0, 60, (16,))
    far = (z + 1000).float()  # of which only the last digits differ
    exact = recall(z, bank=0)(far.double(), y, x).loss.item()
    assert recall(far, bank=0)(far, y, x.float()).loss.item() == pytest.approx(exact, rel=1e-3)


def test_a_perfect_memory_is_pulled_apart_with_a_finite_gradient() -> None:
    z, y, x = scene(0, 30, (16,))
    twice = torch.cat([z, z]).requires_grad_()
    output = recall(z, bank=0, sharpness=(1e6,))(twice, torch.cat([y, y]), torch.cat([x, x]))
    assert output.loss.item() == pytest.approx(-np.log(FLOOR / (1 + FLOOR)), rel=0.01)
    (pull,) = torch.autograd.grad(output.loss, twice)
    assert torch.isfinite(pull).all()


def test_who_has_no_company_is_counted_and_not_pulled() -> None:
    z, _, x = scene(0, 9, (16,))
    y = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1])
    z.requires_grad_()
    output = recall(z, bank=0)(z, y, x)
    (pull,) = torch.autograd.grad(output.loss, z)
    assert output.loss > 0
    assert output.diagnostics["skipped_classes"] == 1
    assert pull[:8].any(1).all()
    assert not pull[8:].any()


def test_errors_and_pictures_by_hand() -> None:
    assert recalled(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([2.0, 1.0, 0.0])).tolist() == pytest.approx([
        -np.log((1 + 2 * FLOOR) / (2 + 2 * FLOOR)), 0, 0,
    ])  # fmt: skip
    image = torch.arange(16.0).view(1, 1, 4, 4)
    assert small_picture(image, (2, 2)).tolist() == [[2.5, 4.5, 10.5, 12.5]]
    assert cells(image.view(1, 1, 16), (1, 4, 4), 2).tolist() == [
        [[0, 1, 4, 5]], [[2, 3, 6, 7]], [[8, 9, 12, 13]], [[10, 11, 14, 15]],
    ]  # fmt: skip


def images_seen(z: Tensor) -> Tensor:
    """Images that the first eight dimensions of z tell."""
    return torch.sigmoid(z[:, :8]).view(-1, 2, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)


CHEATS: list[dict[str, Any]] = [
    {}, {"unit": "seen"}, {"heads": 2, "width": 8}, {"heads": 2, "width": 8, "tokens": 2},
    {"heads": 1, "width": 8, "rate": 0.0}, {"memory": "linear"}, {"memory": "both", "heads": 1},
]  # fmt: skip


def frozen_scene(tails: str, options: dict[str, Any]) -> tuple[Recall, Tensor, Tensor, Tensor]:
    z, y = frozen(tails)
    torch.manual_seed(0)
    surrogate = build("recall", dim=DIM, classes=CLASSES, sigma=0.1, image=IMAGE, bank=0, **options)
    assert isinstance(surrogate, Recall)
    return surrogate, z.view(-1, 2, 4, 4), y, images_seen(z)


def assert_nothing_is_hidden(surrogate: Recall, z: Tensor, y: Tensor, x: Tensor, **how: Any) -> None:
    before, after = trained(surrogate, z, y, x=x, **how)
    assert before.loss_uniform > 0.05
    assert after.loss >= before.loss * (1 - 1e-3)  # trained to recall, it recalls no less
    assert after.loss >= after.loss_uniform * (1 - 1e-6)  # and never less than a memory without parameters
    assert torch.equal(after.loss_uniform, before.loss_uniform)


@pytest.mark.parametrize("tails", ["gaussian", "heavy", "low_rank"])
@pytest.mark.parametrize("options", CHEATS, ids=str)
def test_its_parameters_cannot_hide_what_z_tells(options: dict[str, Any], tails: str) -> None:
    assert_nothing_is_hidden(*frozen_scene(tails, options), lr=1e-2, steps=40)


@pytest.mark.parametrize(("by", "lr", "steps"), [(by, lr, min(steps, 60)) for by, lr, steps in OTHERS])
def test_nor_with_other_optimisers(by: type[torch.optim.Optimizer], lr: float, steps: int) -> None:
    assert_nothing_is_hidden(*frozen_scene("gaussian", {"heads": 2, "width": 8}), lr=lr, steps=steps, by=by)


@pytest.mark.parametrize(("scale", "log_sharpness"), [(1e25, 200.0), (1e-25, -200.0), (1.0, 1e30)])
def test_heads_that_an_optimiser_threw_far_away_break_nothing(scale: float, log_sharpness: float) -> None:
    recall, z, y, x = frozen_scene("gaussian", {"heads": 2, "width": 8})
    assert recall.heads is not None
    with torch.no_grad():
        recall.heads.P.mul_(scale)
        recall.heads.log_sharpness.fill_(log_sharpness)
    z = z.detach().requires_grad_()
    output = recall(z, y, x)
    output.loss.backward()
    assert output.loss >= output.loss_uniform * (1 - 1e-6)
    for value in (z.grad, *(parameter.grad for parameter in recall.heads.parameters())):
        assert value is not None
        assert torch.isfinite(value).all()


@pytest.mark.slow
def test_nor_in_three_thousand_steps() -> None:
    assert_nothing_is_hidden(*frozen_scene("heavy", {"heads": 2, "width": 8}), lr=1e-3, steps=3000)


def test_heads_trained_by_the_edges_descent_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same test fails for a memory that learns to lower the loss, so that it can tell right from wrong."""

    def cooperative(self: Recall, plain: Tensor, found: Tensor, memory: Any) -> Tensor:
        assert self.heads is not None
        answers = memory.answers(self.heads(memory.z, memory.company, self.hidden_by))
        return recalled(*errors(answers.unsqueeze(0), memory))[0, :, 0]

    monkeypatch.setattr(Recall, "with_heads", cooperative)
    before, after = trained(*frozen_scene("gaussian", {"heads": 2, "width": 8, "rate": 0.0})[:3], 1e-2, 40,
                            x=frozen_scene("gaussian", {})[3])  # fmt: skip
    assert after.loss < 0.8 * before.loss


def test_a_trained_head_finds_what_distances_in_all_of_z_do_not() -> None:
    """Two of 64 dimensions tell about the image; an attention that has learned which recalls far more."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(CLASSES * SAMPLES, 64, generator=generator)
    y = torch.arange(len(z)) % CLASSES
    x = torch.sigmoid(2 * z[:, :2]).view(-1, 2, 1, 1).expand(-1, *IMAGE)
    torch.manual_seed(0)
    surrogate = build("recall", dim=64, classes=CLASSES, sigma=0.1, image=IMAGE, bank=0, rate=0.0, heads=2, width=8)
    before, after = trained(surrogate, z, y, 1e-2, steps=100, x=x)
    assert after.loss > before.loss + 0.1


@pytest.mark.parametrize(
    ("options", "said"),
    [({"sharpness": ()}, "sharpness is empty"), ({"tokens": 3}, "8 x 8 cannot be cut into tokens=3"),
     ({"rate": -1.0}, "rate is -1"), ({"unit": "sen"}, "must be one of 'spread', 'seen'")], ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build("recall", dim=4, classes=2, sigma=0.1, image=IMAGE, **options)


def test_images_that_z_was_not_made_of_are_refused() -> None:
    z, y, x = scene(0, 12, (16,))
    surrogate = recall(z)
    with pytest.raises(UserError, match=r"surrogate 'recall': x is a ndarray, must be a tensor of images"):
        surrogate(z, y, x.numpy())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"x is \[1, 3, 3\], it was built with image=\(.*\); give both alike"):
        surrogate(z, y, torch.zeros(12, 1, 3, 3))
    with pytest.raises(UserError, match="x has 5 images, z is of 12; pass the images that z was made of"):
        surrogate(z, y, x[:5])
    with pytest.raises(UserError, match=r"image is \(32, 32\), must be three numbers, channels first, such as \(3, 32, 32\)"):
        build("recall", dim=4, classes=2, sigma=0.1, image=(32, 32))


def test_tokens_need_features_with_places() -> None:
    z, y, x = scene(0, 12, (16,))
    with pytest.raises(UserError, match=r"tokens=2 needs z of shape \[c, h, w\] .* this cut has \[16\]; set tokens=1"):
        recall(z, tokens=2)(z, y, x)
