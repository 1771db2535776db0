import copy
from typing import Any

import pytest
import safetensors.torch
import torch
from cheating import CLASSES, DIM, frozen, trained
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from splitveil.cem import CEM
from splitveil.registry import UserError
from splitveil.surrogates import Surrogate, build
from splitveil.surrogates.shared.attention_entropy import (
    PATIENCE,
    Alarm,
    AttentionConfig,
    AttentionGuard,
    Heads,
    seen_of,
    usage_of,
)
from splitveil.surrogates.shared.spectral import Spectral, fold, reparametrised

YES, NO = torch.tensor(True), torch.tensor(False)
COOPERATIVE = {"gate_objective": "cooperative", "ess_floor": 0.0}
EVERY: list[tuple[str, dict[str, Any]]] = [
    ("gated", {}), ("gated", COOPERATIVE), ("gated", {"bank": 6}), ("gated", {"preset": "as_written"}),
    ("slots", {}), ("slots", {"preset": "as_written", "print_every": 0}),
]  # fmt: skip
every = pytest.mark.parametrize(("name", "options"), EVERY, ids=str)


def made(name: str, seed: int = 0, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """A surrogate for the z and y of the cheating tests, refreshed with them."""
    z, y = frozen("gaussian", seed)
    torch.manual_seed(seed)
    surrogate = build(name, dim=DIM, classes=CLASSES, sigma=0.1, **options)
    if surrogate.refresh_every:
        surrogate.refresh(z, y)
    return surrogate, z, y


def steps(surrogate: Surrogate, z: Tensor, y: Tensor, many: int, lr: float = 1e-3) -> list[Tensor]:
    """The gradients that z gets in so many steps of CEM."""
    cem = CEM(surrogate, warmup=0, lr=lr)
    cem.schedule(0, 1e-3)
    pulls = []
    for _ in range(many):
        own = z.clone().requires_grad_()
        cem.backward(own.sum() * 0, own, y)
        assert own.grad is not None
        pulls.append(own.grad)
    return pulls


@every
def test_a_monitor_changes_no_bit_of_a_training(name: str, options: dict[str, Any]) -> None:
    found = []
    for more in ({}, {"monitor": True}, {"spectral": "stats"}):
        surrogate, z, y = made(name, **options, **more)
        pulls = steps(surrogate, z, y, 8)
        values = fold(surrogate).state_dict()
        found.append((pulls, {key: value for key, value in values.items() if not key.startswith("guard.")}))
    for pulls, values in found[1:]:
        assert all(map(torch.equal, pulls, found[0][0]))
        assert values.keys() == found[0][1].keys()
        assert all(torch.equal(values[key], found[0][1][key]) for key in values)


@pytest.mark.parametrize("name", ["gated", "slots"])
def test_without_the_options_a_state_has_the_names_it_always_had(name: str) -> None:
    """Runs that were begun before there were such options go on."""
    old = {
        "gated": "U V hinge.rise w",
        "slots": """
            attention.alpha attention.gru.bias_hh attention.gru.bias_ih attention.gru.weight_hh attention.gru.weight_ih
            attention.log_beta attention.mlp.0.bias attention.mlp.0.weight attention.mlp.2.bias attention.mlp.2.weight
            attention.norm.bias attention.norm.weight attention.to_k.weight attention.to_v.weight bank.rows bank.written calls
            centre cross.alpha_attention cross.alpha_ffn cross.ffn.0.bias cross.ffn.0.weight cross.ffn.1.bias cross.ffn.1.weight
            cross.ffn.3.bias cross.ffn.3.weight cross.norm.bias cross.norm.weight cross.norm_slots.bias cross.norm_slots.weight
            cross.out.weight cross.to_kv.weight cross.to_q.weight hinge.rise project variance weight
        """,
    }
    assert sorted(made(name)[0].state_dict()) == sorted(old[name].split())


@pytest.mark.parametrize("penalty", ["floor", "targets"])
@every
def test_z_does_not_feel_the_penalty_and_the_attention_does(name: str, options: dict[str, Any], penalty: str) -> None:
    bounds = {"entropy_least": 1.0, "entropy_target": 0.02, "entropy_band": 1e-3}  # whatever h is, it is beyond them
    found = []
    for more in ({}, {"entropy_penalty": penalty, **bounds}):
        surrogate, z, y = made(name, **options, **more)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for key, parameter in surrogate.named_parameters():
                if not key.startswith("guard."):
                    parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        z.requires_grad_()
        output = surrogate(z, y)
        output.loss.backward()
        felt = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in surrogate.named_parameters()}
        found.append((output.loss.detach(), z.grad, felt))
    (loss, pull, plain), (same, same_pull, held) = found
    assert torch.equal(loss, same)
    assert pull is not None and same_pull is not None
    assert torch.equal(pull, same_pull)
    moved = [key for key in plain if not torch.equal(held[key], plain[key])]
    assert {"gated": "w", "slots": "attention.to_k.weight"}[name] in moved
    assert all(value.isfinite().all() for value in held.values())


