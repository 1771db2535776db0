"""Cut a user's own nn.Module after one of its submodules, by torch.fx.

    model = split(resnet, at="layer1", example=x)              model(x) == resnet(x), in train() and in eval()
    cuts(resnet, x)                                            ["conv1", "bn1", …, "layer1.0", "layer1", "layer2.0", …]

How. Only the strict ancestors of the cut are opened; every other module stays a leaf, so what happens inside it
(control flow, custom kernels) does not matter. Of the list of operations this gives, those up to the cut are the edge
and the rest is the cloud. The one value that may cross is z, one tensor with the batch first. Besides z the cloud may
use its own parameters, and what z tells as well: the batch size and the device, which are read from z there.

What the halves share with the original. Leaf modules, parameters and buffers are the original's own objects under their own
dotted names, so the original's state_dict is the union of the halves' (for what its forward uses). A parameter that both sides
use is refused, because two machines cannot share it; a buffer on both sides (a table of positions) is allowed.

The cloud works on a copy of z. A layer that writes in place can stand first in the cloud, also behind a view or deep
inside a leaf where no graph shows it; without the copy it would overwrite the z that the loss at the cut still needs.
The copy is one pass over z, small against any layer, so it is always made.

Tracing freezes what Python decides in the forward pass. Each cut is therefore traced in train() and in eval() and refused if the
two differ, and the halves are compared with the original on `example` and on a batch of another size.
"""

import operator
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitveil.registry import UserError, unknown
from splitveil.split_model import SplitModel, in_mode

Traced = Callable[[str], tuple[fx.Graph, dict[str, Any]]]  # the name of an opened parent -> its operations, see `trace`


class Refused(UserError):
    """Why a module cannot be cut at one place."""


def run_quietly(module: nn.Module, x: Tensor) -> Any:
    """module(x) in eval mode without gradients. Random layers draw the same numbers each time, and none of the user's."""
    with in_mode(module, False), torch.no_grad(), torch.random.fork_rng([x.device] if x.is_cuda else []):
        torch.manual_seed(0)
        return module(x)


def two_batches(example: Tensor) -> tuple[Tensor, Tensor]:
    """The example, and the example twice over. A number that equals the batch size by chance does so in only one of them."""
    return example, torch.cat([example, example])


def watch(module: nn.Module, example: Tensor) -> dict[str, list[Any]]:
    """The outputs of each submodule by name, for the two batches of `two_batches`, in the order in which they finished."""
    outputs: dict[str, list[Any]] = {}

    def note(name: str) -> Any:
        def hook(_part: nn.Module, _inputs: Any, output: Any) -> None:
            # Only the shape is needed. A tensor on "meta" keeps no memory alive, and no later layer can write into it.
            shown = output.to("meta") if isinstance(output, Tensor) else output
            outputs[name] = [*outputs.pop(name, []), shown]

        return hook

    hooks = [part.register_forward_hook(note(name)) for name, part in module.named_modules() if name]
    try:
        results = [run_quietly(module, x) for x in two_batches(example)]
    finally:
        for hook in hooks:
            hook.remove()
    if not isinstance(results[0], Tensor):
        raise UserError(
            f"{type(module).__name__} returns a {type(results[0]).__name__}; "
            "a split needs one tensor of logits: wrap the module so that it returns only that"
        )
    return outputs


class Whole(nn.Module):
    """Calls the user's module with x alone, so its optional arguments keep their defaults and fx adds nothing to it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class AncestorTracer(fx.Tracer):
    """Opens the modules named in `opened`; everything else is one operation."""

    # Without this, self.table[:n] would be computed while tracing and follow neither .to() nor load_state_dict().
    proxy_buffer_attributes = True

    def __init__(self, opened: set[str]) -> None:
        super().__init__()
        self.opened = opened

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.opened


def untraceable(module: nn.Module, error: Exception) -> Refused:
    """An error that names the module, the line and the reason. The line is the innermost one in a method of a user's module."""
    parts = {id(part): name for name, part in module.named_modules()}
    machinery = nn.Module.__init__.__code__.co_filename
    where = f"{type(module).__name__}.forward"
    for (frame, _), line in zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__)):
        owner = frame.f_locals.get("self")
        if id(owner) in parts and line.filename != machinery:
            name = parts[id(owner)] or "the module"
            place = f"{Path(line.filename).name}:{line.lineno}"
            where = f"`{line.line}` ({place}, {type(owner).__name__}.{line.name}, {name})"
    reason = str(error).strip().split("\n")[0]
    return Refused(f"{where} cannot be traced ({reason}); move that step into a submodule of its own")


