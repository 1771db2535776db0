"""How many operations a piece of work starts that compute or copy something: on a GPU each is one small kernel, or two.

Views and empty tensors start nothing and are not counted. A step whose kernels are small takes as long as their number says.
"""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.bench.timing import Work

NOTHING = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view"}
"""Operations beside views that start no kernel."""


class Counting(TorchDispatchMode):
    """Counts the operations that are started inside, those of a backward pass as well."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not func.is_view and func._schema.name.removeprefix("aten::") not in NOTHING
        return func(*args, **(kwargs or {}))


def operations_of(work: Work) -> int:
    """Of the second time: the first makes what is kept."""
    work()
    with Counting() as counting:
        work()
    return counting.operations
