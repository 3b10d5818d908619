"""If this fails, the tables of scores measure other inputs than they name. Inputs with other scores
than N(0,1): what they promise holds after rounding to bf16 and fp16."""

from __future__ import annotations

import pytest
import torch

from ringfa3.bench.common.cases import BACKWARD, FORWARD, FULL, Case
from ringfa3.bench.common.problem import Problem, make_problem
from ringfa3.bench.common.scores import LARGE, RATE, SCORES, TINY

DTYPES = [torch.bfloat16, torch.float16]
TOKENS = 1024


def problem(name: str | None, d: int, dtype: torch.dtype, tokens: int = TOKENS) -> Problem:
    case = Case("scores", str(name), (tokens,), 4, 2, d, FULL, scores=name)
    return make_problem(case, BACKWARD, dtype, torch.device("cpu"))


def scores(of: Problem) -> torch.Tensor:
    """softmax_scale * q k^T of the first head, (t, t), in float64."""
    q, k = (x[0, :, 0].double() for x in (of.q, of.k))
    return q @ k.T * q.shape[-1] ** -0.5


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sigma", [1, 2, 4, 8, 16])
def test_sigma_is_the_standard_deviation_of_scores(sigma: int, dtype: torch.dtype) -> None:
    """To 2%; q is a multiple of a standard normal one, without rounding."""
    found = problem(f"sigma {sigma}", 64, dtype)
    assert scores(found).std().item() == pytest.approx(sigma, rel=0.02)
    plain = problem(None, 64, dtype)
    assert torch.equal(found.q, plain.q * sigma)
    for name in ("k", "v", "dout"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(("name", "nats"), [("6 nats up", 6), ("6 nats down", -6)])
def test_slopes_are_linear_in_the_key(name: str, nats: int, d: int, dtype: torch.dtype) -> None:
    """6 nats to 0.2% with every 128 keys of 16k, exactly linear, beside N(0,1) to 3%."""
    found = problem(name, d, dtype, 16384)
    k = found.k[0, :, 0, :2].double()
    slope = k @ found.q[0, 0, 0, :2].double() * d**-0.5
    steps = slope.diff()
    assert torch.allclose(steps, steps[0].expand_as(steps), rtol=1e-9)
    assert 128 * steps[0].item() == pytest.approx(nats, rel=2e-3)
    assert torch.equal(found.q[..., :2], found.q[:, :1, :1, :2].expand_as(found.q[..., :2]))
    rest = found.q[0, :256, 0, 2:].double() @ found.k[0, :256, 0, 2:].double().T * d**-0.5
    assert rest.std().item() == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_sink_is_8_nats_above_the_other_keys(d: int, dtype: torch.dtype) -> None:
    """The mean difference over rows, to 0.2 nats: both sides are N(0,1)."""
    found = scores(problem("sink", d, dtype))
    assert (found[:, 0].mean() - found[:, 1:].mean()).item() == pytest.approx(8, abs=0.2)
    assert found[:, 1:].std().item() == pytest.approx(1, rel=0.05)


def test_one_row_in_16_is_steep() -> None:
    """12 nats to 5%, the others 1."""
    found = scores(problem("steep rows", 64, torch.bfloat16))
    steep = torch.arange(TOKENS) % 16 == 0
    assert found[steep].std().item() == pytest.approx(12, rel=0.05)
    assert found[~steep].std().item() == pytest.approx(1, rel=0.05)


def test_equal_scores_are_equal_and_not_zero() -> None:
    found = scores(problem("equal", 64, torch.bfloat16))
    assert torch.equal(found, found[:, :1].expand_as(found))
    assert found.abs().min() > 0


def test_outliers_are_those_of_flashattention_3() -> None:
    """N(0,1) + N(0,100) * Bernoulli(0.001): variance 1.1 to 3%, and single large elements."""
    found = problem("outliers", 256, torch.float16)
    for x in found.inputs:
        x = x.double()
        assert x.var().item() == pytest.approx(1.1, rel=0.03)
        assert (x.abs() > 6).double().mean().item() == pytest.approx(0.55 * RATE, rel=0.3)


def test_large_and_tiny_inputs_are_scaled() -> None:
    plain = problem(None, 64, torch.bfloat16)
    large, tiny = problem("large V", 64, torch.bfloat16), problem("tiny", 64, torch.bfloat16)
    assert torch.equal(large.v, plain.v * LARGE)
    assert torch.equal(large.k, plain.k)
    for x, y in zip(tiny.inputs, plain.inputs, strict=True):
        assert torch.equal(x, y * TINY)


@pytest.mark.parametrize("name", SCORES)
def test_seeds_differ_and_one_seed_does_not(name: str) -> None:
    case = Case("scores", name, (64,), 2, 2, 64, FULL, scores=name)
    first, again, other = (
        make_problem(case, FORWARD, torch.bfloat16, torch.device("cpu"), seed) for seed in (0, 0, 1)
    )
    assert all(torch.equal(x, y) for x, y in zip(first.inputs, again.inputs, strict=True))
    assert not torch.equal(first.v, other.v)