@pytest.mark.parametrize("bf16", [False, True])
@every
def test_what_is_watched_after_the_edge_has_its_gradient_is_what_was_seen(name: str, options: dict[str, Any], bf16: bool) -> None:
    """In a step the monitor comes later than the loss, but before anything moves, and in float32."""
    every_option = {"monitor": True, "spectral": "capped", "entropy_penalty": "targets", "temperatures": True}
    surrogate, z, y = made(name, **options, **every_option)
    steps(surrogate, z, y, 3, 1e-2)
    expected = copy.deepcopy(surrogate)(z, y).diagnostics
    cem = CEM(surrogate, warmup=0, lr=1e-2)
    cem.schedule(0, 1e-3)
    own = z.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        cem.look(own, y)
    assert cem.last is not None
    assert cem.last.diagnostics.keys() == expected.keys() >= {"head_usage", "tripped", "spectral_norm", "head_target"}
    assert all(torch.equal(value, expected[key]) for key, value in cem.last.diagnostics.items())


def collapse(surrogate: Any) -> None:
    """A norm of 50 for the gate's w; slots so far away that the one nearest to the middle has it all."""
    with torch.no_grad():
        if hasattr(surrogate, "w"):
            surrogate.parametrizations.w.original.mul_(50 / surrogate.w.norm())
        else:
            surrogate.attention.to_v.weight.mul_(500)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "options"), [("gated", {}), ("gated", COOPERATIVE), ("slots", {"bank": 0})], ids=str)
def test_the_alarm_trips_within_fifty_steps_of_an_injected_collapse(name: str, options: dict[str, Any], seed: int) -> None:
    surrogate, z, y = made(name, seed, monitor=True, **options)
    steps(surrogate, z, y, 10)
    alarm: Alarm = surrogate.guard.alarm
    assert not alarm.on
    collapse(surrogate)
    needed = 0
    while not alarm.on and needed < 51:
        steps(surrogate, z, y, 1)
        needed += 1
    assert needed <= 50
    output = surrogate(z, y)
    assert output.diagnostics["tripped"] == output.diagnostics["collapsed"] == output.diagnostics["fallback"] == 1
    assert torch.equal(output.loss, output.loss_uniform)  # equal weights, not nothing


def test_a_gate_that_hides_most_of_the_loss_trips_the_alarm_before_its_entropy_is_gone() -> None:
    surrogate, z, y = made("gated", monitor=True, **COOPERATIVE)
    steps(surrogate, z, y, 120, 1e-2)
    assert surrogate.guard.alarm.trips >= 1
    output = surrogate(z, y)
    assert output.diagnostics["tripped"] == 1
    assert torch.equal(output.loss, output.loss_uniform)


