"""If this fails, a part cannot be changed without the parts that should not know it. Imports inside
ringfa3 point one way. For train see tests/train."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports from its own package, and from those before it.
ORDER = [
    "errors",
    "numa",
    "threads",
    "custom_op",
    "tensor_cache",
    "validation",
    "keywords",
    "masks",
    "planning",
    "quantisation",
    "pass_interface",
    "build",
    "kernels",
    "attention_op",
    "straight_through",
    "schedules",
    "host",
    "symmetric",
    "ring",
    "functional",
    "attention",
    "hf",
    "doctor",
    "__init__",
    "bench",
]
# What a package's `__init__.py` exports, besides that of ringfa3.
PUBLIC_NAMES = {
    "hf": [
        "from ringfa3.hf.registration import lazy_names, register",
        "__all__ = ['ContextParallel', 'context_parallel', 'register', 'shard_batch', 'verify']",
        "__getattr__ = lazy_names()",
    ]
}


def dotted(path: Path) -> str:
    """The name of a module by its path."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {dotted(path): path for path in sorted((ROOT / "ringfa3").rglob("*.py"))}


def imported(module: str) -> set[str]:
    """Dotted names of everything that a module imports, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("module", MODULES)
def test_modules_import_only_packages_before_theirs(module: str) -> None:
    package = "__init__" if module == "ringfa3" else module.split(".")[1]
    assert package in ORDER, f"give {package} its place in ORDER"
    names = imported(module)
    for name in names:
        if name.startswith("ringfa3."):
            other = name.split(".")[1]
            other = other if other in ORDER else "__init__"  # a public name
            assert ORDER.index(other) <= ORDER.index(package), f"{module} imports {name}"
    assert not {name.split(".")[0] for name in names} & {"train", "hydra", "omegaconf"}


def test_modules_form_no_cycle() -> None:
    edges = {
        module: {
            target
            for name in imported(module)
            for target in (name, name.rpartition(".")[0])
            if target in MODULES and target != module and not module.startswith(target + ".")
        }
        for module in MODULES
    }
    while leaves := {m for m, targets in edges.items() if not targets & edges.keys()}:
        edges = {m: targets for m, targets in edges.items() if m not in leaves}
    assert not edges, f"a cycle among {sorted(edges)}"


def _reached(modules: set[str]) -> set[str]:
    """The modules, and all that they import, directly or not."""
    reached, found = set(), modules
    while found:
        reached |= found
        names = {name for module in found for name in imported(module)}
        found = (names | {name.rpartition(".")[0] for name in names}) & MODULES.keys() - reached
    return reached


def test_messages_import_no_nvlink_code() -> None:
    messages = {f"ringfa3.ring.{name}" for name in ("agreement", "p2p_pass", "store_monitor")}
    reached = _reached(messages)
    assert "ringfa3.ring.p2p" in reached
    assert not [module for module in reached if module.startswith("ringfa3.symmetric")]


def test_planning_communicates_through_ring_alone() -> None:
    """Planning uses process groups to find out who takes part, and calls no collective."""
    used = {
        node.attr
        for module, path in MODULES.items()
        if module.startswith("ringfa3.planning.")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dist"
    }
    assert used <= {
        "GroupMember",
        "ProcessGroup",
        "get_process_group_ranks",
        "get_rank",
        "get_world_size",
        "group",
        "is_available",
        "is_initialized",
        "is_torchelastic_launched",
    }


@pytest.mark.parametrize(
    "package",
    [
        "masks",
        "planning",
        "quantisation",
        "build",
        "kernels",
        "schedules",
        "symmetric",
        "ring",
        "hf",
        "bench",
    ],
)
def test_a_package_says_what_it_is_for_what_it_takes_and_what_it_imports(package: str) -> None:
    """In a docstring of three parts, and nothing else but public names."""
    tree = ast.parse((ROOT / "ringfa3" / package / "__init__.py").read_text())
    docstring = ast.get_docstring(tree)
    assert docstring is not None
    code = [ast.unparse(statement) for statement in tree.body[1:]]
    assert code == PUBLIC_NAMES.get(package, [])
    _, takes, *rest = (line for line in docstring.splitlines() if line)
    imports = " ".join(rest)
    assert takes.startswith("In: ")
    assert imports.startswith("Imports ")
    if package == "bench":  # it may import everything
        return
    actual = {
        name.split(".")[1]
        for module in MODULES
        if module.startswith(f"ringfa3.{package}.")
        for name in imported(module)
        if name.startswith("ringfa3.")
    }
    assert actual - {package} == set(re.findall(r"`(\w+)`", imports))
