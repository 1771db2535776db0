"""Writes docs/api.md, the page of everything that a program may import, from signatures and docstrings.

    python docs/make_api.py            a test compares the page with what this makes

The source is parsed and not imported, so the page is the same on every machine.
"""

import ast
from pathlib import Path

import splitveil

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "api.md"
FURTHER = {
    "Test what leaks": {"testing": ("assert_leakage",)},
    "Read results": {
        "auditing/report": ("AuditReport",),
        "evaluation/summary": ("read_summary", "Summary", "AttackResult", "WorstCase", "Certificate", "RaisedFlag"),
        "evaluation/verdict": ("verdict", "Verdict"),
        "report/__init__": ("write_report",),
    },
    "Adapt after the release": {
        "adaptation/adapter": ("Adapter", "AdapterConfig"), "adaptation/client": ("Client",),
        "adaptation/attack_again": ("attack_again", "Again"), "adaptation/retention": ("Retention",),
        "adaptation/replay": ("Replay",), "adaptation/message": ("digest_of_edge",), "data/corruptions": ("corrupted",),
    },
    "Register a method of your own": {
        "registry": ("Registry",), "options": ("option", "UserError"), "defences/__init__": ("Defence", "AttackHints", "Batch"),
        "attacks/__init__": ("Attack", "AttackConfig"), "attacks/threat": ("ThreatModel", "Access", "Observation"),
        "surrogates/__init__": ("Surrogate", "SurrogateOutput"), "metrics/__init__": ("per_image",),
    },
}  # fmt: skip
"""Names beside those of `import splitveil`, by section and file."""
Named = ast.FunctionDef | ast.ClassDef


def parsed(file: str) -> ast.Module:
    path = ROOT / "splitveil" / f"{file}.py"
    return ast.parse((path if path.exists() else ROOT / "splitveil" / file / "__init__.py").read_text(encoding="utf-8"))


def named(file: str, name: str) -> Named:
    """The function or class of this name in a file."""
    return next(node for node in parsed(file).body if isinstance(node, Named) and node.name == name)


def signature(function: ast.FunctionDef, name: str, bound: bool) -> str:
    """As it is called: without `self`, with types and defaults."""
    arguments = ast.parse(ast.unparse(function)).body[0].args  # type: ignore[attr-defined]
    if bound:
        arguments.args = arguments.args[1:]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and function.name != "__init__" else ""
    return f"{name}({ast.unparse(arguments)}){returns}"


def text(node: Named) -> str:
    """The docstring as Markdown: its indented parts stay as they are written."""
    return ast.get_docstring(node) or ""


def is_public(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and bool(ast.get_docstring(node))


def attributes(node: ast.ClassDef) -> list[str]:
    """Fields with the string below each, as `name: type`, what it means."""
    found = []
    for field, below in zip(node.body, [*node.body[1:], None]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and not field.target.id.startswith("_"):
            told = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
            meaning = " ".join(below.value.value.split()) if told else ""  # type: ignore[union-attr]
            default = "" if field.value is None else f" = {ast.unparse(field.value)}"
            found.append(f"- `{field.target.id}: {ast.unparse(field.annotation)}{default}`{' ' if meaning else ''}{meaning}")
    return found


def entry(home: str, name: str, file: str) -> list[str]:
    """The part of the page on one name."""
    node = named(file, name)
    if isinstance(node, ast.FunctionDef):
        return [f"### {home}.{name}", "```python", signature(node, name, bound=False), "```", text(node), ""]
    methods = {method.name: method for method in node.body if isinstance(method, ast.FunctionDef)}
    head = signature(methods["__init__"], name, bound=True) if "__init__" in methods else f"class {name}"
    lines = [f"### {home}.{name}", "```python", head, "```", text(node), "", *attributes(node)]
    for method in methods.values():
        if is_public(method):
            is_property = any(ast.unparse(word).endswith("property") for word in method.decorator_list)
            bound = not any(ast.unparse(word) == "staticmethod" for word in method.decorator_list)
            shown = method.name if is_property else signature(method, method.name, bound)
            lines.append(f"- `.{shown}` {' '.join(text(method).split())}")
    return [*lines, ""]


def page() -> str:
    lines = [
        "# What a program may import", "",
        "Made by `python docs/make_api.py` from signatures and docstrings; do not edit. Options of methods are on the pages of",
        "[attacks](attacks/README.md), [defences](defences/README.md) and [surrogates](surrogates/README.md).", "",
        "## import splitveil", "",
    ]  # fmt: skip
    for name in splitveil.__all__:
        if name in splitveil._HOMES:
            lines += entry("splitveil", name, splitveil._HOMES[name].replace(".", "/"))
        else:
            lines += entry(f"splitveil.{name}", "build", name)
    for section, files in FURTHER.items():
        lines += [f"## {section}", ""]
        for file, names in files.items():
            home = f"splitveil.{file.removesuffix('/__init__').replace('/', '.')}"
            lines += [line for name in names for line in entry(home, name, file)]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
