from pathlib import Path

import pytest

from splitveil.compute.pick_device import pick_device, processor
from splitveil.registry import UserError

LISTED = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC

processor\t: 1
cpu family\t: 6
model\t\t: 1
model name\t: another core
"""


def test_a_processor_whose_name_is_hidden_is_told_by_its_family_and_model(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(LISTED)
    assert processor(tmp_path / "cpuinfo") == "AMD EPYC (family 25, model 17)"
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Cortex-A76\n")
    assert processor(tmp_path / "cpuinfo") == "Cortex-A76"


def test_where_nothing_is_listed_a_processor_still_has_a_name(tmp_path: Path) -> None:
    assert processor(tmp_path / "missing")


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="device 'nowhere' is not usable here"):
        pick_device("nowhere")
