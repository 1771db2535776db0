"""The message: what is written is read, and no mutation of its bytes passes or ends in a traceback."""

import json
import random

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from splitveil.adaptation.message import MOST_BYTES, Update, read, write
from splitveil.options import UserError


def update(channels: int = 8, number: int = 3) -> Update:
    generator = torch.Generator().manual_seed(0)
    return Update(torch.rand(channels, generator=generator), torch.randn(channels, generator=generator), number, "ab" * 32)


def mutated(message: bytes, draw: random.Random) -> bytes:
    how = draw.choice(["flip", "cut", "longer", "swap", "insert", "zero", "length"])
    data, at = bytearray(message), draw.randrange(len(message))
    if how == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif how == "cut":
        data = data[:at]
    elif how == "longer":
        data += bytes(draw.randrange(256) for _ in range(draw.randrange(1, 40)))
    elif how == "swap":
        other = draw.randrange(len(message))
        data[at], data[other] = data[other], data[at]
    elif how == "insert":
        data[at:at] = bytes([draw.randrange(256)])
    elif how == "zero":
        data[at : at + 8] = bytes(8)
    else:
        data[:8] = draw.choice([0, 1, 2**31, 2**40, 2**63, len(message)]).to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("channels", [1, 8, 64, 512])
def test_what_is_written_is_read_and_the_bytes_are_always_the_same(channels: int) -> None:
    before = update(channels)
    message = write(before)
    after = read(message)
    assert len(message) <= MOST_BYTES < 16 * 1024
    assert torch.equal(after.gain, before.gain) and torch.equal(after.shift, before.shift)
    assert (after.number, after.edge) == (before.number, before.edge)
    assert write(after) == message


@given(seed=st.integers(0, 2**32))
def test_no_mutation_passes_and_none_is_a_traceback(seed: int) -> None:
    message = write(update())
    changed = mutated(message, random.Random(seed))
    if changed == message:
        return
    with pytest.raises(UserError) as refused:
        read(changed)
    assert "\n" not in str(refused.value)


def with_header(tensors: dict[str, torch.Tensor], said: object) -> bytes:
    return safetensors.torch.save(tensors, {"splitveil": said if isinstance(said, str) else json.dumps(said)})


GOOD = {"format": 1, "number": 1, "edge": "", "sha256": ""}
TWO = {"gain": torch.ones(2), "shift": torch.zeros(2)}


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"", "not a safetensors file"),
        ("text", "must be bytes"),
        (b"x" * (MOST_BYTES + 1), f"may have {MOST_BYTES}"),
        (safetensors.torch.save(TWO), "no header"),
        (with_header(TWO, "[" * 3000), "no header"),
        (with_header(TWO, [1]), "no header"),
        (with_header(TWO, GOOD | {"number": True}), "no header"),
        (with_header(TWO, GOOD | {"number": "1"}), "no header"),
        (with_header(TWO, GOOD | {"format": 2}), "has format 2, must have 1"),
        (with_header(TWO | {"weight": torch.ones(2)}, GOOD), "must hold gain and shift"),
        (with_header({"gain": torch.ones(2)}, GOOD), "must hold gain and shift"),
        (with_header({"gain": torch.ones(2, 2), "shift": torch.ones(2)}, GOOD), r"gain is torch.float32 of shape \[2, 2\]"),
        (with_header({"gain": torch.ones(2), "shift": torch.ones(2).half()}, GOOD), "shift is torch.float16"),
        (with_header({"gain": torch.ones(2), "shift": torch.ones(3)}, GOOD), "damaged"),
        (with_header(TWO, GOOD), "damaged"),
    ],
)
def test_what_is_no_update_is_refused_with_the_reason(message: bytes, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read(message)


def test_an_update_of_too_many_channels_is_refused_when_it_is_written() -> None:
    with pytest.raises(UserError, match="adapt the cloud alone"):
        write(update(2048))
