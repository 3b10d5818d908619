"""If this fails, a user's default dtype or device changes results, or corrupts memory. Every new
tensor names its dtype and its device.

PyTorch fills in what a call leaves out from the program's state: `torch.set_default_dtype`,
`torch.set_default_device`, `with torch.device(...)`. A kernel that writes float32 into a buffer of
the default dtype writes past its end.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Both: dtype and device.
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"),
}
# Types of tensors: their constructors take no dtype. Files and buffers: these take no device.
NO_CONSTRUCTORS = {"Tensor", "FloatTensor", "HalfTensor", "BFloat16Tensor", "LongTensor"}
ON_THE_CPU = {"frombuffer", "from_file"}


def problems(source: str) -> list[str]:
    """The line and the call of every tensor whose dtype or device depends on PyTorch's defaults.

    The device of a module's parameter is the caller's choice: `with torch.device("meta")` makes a
    model without memory. Its dtype is not.
    """
    tree = ast.parse(source)
    parameters = {
        id(argument)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "nn.Parameter"
        for argument in node.args
    }
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        *of, name = ast.unparse(node.func).split(".")
        given = {keyword.arg for keyword in node.keywords}
        if of == ["torch"] and name in NO_CONSTRUCTORS:
            needed = {"a factory"}
        elif of == ["torch"] and name in FACTORIES:
            needed = {"dtype"} if id(node) in parameters else {"dtype", "device"}
        elif (of == ["torch"] and name in ON_THE_CPU) or ".".join([*of, name]) in (
            *("nn.Linear", "nn.Embedding"),
        ):
            needed = {"dtype"}
        else:
            continue
        if None not in given and needed - given:
            missing = " and ".join(sorted(needed - given))
            found.append(f"{node.lineno}: {ast.unparse(node)} lacks {missing}")
    return found


SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("ringfa3", "train")
    for path in (ROOT / folder).rglob("*.py")
    if "bench" not in path.parts
)


@pytest.mark.parametrize("folder", ["ringfa3", "train"])
def test_every_tensor_names_its_dtype_and_device(folder: str) -> None:
    found = [
        f"{path}:{problem}"
        for path in SOURCES
        if path.parts[0] == folder
        for problem in problems((ROOT / path).read_text())
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.empty(size, device=device)", "dtype"),
        ("torch.tensor(counts)", "device and dtype"),
        ("nn.Parameter(torch.ones(width))", "dtype"),
        ("nn.Parameter(torch.ones(width, dtype=torch.float32))", None),
        ("torch.zeros(1, dtype=torch.int32, device=device)", None),
        ("x.new_empty(3)", None),
    ],
)
def test_the_rule(source: str, missing: str | None) -> None:
    found = problems(source)
    assert len(found) == (missing is not None)
    assert missing is None or found[0].endswith(f"lacks {missing}")
