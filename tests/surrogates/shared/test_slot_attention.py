import numpy as np
import torch

from splitveil.surrogates.shared.slot_attention import DEAD, GatedCrossAttention, PapersSlotAttention, SlotAttention, shares


def test_slot_attention_is_the_papers_round_by_round() -> None:
    torch.manual_seed(0)
    module = PapersSlotAttention(6, rounds=2).double()
    x, slots_ = torch.randn(1, 9, 6).double(), torch.randn(1, 3, 6).double()
    found = module(x, torch.ones(1, 9, 3).double(), slots_, torch.zeros(1, 3, dtype=torch.bool), module.metric())[0]
    own = slots_[0]
    k, v = x[0] @ module.to_k.weight.T, x[0] @ module.to_v.weight.T
    for _ in range(2):
        q = module.norm_slots(own) @ module.to_q.weight.T
        r = torch.softmax(k @ q.T / 6**0.5, 1)
        r = r / r.sum(0)
        new = module.gru(r.T @ v, own)
        own = new + module.mlp(module.norm(new))
    torch.testing.assert_close(found, own)


def test_the_slots_of_the_tied_attention_are_those_of_all_rounds_and_their_gradient_that_of_the_last() -> None:
    torch.manual_seed(0)
    module = SlotAttention(6, rounds=3).double()
    with torch.no_grad():
        module.alpha.fill_(0.5)
    x, there, dead = torch.randn(1, 9, 6).double(), torch.ones(1, 9, 3).double(), torch.zeros(1, 3, dtype=torch.bool)
    slots_ = torch.randn(1, 3, 6).double()
    given = dead, module.metric()
    second = module.round(x, there, module.round(x, there, slots_, *given), *given)
    found, expected = module(x, there, slots_, *given), module.round(x, there, second.detach(), *given)
    torch.testing.assert_close(found, expected)
    weights = list(module.parameters())
    pulls = (
        torch.autograd.grad(each.square().sum(), weights, allow_unused=True, retain_graph=True) for each in (found, expected)
    )
    torch.testing.assert_close(*pulls)


def test_cross_attention_is_torchs_own_behind_its_gate() -> None:
    torch.manual_seed(0)
    module = GatedCrossAttention(8, heads=4).double()
    with torch.no_grad():
        module.alpha_ffn.zero_()
    x, memory = torch.randn(2, 5, 8).double(), torch.randn(2, 3, 8).double()
    peer = torch.nn.MultiheadAttention(8, 4, bias=False, batch_first=True).double()
    with torch.no_grad():
        peer.in_proj_weight.copy_(torch.cat([module.to_q.weight, module.to_kv.weight]))
        peer.out_proj.weight.copy_(module.out.weight)
    seen = module.norm_slots(memory)
    expected = x + np.tanh(0.1) * peer(module.norm(x), seen, seen)[0]
    torch.testing.assert_close(module(x, memory, torch.zeros(2, 3, dtype=torch.bool))[0], expected)


def test_shares_are_a_softmax_with_a_floor() -> None:
    logits = torch.tensor([[[0.0, -1.0, -200.0, DEAD], [3.0, torch.nan, 1.0, DEAD]]])
    found = shares(logits)
    torch.testing.assert_close(found[0, 0, :2], logits[0, 0, :2].softmax(0))
    assert (found[0, 0, 2:] < 1e-12).all() and (found[0, 0, 2:] > torch.finfo().tiny).all()
    assert found[0, 1].isnan().all()  # a step of NaN is skipped, which needs it to be seen


def test_the_tied_attention_goes_by_distances_under_its_metric_and_leaves_out_the_dead() -> None:
    torch.manual_seed(0)
    module = SlotAttention(6, rounds=1).double()
    with torch.no_grad():
        module.to_k.weight.normal_()
        module.log_beta.fill_(0.3)
    x, slots_ = torch.randn(2, 9, 6).double(), torch.randn(2, 3, 6).double()
    dead = torch.tensor([[False, False, True], [False, False, False]])
    logits = module.logits(x, slots_, dead, module.metric())
    apart = module.to_k(x).unsqueeze(2) - module.to_k(slots_).unsqueeze(1)  # [g, n, s, h]
    expected = -np.exp(0.3) * apart.square().sum(3) / (2 * 6**0.5)
    expected = expected.masked_fill(dead.unsqueeze(1), -torch.inf).softmax(2)
    torch.testing.assert_close(shares(logits), expected, atol=1e-12, rtol=1e-9)
