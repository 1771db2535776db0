from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_net import attacker, private

import splitveil
from splitveil.auditing.doors.onnx import onnx_edge
from splitveil.registry import UserError

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
X = torch.from_numpy(private()[0][:8]).float() / 255


def pooling(file: Path, batch: Any = "n", inputs: int = 1, size: int = 8, kind: str = "FLOAT") -> Path:
    """An ONNX file that another framework could have written: means of 2 x 2 pixels."""
    from onnx import TensorProto, helper

    images = [helper.make_tensor_value_info(f"x{i}", getattr(TensorProto, kind), [batch, 1, size, size]) for i in range(inputs)]
    sent = helper.make_tensor_value_info("z", getattr(TensorProto, kind), [batch, 1, size // 2, size // 2])
    node = helper.make_node("AveragePool", ["x0"], ["z"], kernel_shape=[2, 2], strides=[2, 2])
    nodes = [node] if inputs == 1 else [helper.make_node("Add", ["x0", "x1"], ["y"]), helper.make_node("Identity", ["y"], ["z"])]
    graph = helper.make_graph(nodes, "edge", images, [sent])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), file)
    return file


@pytest.mark.parametrize("batch", ["n", 3])
def test_a_file_has_the_figures_of_the_same_function(batch: Any, tmp_path: Path) -> None:
    file = pooling(tmp_path / "edge.onnx", batch)
    attacks = ["nearest", "ridge"]
    report = splitveil.audit(file, private=private()[0], attacker=attacker()[0], attacks=attacks)
    function = splitveil.audit(lambda x: F.avg_pool2d(x, 2), private=private()[0], attacker=attacker()[0], attacks=attacks)
    assert report.worst_case.mse == pytest.approx(function.worst_case.mse, rel=1e-4)
    assert report.not_checked["whitebox-weaker"].startswith("the edge is a black box")


def test_another_file_has_another_digest(tmp_path: Path) -> None:
    one, two = (onnx_edge(pooling(tmp_path / f"{batch}.onnx", batch), X) for batch in ("n", 3))
    assert one.digest != two.digest and tuple(one.model.z_shape) == (1, 4, 4)


def test_half_precision_is_taken(tmp_path: Path) -> None:
    sent = onnx_edge(pooling(tmp_path / "edge.onnx", kind="FLOAT16"), X).model.edge(X)
    assert sent.dtype == torch.float32
    assert torch.allclose(sent, F.avg_pool2d(X, 2), atol=2e-3)


def test_what_is_no_edge_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    for file, message in (
        (tmp_path / "nowhere.onnx", "there is no file .*nowhere.onnx"),
        (tmp_path / "broken.onnx", "broken.onnx cannot be loaded by onnxruntime"),
        (pooling(tmp_path / "two.onnx", inputs=2), r"has 2 inputs and 1 outputs \(x0, x1 -> z\), must have one each"),
        (pooling(tmp_path / "large.onnx", size=16), r"the images are \[1, 8, 8\], .*large.onnx takes \[1, 16, 16\]"),
        (pooling(tmp_path / "whole.onnx", kind="INT32", inputs=2), "must have one each"),
    ):
        with pytest.raises(UserError, match=message):
            onnx_edge(file, X)


def test_without_onnxruntime_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"pip install 'splitveil\[onnx\]'"):
        onnx_edge(tmp_path / "edge.onnx", X)
