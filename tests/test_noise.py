"""Noise without a generator is secret: no seed, no process and no fork can draw it again."""

import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from splitveil import defences, noise
from splitveil.channel import Channel
from splitveil.split_model import SplitModel

ROOT = Path(__file__).parent.parent
DRAWING = ["gaussian", "dropout", "vib", "shredder", "quantise", "keyed_noise", "local_dp"]
WHOLE_STEPS = {"gaussian": {"grid": True}}
SENDS = """
import torch
from splitveil import defences
from splitveil.channel import Channel
torch.manual_seed(0)  # as loading a run does
channel = Channel([defences.build("gaussian", sigma=1.0)])
print(channel.send(torch.zeros(1, 64), torch.zeros(1)).numpy().tobytes().hex())
print(channel.serve().send(torch.zeros(1, 64), torch.zeros(1)).numpy().tobytes().hex())
"""


@pytest.fixture(autouse=True)
def nothing_ahead() -> Iterator[None]:
    yield
    noise.AHEAD.stop()


def draws(count: int = 200_000, dtype: torch.dtype = torch.float32) -> Tensor:
    return noise.normal(torch.empty(count, dtype=dtype), None)


@pytest.mark.slow
def test_processes_that_loaded_the_same_run_do_not_send_the_same_noise() -> None:
    running = [subprocess.Popen([sys.executable, "-c", SENDS], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    sent = "".join(process.communicate()[0] for process in running).split()
    assert all(process.returncode == 0 for process in running)
    assert len(set(sent)) == 4


def built(name: str, **options: object) -> Channel:
    """A channel for z of 4 x 8 x 8."""
    channel = Channel([defences.build(name, **options)])
    channel.rebuild(SplitModel(torch.nn.Identity(), torch.nn.Identity(), (4, 8, 8), (4, 8, 8)))
    return channel


def in_service() -> None:
    """Starts the stock and waits for normal numbers in it."""
    noise.AHEAD.start()
    draws(1)
    assert noise.AHEAD.wait()


def in_child() -> bytes:
    """What a forked child draws first."""
    end, other = multiprocessing.Pipe()
    if (child := os.fork()) == 0:
        other.send_bytes(draws(64).numpy().tobytes())
        os._exit(0 if not noise.AHEAD._wanted or noise.AHEAD.wait() else 1)  # its own thread makes noise for it
    first, (_, status) = end.recv_bytes(), os.waitpid(child, 0)
    assert status == 0
    return first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
def test_forked_children_and_their_parent_all_draw_different_noise(ahead: bool) -> None:
    if ahead:
        in_service()
    children = [in_child() for _ in range(3)]
    parent = draws(64).numpy().tobytes()
    assert len({parent, *children}) == 4


def test_two_hosts_worth_of_draws_has_no_number_in_common_beyond_chance() -> None:
    """Float64 has 2^52 values to each power of two: a repeat among 2 x 200,000 is a repeated stream and no accident."""
    first, second = (draws(200_000, torch.float64) for _ in range(2))
    assert len(torch.cat([first, second]).unique()) == 400_000


def test_threads_share_no_noise() -> None:
    noise.AHEAD.start()
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.extend(draws(1000, torch.float32) for _ in range(50))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = torch.stack(found)[:, :4]
    assert len(starts.unique(dim=0)) == 200


def test_what_was_made_ahead_is_handed_out_once_and_is_what_is_sent() -> None:
    in_service()
    first, second = draws(1000), draws(1000)
    assert not torch.equal(first, second)
    many = draws(3 * noise.BLOCK)  # more than a block: made at once
    assert len(many) == 3 * noise.BLOCK
    assert stats.kstest(many[:100_000].numpy(), "norm").pvalue > 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 3, 4, 4)], ids=str)
