"""A pickle from elsewhere runs nothing: it is read as plain values, or refused in one line."""

import os
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from splitveil.data.safe_pickle import read_arrays
from splitveil.registry import UserError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
)
protocols = st.sampled_from([2, 3, 4])
numbers = st.sampled_from(["u1", ">u2", "<i4", "i8", "?", ">f4", "f8", "c8"])


@settings(max_examples=60, deadline=None)
@given(plain, protocols)
def test_plain_values_are_read_as_pickle_reads_them(value: Any, protocol: int):
    assert read_arrays(pickle.dumps(value, protocol), "file") == value


@settings(max_examples=60, deadline=None)
@given(numbers.flatmap(lambda dtype: arrays(dtype, array_shapes(min_dims=0))), st.booleans(), protocols)
def test_arrays_of_numbers_are_read_as_they_were(array: np.ndarray, fortran: bool, protocol: int):
    array = np.asfortranarray(array) if fortran else array
    found = read_arrays(pickle.dumps({"a": array}, protocol), "file")["a"]
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype.newbyteorder("=")


class Runs:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def refusal(data: bytes) -> str:
    with pytest.raises(UserError, match="nothing of it was run") as error:
        read_arrays(data, "the/file")
    assert str(error.value).startswith("the/file ")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_runs_a_command_is_refused_and_runs_nothing(protocol: int, tmp_path):
    data = pickle.dumps({"data": Runs(f"touch {tmp_path}/ran")}, protocol=protocol)
    refusal(data)
    assert not (tmp_path / "ran").exists()
    pickle.loads(data)
    assert (tmp_path / "ran").exists(), "the attack must work on pickle, or this test shows nothing"


@pytest.mark.parametrize("name", ["os system", "builtins eval", "__builtin__ eval", "numpy load", "_codecs decode"])
def test_a_global_that_the_files_do_not_need_is_refused_by_its_name(name: str):
    module, attribute = name.split(" ")
    assert name in refusal(f"\x80\x02c{module}\n{attribute}\n.".encode("latin-1"))
    by_stack = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in name.split(" "))
    assert name in refusal(b"\x80\x04" + by_stack + b"\x93.")


def array_pickle(dtype: bytes, state: bytes, raw: bytes) -> bytes:
    """An array of one element with a dtype of the writer's choice, and with the writer's word for what it is."""
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return b"\x80\x02" + made + b"(K\x01K\x01\x85cnumpy\ndtype\n" + dtype + b"R" + state + b"b\x89" + raw + b"tb."


PLAIN_STATE = b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00t"
POINTER = b"U\x08AAAAAAAA"


@pytest.mark.parametrize("data", [
    b"\x80\x02cnumpy\nndarray\n)R.",
    b"\x80\x02cnumpy\ndtype\nU\x01OK\x00K\x01\x87R.",
    array_pickle(b"U\x02O8K\x00K\x01\x87", PLAIN_STATE, b"]N\x61"),
    array_pickle(b"U\x02O8K\x00K\x01\x87", PLAIN_STATE, POINTER),  # numpy would take the bytes for a pointer
    array_pickle(b"U\x02V8K\x00K\x01\x87", PLAIN_STATE, POINTER),
    array_pickle(b"U\x02u8K\x00K\x01\x87", PLAIN_STATE, b"]N\x61"),
    array_pickle(b"U\x02u8K\x00K\x01\x87", b"N", POINTER),
    array_pickle(b"U\x02u8K\x00K\x01\x87", PLAIN_STATE, b"U\x01A"),
    pickle.dumps({"a": np.array([{}, []], dtype=object)}, 2),
    pickle.dumps({"a": np.zeros(2, "i4,O")}, 4),
    b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}U\x01aK\x01sb.",
    b"\x80\x02c_codecs\nencode\nN}U\x0c__defaults__Nsb\x86b.",
    b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aU\x03zip\x86R.",
    b"\x80\x02U\x01aU\x01b\x86R.",
    b"\x80\x02}U\x01ab.",
    b"\x80\x02(ios\nsystem\n.",
    b"\x80\x02}(K\x01K\x02u.",
    b"\x80\x02}K\x01K\x02s.",
    b"\x80\x02}()" + b"\x85" * 1_000_000 + b"K\x02u.",
    b"\x80\x02K\x01K\x02a.",
    b"\x80\x02h\x05.",
    b"\x80\x02u.",
    b"\x80\x02](K\x01K\x02u.",
    b"\x80\x02.",
    b"",
    b"no pickle",
], ids=lambda data: repr(data[:30]))  # fmt: skip
def test_what_our_files_do_not_contain_is_refused(data: bytes):
    refusal(data)


def test_bytes_that_a_dtype_calls_more_than_numbers_stay_numbers():
    """numpy's own dtype would believe these flags, and count references to what the bytes point at."""
    flags = b"(K\x03U\x01<NNNK\x08K\x01K?t"
    found = read_arrays(array_pickle(b"U\x02u8K\x00K\x01\x87", flags, POINTER), "file")
    assert (found.dtype, found.tobytes()) == (np.dtype("u8"), b"AAAAAAAA")
    assert found.dtype.flags == np.dtype("u8").flags


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_truncated_file_is_refused_wherever_it_ends(protocol: int):
    whole = pickle.dumps({"data": np.arange(12, dtype=np.uint8).reshape(3, 4), "labels": [1, 2, 3]}, protocol)
    for end in range(len(whole)):
        refusal(whole[:end])