def trace_once(module: nn.Module, parent: str) -> tuple[fx.Graph, dict[str, Any]]:
    """Trace `module` with `parent` and all modules above it opened: the operations, and the objects that their targets name."""
    steps = parent.split(".") if parent else []
    opened = {".".join(["module", *steps[:depth]]) for depth in range(len(steps) + 1)}
    whole = Whole(module)
    try:
        graph = AncestorTracer(opened).trace(whole)
    except Exception as error:
        raise untraceable(module, error) from error
    objects = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            found = operator.attrgetter(node.target)(whole)
            node.target = node.target.removeprefix("module.")
            objects[node.target] = found
    return graph, objects


def trace(module: nn.Module, parent: str) -> tuple[fx.Graph, dict[str, Any]]:
    """Call `trace_once` in train() and in eval(), and refuse a module whose operations differ between the two calls."""
    with torch.random.fork_rng([]):  # a forward that makes random tensors must not use up the user's random numbers
        with in_mode(module, False):
            graph, objects = trace_once(module, parent)
        with in_mode(module, True):
            in_training, others = trace_once(module, parent)
    for there, here in zip_longest(in_training.nodes, graph.nodes):
        if not (there and here and same_step(there, here, others, objects)):
            node = there or here
            stack = list(node.meta.get("nn_module_stack", {}).values())
            owners = stack[:-1] if node.op == "call_module" else stack
            where = f"{owners[-1][1].__name__}.forward" if owners else "forward"
            raise Refused(
                f"{describe(node)} in {where} depends on self.training (or on chance), which tracing would freeze; "
                "use a layer that follows train() and eval() (nn.Dropout for F.dropout), or put the step in a submodule"
            )
    return graph, objects


def same_step(one: fx.Node, other: fx.Node, objects: dict[str, Any], others: dict[str, Any]) -> bool:
    """True if two steps are the same operation on the same values, including tensors that the forward pass made itself."""
    first, second = ((node.op, node.target, str((node.args, node.kwargs))) for node in (one, other))
    if first != second:
        return False
    if one.op != "get_attr":
        return True
    left, right = objects[str(one.target)], others[str(other.target)]
    return left is right or (isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right))


def describe(node: fx.Node) -> str:
    """A step as the user would call it."""
    if node.op == "placeholder":
        return "the input"
    if node.op == "call_function":
        return f"{getattr(node.target, '__name__', node.target)}()"
    if node.op == "get_attr" and str(node.target).startswith("_tensor_constant"):
        return "a tensor made"
    return f".{node.target}()" if node.op == "call_method" else repr(node.target)


def told_by_z(node: fx.Node, batches: set[fx.Node]) -> str | None:
    """What `node` asks one of `batches`, if z would give the same answer: its batch "size" or its "device"."""
    asked = node.args[0] if node.args else None
    if not isinstance(asked, fx.Node):
        return None
    if node.target is operator.getitem and node.args[1] == 0:  # x.shape[0], x.size()[0]
        is_shape = asked.target is getattr and asked.args[1] == "shape"
        is_size = asked.op == "call_method" and asked.target == "size" and len(asked.args) == 1 and not asked.kwargs
        return "size" if (is_shape or is_size) and asked.args[0] in batches else None
    if asked not in batches:
        return None
    if node.op == "call_method" and node.target == "size" and (*node.args[1:], *node.kwargs.values()) == (0,):
        return "size"
    return "device" if node.target is getattr and node.args[1] == "device" else None