def test_secret_noise_has_the_shape_type_and_place_of_its_model(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.empty(shape, dtype=dtype)
    drawn = noise.normal(like, None)
    assert (drawn.shape, drawn.dtype, drawn.device) == (like.shape, dtype, like.device)
    assert torch.isfinite(drawn).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_secret_noise_is_normal_and_its_entries_are_not_related(dtype: torch.dtype) -> None:
    """Rejected by chance once in a million runs."""
    drawn = draws(400_000, dtype)
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-6
    assert stats.kstest((drawn[:200_000].square() + drawn[200_000:].square()).numpy(), stats.chi2(2).cdf).pvalue > 1e-6
    for gap in (1, 2, 200_000):  # the halves come of the same pairs of uniform numbers
        related = torch.corrcoef(torch.stack([drawn[:-gap], drawn[gap:]]))[0, 1]
        assert abs(related) * (len(drawn) - gap) ** 0.5 < 5.5


def test_the_tails_reach_as_far_as_the_module_says() -> None:
    for dtype, bits in ((torch.float32, 31), (torch.float64, 63)):
        word = torch.zeros(2, dtype=torch.int32 if bits == 31 else torch.int64)  # the smallest uniform number
        assert noise.box_muller(word, dtype).max().item() == pytest.approx(noise.TAILS[dtype], rel=1e-6)
        assert torch.isfinite(noise.box_muller(word + (2**bits - 1), dtype)).all()  # the largest


def test_uniform_numbers_words_and_choices_are_spread_evenly() -> None:
    u = noise.uniform(torch.empty(400_000), None)
    assert u.min() >= 0 and u.max() < 1
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-6
    chosen = noise.below(20, 400_000, torch.device("cpu"), None)
    assert stats.chisquare(torch.bincount(chosen, minlength=20).numpy()).pvalue > 1e-6
    words = noise.words((100_000,), torch.device("cpu"), None)
    assert words.min() >= 0
    ones = torch.stack([(words >> bit) & 1 for bit in range(63)]).double().mean(1)
    assert (ones - 0.5).abs().max() < 5.5 * 0.5 / 100_000**0.5


def test_every_draw_asks_the_system_for_a_key_of_256_bits_and_all_of_its_noise_comes_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, keys = [], [bytes(32), bytes(32), bytes(31) + b"\1"]

    def urandom(count: int) -> bytes:
        asked.append(count)
        return keys[len(asked) - 1]

    monkeypatch.setattr(os, "urandom", urandom)
    one, same, other = (draws(1000) for _ in keys)
    assert asked == [32, 32, 32]
    assert torch.equal(one, same)
    assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 0.2  # one bit of the key makes it another


def test_the_stream_is_that_of_the_standard(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFC 8439, appendix A.1, test vector 1; and it goes on where a part of the work ends."""
    monkeypatch.setattr(os, "urandom", bytes)
    long = noise.secret(2 * len(noise.ZEROS), torch.int32).numpy().tobytes()
    assert long[:16].hex() == "76b8e0ada0f13d90405d6ae55386bd28"
    assert len({long[i : i + 64] for i in range(0, len(long), len(noise.ZEROS))}) == 8


def test_on_another_device_it_is_made_there() -> None:
    """`meta` stands for a GPU."""
    like = torch.empty(3, 5, device="meta")
    for drawn in (noise.normal(like, None), noise.uniform(like, None), noise.words((3, 5), like.device, None)):
        assert (drawn.device, drawn.shape) == (like.device, like.shape)


@pytest.mark.parametrize("name", [name for name in DRAWING if name != "keyed_noise"])  # which hashes pixels on the host
def test_no_defence_waits_for_a_device_in_service(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta`, which has no values, whatever the host reads from the device raises an error."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # does not know `meta`
    channel, z = built(name, **WHOLE_STEPS.get(name, {})), torch.rand(2, 4, 8, 8)
    channel.serve().to("meta")
    sent = channel.send(z.to("meta"), torch.rand(2, 3, 8, 8, device="meta"))
    assert (sent.device.type, sent.shape) == ("meta", z.shape)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("ahead", [False, True], ids=["at once", "ahead"])
@pytest.mark.parametrize("name", [name for name in DRAWING if name != "keyed_noise"])
def test_on_a_gpu_noise_is_fresh_and_nobody_waits_for_it(name: str, ahead: bool) -> None:
    channel = built(name, **WHOLE_STEPS.get(name, {})).cuda().serve()
    z, x = torch.rand(64, 4, 8, 8, device="cuda"), torch.rand(64, 3, 8, 8, device="cuda")
    for _ in range(3):
        channel.send(z, x)  # pinned memory is allocated
    assert noise.AHEAD.wait()
    if not ahead:
        noise.AHEAD.stop()
    before = torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says that this mode does not see everything
            torch.cuda.set_sync_debug_mode("error")
        sent = [channel.send(z, x) for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert name == "shredder" or len(torch.stack(sent).unique(dim=0)) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_on_a_gpu_it_is_normal_too(dtype: torch.dtype) -> None:
    for _ in range(2):  # at once, and made ahead
        drawn = noise.normal(torch.empty(200_000, dtype=dtype, device="cuda"), None)
        assert drawn.device.type == "cuda" and drawn.dtype == dtype
        if dtype != torch.bfloat16:  # its steps are too coarse for this test
            assert stats.kstest(drawn.cpu().numpy(), "norm").pvalue > 1e-6
        in_service()


@pytest.mark.parametrize("name", ["gaussian", "gaussian in whole steps", "dropout", "vib", "quantise", "local_dp"])
def test_in_service_the_thread_that_sends_makes_no_noise_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    channel = built("gaussian", grid=True) if name == "gaussian in whole steps" else built(name)
    z, x, makers = torch.rand(2, 4, 8, 8), torch.rand(2, 3, 8, 8), []
    channel.serve().send(z, x)  # the first is made at once, and tells what to make ahead
    assert noise.AHEAD.wait()
    urandom = os.urandom
    monkeypatch.setattr(os, "urandom", lambda count: (makers.append(threading.current_thread().name), urandom(count))[1])
    sent = [channel.send(z, x) for _ in range(20)]
    assert len(torch.stack(sent).unique(dim=0)) == 20
    assert threading.current_thread().name not in makers


def test_without_the_cipher_the_system_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    assert stats.kstest(draws(100_000).numpy(), "norm").pvalue > 1e-6


def test_a_generator_draws_what_torch_draws_with_it() -> None:
    """Attacks, evaluation and training stay bit for bit what they were."""
    like = torch.empty(3, 100)

    def seeded() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    assert torch.equal(noise.normal(like, seeded()), torch.randn(3, 100, generator=seeded()))
    assert torch.equal(noise.uniform(like, seeded()), torch.rand(3, 100, generator=seeded()))
    assert torch.equal(noise.below(7, 50, like.device, seeded()), torch.randint(7, (50,), generator=seeded()))


@pytest.mark.parametrize("name", DRAWING)
def test_no_defence_touches_torchs_own_generator_and_none_can_be_drawn_again(name: str) -> None:
    (defence,) = built(name).defences
    z, x = torch.rand(2, 4, 8, 8), torch.rand(2, 3, 8, 8)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = defence.send(z, x, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert name in ("keyed_noise", "shredder") or not torch.equal(first, defence.send(z, x, None))


@pytest.mark.parametrize("trace", ["jit", "export"])
@pytest.mark.filterwarnings("ignore")
def test_noise_is_not_baked_into_an_exported_program(trace: str) -> None:
    class Sends(torch.nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return z + noise.normal(z, None)

    with pytest.raises(Exception, match="the same at every call"):
        torch.jit.trace(Sends(), torch.zeros(3)) if trace == "jit" else torch.export.export(Sends(), (torch.zeros(3),))


def test_a_program_in_service_ends_without_an_abort() -> None:
    """Several at once and several times: whether the thread is inside torch at the end is chance."""
    served = "from splitveil.noise import AHEAD, secret_normal as kind; AHEAD.start(); AHEAD.take(kind, 1); AHEAD.wait()"
    running = [subprocess.Popen([sys.executable, "-c", served], cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(4)]
    assert [process.wait(60) for process in running] == [0] * 4
