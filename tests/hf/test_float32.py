"""If this fails, models of transformers in float32 are inexact. Models of transformers in float32,
the dtype of tests of users.

The reference is the same model with eager attention in float64: logits and gradients differ by at
most 1e-5 of the largest number. Eager attention in float32 has an error of 1e-6.
"""

from __future__ import annotations

import pytest

from tests.support.double import double
from tests.support.hf_models import CONFIGS, Results, model_of, results, tokens, worst_difference


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_is_near_float64(name: str) -> None:
    model, ids = model_of(name, "ringfa3"), tokens(2, 13)
    made = results(model, ids)
    with double():
        exact = model_of(name, "eager")
        exact.load_state_dict(model.state_dict())
        expected = results(exact, ids)
    assert worst_difference(wide(made), expected) <= 1e-5


def wide(made: Results) -> Results:
    logits, grads = made
    return logits.double(), {name: grad.double() for name, grad in grads.items()}