def test_the_alarm_waits_stays_on_while_in_doubt_and_goes_off_again() -> None:
    alarm, told = Alarm(2), []
    for usage, many in ((0.9, 20), (0.0, PATIENCE), (0.0, 60), (0.15, 60), (0.9, 60)):
        for _ in range(many):
            alarm.note(torch.tensor([0.9, usage]), torch.zeros(()))
            alarm.follow(YES)
        told.append(bool(alarm.on))
    assert told == [False, False, True, True, False]
    assert alarm.trips == 1


def test_a_skipped_step_does_not_move_the_alarm() -> None:
    alarm = Alarm(1)
    before = copy.deepcopy(alarm.state_dict())
    alarm.note(torch.tensor([torch.nan]), torch.zeros(()))
    alarm.follow(NO)
    assert all(torch.equal(value, before[key]) for key, value in alarm.state_dict().items())


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), g=st.integers(1, 4), n=st.integers(1, 9), s=st.integers(1, 9), sharp=st.floats(0, 30))
def test_what_is_seen_of_a_head_keeps_its_order(seed: int, g: int, n: int, s: int, sharp: float) -> None:
    """floor <= mean entropy of rows <= entropy of their mean, which is concave; all of them shares."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharp * torch.randn(2, g, n, s, generator=generator, dtype=torch.float64)
    rows = (torch.rand(g, n, generator=generator) < 0.8).double()
    most = torch.full((g,), s)
    seen = seen_of(Heads(logits.softmax(3), torch.ones(1, g, n, s).double(), rows, most))
    assert (seen.certified <= seen.entropy + 1e-9).all()
    if rows.sum(1).unique().numel() == 1:  # classes weigh alike in both means
        assert (seen.entropy <= seen.usage + 1e-9).all()
    for share in (seen.entropy, seen.usage, seen.effective):
        assert (share >= 0).all()
        assert (share <= 1 + 1e-9).all()


def test_samples_that_each_have_a_slot_use_all_and_samples_in_one_slot_use_one() -> None:
    own, one = torch.eye(4).expand(1, 1, 4, 4), torch.eye(4)[:1].expand(4, 4).view(1, 1, 4, 4)
    rest = torch.ones(1, 1, 4, 4), torch.ones(1, 4), torch.tensor([4])
    assert usage_of(Heads(own, *rest)).item() == pytest.approx(1)
    assert usage_of(Heads(one, *rest)).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_a_floor_keeps_a_cooperative_gate_from_collapsing(seed: int) -> None:
    shares = []
    for more in ({}, {"entropy_penalty": "floor", "entropy_least": 0.95, "entropy_weight": 20.0}):
        surrogate, z, y = made("gated", seed, **COOPERATIVE, **more)
        before, after = trained(surrogate, z, y, 1e-2, steps=100)
        assert torch.equal(after.loss_uniform, before.loss_uniform)
        shares.append(after.diagnostics["attention_entropy"].item())
    assert shares[0] < 0.5 < shares[1]


def test_targets_pull_from_both_sides_and_follow_slowly() -> None:
    config = AttentionConfig(entropy_penalty="targets", entropy_target=0.6, entropy_band=0.1, entropy_weight=1.0)
    guard = AttentionGuard(config, 2)
    torch.testing.assert_close(guard.theta(), torch.full((2,), 0.6))
    logits = torch.stack([torch.tensor([9.0, 0, 0, 0]), torch.tensor([0.01, 0, 0, 0])]).view(2, 1, 1, 4).requires_grad_()
    heads = Heads(logits.softmax(3), torch.ones(1, 1, 1, 4), torch.ones(1, 1), torch.tensor([4]))
    penalty = guard.penalty(heads)
    assert penalty == 0
    penalty.backward()
    assert logits.grad is not None
    assert logits.grad[0, 0, 0, 0] > 0 > logits.grad[1, 0, 0, 0]  # descent flattens the first and sharpens the second
    assert guard.target.grad is not None
    assert guard.target.grad[0] > 0 > guard.target.grad[1]  # and brings the targets nearer to them
    with torch.no_grad():
        guard.target.sub_(1.0)  # a thousand of Adam's steps
    assert (guard.theta() > 0.57).all()


@pytest.mark.parametrize("name", ["gated", "slots"])
def test_under_a_cap_no_norm_in_use_exceeds_it_by_more_than_one_percent(name: str) -> None:
    """At ten times the rate, over every weight that makes logits, at each step."""
    cap = 0.8
    surrogate, z, y = made(name, monitor=True, spectral="capped", spectral_cap=cap, temperatures=True)
    weights = [(owner, key) for owner, key, how, _ in reparametrised(surrogate) if isinstance(how, Spectral)]
    assert len(weights) == 3
    for _ in range(30):
        steps(surrogate, z, y, 1, 1e-2)
        for owner, key in weights:
            assert torch.linalg.matrix_norm(torch.atleast_2d(getattr(owner, key).detach()), 2) <= cap * 1.01
    output = surrogate(z, y)
    assert (output.diagnostics["spectral_norm"] <= cap + 1e-6).all()
    assert (output.diagnostics["head_certified"] <= output.diagnostics["head_entropy"] + 1e-6).all()
    for parameter in ("log_sharpness",) if name == "gated" else ("cross.log_sharpness", "attention.log_beta"):
        owner, _, key = parameter.rpartition(".")
        assert (getattr(surrogate.get_submodule(owner), key) <= 0).all()


@pytest.mark.parametrize("spectral", ["off", "learned"])
@pytest.mark.parametrize("name", ["gated", "slots"])
def test_temperatures_and_learned_norms_start_with_the_function_that_was_there(name: str, spectral: str) -> None:
    plain, z, y = made(name)
    same, _, _ = made(name, temperatures=True, spectral=spectral)
    torch.testing.assert_close(same(z, y).loss, plain(z, y).loss)
    same(z, y).loss.backward()
    (felt,) = (p.grad for key, p in same.named_parameters() if key.endswith("log_sharpness"))
    assert felt is not None and felt.isfinite().all()


@pytest.mark.parametrize("gamma", ["learned", "capped"])
def test_an_adversarial_gate_with_a_norm_of_its_own_starts_at_equal_weights_and_learns(gamma: str) -> None:
    surrogate, z, y = made("gated", spectral=gamma)
    before, after = trained(surrogate, z, y, 1e-2, steps=100)
    assert before.diagnostics["attention_entropy"].item() == pytest.approx(1)
    assert after.loss > 1.01 * before.loss_uniform
    assert torch.equal(after.loss_uniform, before.loss_uniform)


@pytest.mark.parametrize("name", ["gated", "slots"])
def test_folded_a_surrogate_is_a_plain_one_of_the_same_function(name: str) -> None:
    surrogate, z, y = made(name, spectral="capped", temperatures=True)
    steps(surrogate, z, y, 5, 1e-2)
    folded = fold(copy.deepcopy(surrogate))
    torch.testing.assert_close(folded(z, y).loss, surrogate(z, y).loss, rtol=1e-6, atol=0)
    assert not any("parametrizations" in key for key in folded.state_dict())


@pytest.mark.parametrize("name", ["gated", "slots"])
def test_a_training_goes_on_bit_for_bit_from_its_state(name: str) -> None:
    options = {"monitor": True, "spectral": "capped", "entropy_penalty": "targets", "temperatures": True}
    surrogate, z, y = made(name, **options)
    steps(surrogate, z, y, 5, 1e-2)
    fresh, _, _ = made(name, 1, **options)
    fresh.load_state_dict(safetensors.torch.load(safetensors.torch.save(surrogate.state_dict())))
    assert all(map(torch.equal, steps(surrogate, z, y, 5, 1e-2), steps(fresh, z, y, 5, 1e-2)))


@pytest.mark.parametrize("options", [{"temperatures": True}, {"entropy_penalty": "floor"}], ids=str)
def test_an_untrained_gate_refuses_what_would_have_to_be_trained(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="stopgrad"):
        made("gated", gate_objective="stopgrad", **options)
