"""If this fails, calls that start in C++ accept wrong arguments. Arguments of calls that the host
library starts: it takes none that Python refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ringfa3 import flash_attn_func, flash_attn_varlen_func, host
from tests.support.fake_kernels import FakeKernels
from tests.support.host_calls import in_terms
from tests.test_arguments import WRONG, dense, varlen

Q, K = torch.randn(1, 6, 4, 64).bfloat16(), torch.randn(1, 6, 2, 64).bfloat16()
CU = torch.tensor([0, 6], dtype=torch.int32)
VALUES: dict[str, list[Any]] = {
    "causal": [True, False, np.True_],
    "deterministic": [True, False],
    "return_lse": [True, False, np.False_],
    "softmax_scale": [None, 0.5, 1, np.float32(0.5), 0.0, -1.0, float("nan"), float("inf"),
                      2.0**-64, 2.0**-65, 2.0**65, 10**400],
    "window_size": [(-1, -1), (3, 0), [3, 0], (None, None), (3, None), (None, 0), (-2, 0), (1,),
                    (1, 1, 1), ((1 << 63) - 1, 0), (1 << 63, 0), (np.int64(3), 0)],
    "precision": ["native", "fp4", "Native"],
    "sink": [None, torch.zeros(3), torch.zeros(4).double()],
}  # fmt: skip
for _name, _calls, _values in WRONG:
    if dense in _calls or varlen in _calls:
        VALUES[_name] += _values
CASES = [(name, value) for name, values in VALUES.items() for value in values]


def outcome(**options: Any) -> list[object]:
    """What both functions give: shapes of the results, or the type and text of an error."""
    found: list[object] = []
    for call in (
        lambda: flash_attn_func(Q, K, K.clone(), **options),
        lambda: flash_attn_varlen_func(Q[0], K[0], K[0].clone(), CU, CU, 6, 6, **options),
    ):
        try:
            results = call()
        except (TypeError, ValueError) as error:
            found.append((type(error), str(error)))
        else:
            results = results if isinstance(results, tuple) else (results,)
            found.append([tuple(x.shape) for x in results])
    return found


@pytest.mark.parametrize(("name", "value"), CASES)
def test_both_hosts_take_the_same_values(kernels: FakeKernels, name: str, value: Any) -> None:
    """And launch the same words with them, so none reads a value as another one."""
    found = []
    for which in host.HOSTS:
        host.select(which)
        kernels.take()
        results = outcome(**{name: value})
        words = [in_terms(x, {})[:2] for x in kernels.take()]  # without addresses
        found.append((results, words))
    assert found[0] == found[1]


def test_words_of_flash_attention_4_are_started_in_cpp(kernels: FakeKernels) -> None:
    """Its window (None, None) and its neutral keywords cost no second look by Python."""
    options: dict[str, Any] = {"window_size": (None, None), "softcap": 0.0, "num_splits": 1}
    for _ in range(3):
        flash_attn_func(Q, K, K.clone(), causal=True, **options)
    assert host.attend is not None
    window: Any = (None, None)
    assert (
        host.attend(Q, K, K.clone(), None, True, window, False, False, "native", None) is not None
    )
