"""If this fails, mixtures of experts under a ring balance their experts wrongly. The balance of
experts over a ring, against one process with transformers' own attention.

The sum of the ranks' losses, each with its auxiliary loss, and every summed gradient agree to 1e-12
of the largest number in float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers as hf
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral

from ringfa3 import plan_context
from ringfa3.hf.router_loss import let_balance
from tests.support.double import in_double, recomputed_in_double
from tests.support.hf_models import EXPERTS, SIZES, difference, model_of, tokens
from tests.support.ranks import Ranks

pytestmark = pytest.mark.usefixtures("in_float64")
BOUND = 1e-12
CU = [0, 3, 20, 41]
COEFFICIENT = 3.0  # the auxiliary gradient is then as large as the other
IDS = tokens(1, CU[-1])
OWN = {
    "gpt-oss": modeling_gpt_oss.load_balancing_loss_func,
    "mixtral": modeling_mixtral.load_balancing_loss_func,
}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}


def balanced(name: str, attention: str) -> Any:
    changes = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return model_of(name, attention, **changes).train()


def shifted() -> torch.Tensor:
    labels = IDS.roll(-1, 1)
    labels[0, [end - 1 for end in CU[1:]]] = -100
    return labels


def figures(model: Any, loss: torch.Tensor, auxiliary: torch.Tensor) -> dict[str, torch.Tensor]:
    loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in
             model.named_parameters()}  # fmt: skip
    return {"loss": loss.detach(), "auxiliary": auxiliary.detach(), **grads}


def one_process(name: str) -> dict[str, torch.Tensor]:
    """The documents one by one: gpt-oss' eager attention would join them. The auxiliary loss is
    that of the router logits of all."""
    model, labels = balanced(name, "eager"), shifted()
    parts = [slice(*ends) for ends in itertools.pairwise(CU)]
    made = [model(IDS[:, part], use_cache=False) for part in parts]
    logits = torch.cat([x.logits[0] for x in made])
    count = (labels != -100).sum()
    of_layers = tuple(torch.cat(x) for x in zip(*(x.router_logits for x in made), strict=True))
    auxiliary = OWN["mixtral"](of_layers, 4, 2)
    loss = F.cross_entropy(logits, labels[0], reduction="sum") / count + COEFFICIENT * auxiliary
    return figures(model, loss, auxiliary)


def _in_a_ring(group: dist.ProcessGroup, name: str, how: str) -> dict[str, torch.Tensor]:
    """By the model's own loss, or by one that adds `aux_loss` of its outputs; sums of all ranks."""
    plan, labels, model = plan_context(CU, group), shifted(), balanced(name, "ringfa3")
    if how == "checkpointing":
        model.gradient_checkpointing_enable(
            {"use_reentrant": False, "context_fn": recomputed_in_double()}
        )
    own = plan.shard(labels, 1)
    given = {"position_ids": plan.positions[None], "use_cache": False, "ringfa3_plan": plan}
    if how == "aux_loss":
        made = model(plan.shard(IDS, 1), **given)
        loss = F.cross_entropy(made.logits[0], own[0], reduction="sum") / (labels != -100).sum()
        loss = loss + COEFFICIENT * made.aux_loss
    else:
        count = (labels != -100).sum()
        # `forward`, as a wrapper such as PEFT's calls it
        called = model.forward if how == "forward" else model
        given |= {"labels": own, "shift_labels": own, "num_items_in_batch": count}
        made = called(plan.shard(IDS, 1), **given)
        loss = made.loss
    found = figures(model, loss, made.aux_loss)
    for value in found.values():
        dist.all_reduce(value, group=group)
    return found


@pytest.mark.parametrize(
    ("name", "world", "how"),
    [
        ("gpt-oss", 2, "loss"),
        ("qwen3-moe", 3, "loss"),
        ("qwen3-moe", 2, "forward"),
        ("gpt-oss", 3, "aux_loss"),
        ("qwen3-moe", 2, "checkpointing"),
    ],
)
def test_losses_and_gradients_are_in_a_ring(ranks: Ranks, name: str, world: int, how: str) -> None:
    expected = one_process(name)
    assert float(expected["auxiliary"]) > 1.0  # experts are not balanced
    for found in ranks.run(world, in_double, _in_a_ring, name, how):
        errors = {n: difference(found[n], expected[n]) for n in expected}
        assert max(errors.values()) <= BOUND, max(errors.items(), key=lambda item: item[1])


def test_without_a_plan_a_model_computes_its_own() -> None:
    """Also after a ring has replaced the function: bit-equal, on one rank 1e-12."""
    model, plan = balanced("gpt-oss", "ringfa3"), plan_context(CU[-1])
    given = {"position_ids": plan.positions[None], "use_cache": False}
    ring = model(IDS, ringfa3_plan=plan, **given).aux_loss
    assert modeling_gpt_oss.load_balancing_loss_func is not OWN["gpt-oss"]
    made = model(IDS, **given)
    assert made.aux_loss == OWN["gpt-oss"](made.router_logits, 4, 2)
    assert difference(ring, made.aux_loss) <= BOUND


def test_another_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without a function, and of one whose function is another."""
    refused = "output_router_logits=True with ringfa3_plan: .* has no load_balancing_loss_func like"
    with pytest.raises(ValueError, match=refused):
        let_balance(model_of("llama", "ringfa3"))

    def squared(*inputs: Any) -> torch.Tensor:
        return OWN["mixtral"](*inputs) ** 2  # type: ignore[no-any-return]

    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", squared)
    plan = plan_context(CU)
    config = hf.MixtralConfig(**{**SIZES, **MIXTRAL, "output_router_logits": True})
    model = hf.MixtralForCausalLM._from_config(config, attn_implementation="ringfa3", **EXPERTS)
    given = {"position_ids": plan.positions[None], "use_cache": False, "ringfa3_plan": plan}
    with pytest.raises(ValueError, match=f"{refused}.*: pass output_router_logits=False"):
        model(IDS, **given)
    assert model(IDS, output_router_logits=False, **given).logits.shape == (1, CU[-1], 97)
    monkeypatch.undo()
    monkeypatch.setattr(modeling_mixtral, "load_balancing_loss_func", OWN["mixtral"])
    assert model(IDS, **given).aux_loss > 1.0