def asks_only(node: fx.Node) -> bool:
    """True if `node` only fetches a parameter or asks for a shape, so that it can be left out if nobody reads the answer."""
    asked = node.args[0] if node.args else None
    part_of_answer = node.target is operator.getitem and isinstance(asked, fx.Node) and asks_only(asked)
    is_size = node.op == "call_method" and node.target == "size"
    return node.op == "get_attr" or node.target is getattr or is_size or part_of_answer


def separate(graph: fx.Graph, at: str) -> tuple[fx.Graph, fx.Graph]:
    """The operations up to the call of `at`, and those after it as a function of its output z."""
    nodes = list(graph.nodes)
    found = [node for node in nodes if node.op == "call_module" and node.target == at]
    if len(found) != 1:
        raise Refused("it is called by another module than the one that it lies in")
    z = found[0]
    if nodes[-1].args[0] is z:
        raise Refused("nothing is left for the cloud")
    after = nodes.index(z) + 1
    before = set(nodes[:after])
    from_x: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder" or any(source in from_x for source in node.all_input_nodes):
            from_x.add(node)

    cloud = fx.Graph()
    z_in = cloud.placeholder("z")
    copies = {z: cloud.call_method("clone", (z_in,))}  # the docstring of this file says why

    def in_cloud(node: fx.Node) -> fx.Node:
        if node in copies:
            return copies[node]
        known = told_by_z(node, before & from_x)
        if known == "size":
            copies[node] = cloud.call_method("size", (z_in, 0))
        elif known == "device":
            copies[node] = cloud.call_function(getattr, (z_in, "device"))
        elif node in before and node in from_x:
            raise Refused(f"{describe(node)} is also used after it, so z alone does not give the result")
        else:
            copies[node] = cloud.node_copy(node, in_cloud)
        return copies[node]

    # Copy all steps, even one whose result nobody reads, because it may write in place. Questions are copied only when needed.
    for node in nodes[after:]:
        if not asks_only(node):
            in_cloud(node)

    kept: set[fx.Node] = set()  # the edge keeps all steps except those that only the cloud needed and now has itself
    for node in reversed(nodes[:after]):
        needed = node is z or node.op == "placeholder" or any(user in kept for user in node.users)
        if needed or not (asks_only(node) or node in copies):
            kept.add(node)
    edge, twins = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes[:after]:
        if node in kept:
            twins[node] = edge.node_copy(node, twins.__getitem__)
    edge.output(twins[z])
    return edge, cloud


class Half(fx.GraphModule):
    """One side of the cut; its submodules, parameters and buffers are the original's, under the original's names."""

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        twin = super().__deepcopy__(memo)
        for name, part in self.named_modules():  # GraphModule forgets which buffers are not to be saved
            twin.get_submodule(name)._non_persistent_buffers_set = set(part._non_persistent_buffers_set)
        return twin


def assemble(graph: fx.Graph, objects: dict[str, Any], module: nn.Module) -> Half:
    """Make a Half out of parts of `module`. The containers around the parts are new and hold nothing else."""
    saved = set(module.state_dict())
    half = Half(objects, graph)
    for node in graph.nodes:
        if node.op == "get_attr" and node.target not in saved:  # GraphModule would save constants with the weights
            owner, _, name = node.target.rpartition(".")
            half.get_submodule(owner)._non_persistent_buffers_set.add(name)
    originals = set(module.modules())
    for part in half.modules():
        if part not in originals:
            part.training = module.training
    return half


def cut(module: nn.Module, at: str, outputs: list[Any], batch: int, traced: Traced) -> tuple[Half, Half]:
    """The two halves, or Refused with the reason; `outputs` is what `watch` saw of `at`."""
    if not outputs:
        raise Refused("forward never calls it")
    if len(outputs) != 2:
        raise Refused(f"it is called {len(outputs) // 2} times in one forward pass")
    once, twice = outputs
    if not isinstance(once, Tensor):
        raise Refused(f"its output is a {type(once).__name__}, not one tensor")
    if once.shape[:1] != (batch,) or twice.shape != (2 * batch, *once.shape[1:]):
        raise Refused(
            f"its output is {list(once.shape)} for a batch of {batch} and {list(twice.shape)} for {2 * batch}, "
            "but the batch must come first and change nothing else"
        )
    graph, objects = traced(at.rpartition(".")[0])
    edge, cloud = (assemble(part, objects, module) for part in separate(graph, at))
    of_edge = {id(parameter) for parameter in edge.parameters()}
    shared = [name for name, parameter in cloud.named_parameters() if id(parameter) in of_edge]
    if shared:
        raise Refused(f"parameter {shared[0]!r} is used on both sides of it, and two machines cannot share one")
    return edge, cloud


def compare(module: nn.Module, edge: Half, cloud: Half, x: Tensor) -> None:
    """Refuse halves whose result for x is not that of `module`, because tracing has then frozen something that varies."""
    expected = run_quietly(module, x)
    remedy = "a traced forward depends on more than its tensors: move that step into a submodule of its own"
    try:
        found = run_quietly(nn.Sequential(edge, cloud), x)
    except Exception as error:
        raise Refused(f"the halves fail on a batch of {len(x)} ({str(error).splitlines()[0]}); {remedy}") from error
    if found.shape != expected.shape or not torch.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise Refused(f"the halves give another result than the whole on a batch of {len(x)}; {remedy}")


def halves(module: nn.Module, at: str, example: Tensor) -> tuple[Half, Half, tuple[int, ...]]:
    """Edge, cloud and the shape of one image's z for the cut after submodule `at`; `example` is a batch of inputs."""
    watched = watch(module, example)
    if not at or at not in dict(module.named_modules()):
        raise unknown("cut", at, cuts(module, example))
    try:
        outputs = watched.get(at, [])
        edge, cloud = cut(module, at, outputs, len(example), lambda parent: trace(module, parent))
        for x in two_batches(example):
            compare(module, edge, cloud, x)
    except Refused as refusal:
        possible = ", ".join(name for name in cuts(module, example) if name != at) or "none"
        raise UserError(f"cannot cut after {at!r}: {refusal}; possible cuts: {possible}") from refusal
    return edge, cloud, tuple(outputs[0].shape[1:])


def split(module: nn.Module, at: str, example: Tensor) -> SplitModel:
    """Cut a user's own module after its submodule `at` ("layer1", "layer2.0.conv1").

    `example` is a batch of inputs [b, *x_shape]; it gives the shapes, and the halves must agree with the module on it.
    The halves share their parameters with `module` and keep its dotted names. `cuts` lists where it can be cut.
    """
    edge, cloud, z_shape = halves(module, at, example)
    model = SplitModel(edge, cloud, z_shape, tuple(example.shape[1:]))
    model.training = module.training  # not train(), which would also set submodules that the user froze
    return model


def every_split(module: nn.Module, example: Tensor) -> Iterator[tuple[str, SplitModel]]:
    """Each cut of `module` by its name, as `split` would make it, in the order in which the submodules finish."""
    traced = cache(lambda parent: trace(module, parent))
    for name, outputs in watch(module, example).items():
        try:
            edge, cloud = cut(module, name, outputs, len(example), traced)
            for x in two_batches(example):
                compare(module, edge, cloud, x)
        except Refused:
            continue
        yield name, SplitModel(edge, cloud, tuple(outputs[0].shape[1:]), tuple(example.shape[1:]))


def cuts(module: nn.Module, example: Tensor) -> list[str]:
    """The submodules after which `module` can be cut, in the order in which they finish."""
    traced = cache(lambda parent: trace(module, parent))  # all children of one parent are found in the same list
    possible = []
    for name, outputs in watch(module, example).items():
        try:
            cut(module, name, outputs, len(example), traced)
        except Refused:
            continue
        possible.append(name)
    return possible
