"""Whether a model may run under a ring: nothing but attention may let its tokens depend on others.

A rank holds some tokens, and not in their order. Convolutions, recurrences, pooling, attention that
bypasses RingFA3, and positions counted from a token's index would use these tokens alone, without
an error. No list of layers could be complete, so the model itself is asked:
its forward runs on a few tokens, one of which is NaN, while attention is a function of each token
alone. Where arithmetic mixes tokens, NaN reaches others, whatever the weights are: 0 * NaN is NaN.
It does not pass through an index or a discrete choice among tokens. A second forward finds those:
all its tokens are equal, and so are their positions, but their results are not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from ringfa3.hf.router_loss import asks_for_router_logits
from ringfa3.planning.context_plan import plan_context

TOKENS = 13
ENCODED = 17  # of an encoder whose decoder has TOKENS; so shapes show which keys a layer has
POISONED = -7  # counted from the last token
TOKEN = 3  # an id that is seldom one of padding or of an image

FAILURES = torch.OutOfMemoryError, dist.DistError  # of a device or a network, not of the model
UNEQUAL = "the index of a token, not on its position_ids, or on a choice among tokens"

_State = tuple[tuple[object, ...], ...]
# By the arguments of `check_model`.
_passed: defaultdict[tuple[str, bool, bool], WeakKeyDictionary[torch.nn.Module, _State]]
_passed = defaultdict(WeakKeyDictionary)


class Probe:
    """The attention of a forward that looks for layers that mix tokens.

    It is given in place of a plan or of a mask. In place of a plan, it is one whose documents have
    one token each. A layer that exchanges tokens by its plan does not mix documents, so it passes.

    query_plan, key_plan: of an encoder-decoder, in place of the plans of its decoder and encoder.
    """

    def __init__(
        self, constant: bool, keyword: str, pairs: bool = False, tokens: int = TOKENS
    ) -> None:
        self._plan = plan_context(range(tokens + 1), (0, 1))
        self.constant = constant  # all tokens have one id and one position
        self.keyword = keyword  # "ringfa3_plan" or "ringfa3_mask"
        self.problem: str | None = None  # the first one
        self.poisoned = False  # whether attention got the NaN
        self.query_plan = self if pairs else None
        self.key_plan = Probe(constant, keyword, tokens=ENCODED) if pairs else None
        if self.key_plan is not None:
            self.key_plan.report = self.report  # type: ignore[method-assign]

    def attend(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        crosses: bool,
    ) -> torch.Tensor:
        """(b, s, h, d_v) of q, k, v (b, heads, s, head dim): each query gets its own value.

        crosses: whether the layer of a decoder counts as cross-attention.
        """
        self.poisoned |= bool(q[0, :, POISONED].isnan().any())
        if self.query_plan is self and crosses != (q.shape[2] != k.shape[2]):
            self.report(
                f"{type(module).__name__} of the decoder attends to its own tokens without a "
                "causal mask, or to the encoder's with one"
            )
        if self.constant and any(_rows_differ(x) for x in (q, k, v)):
            self.report(f"{type(module).__name__} gets tokens that depend on {UNEQUAL}")
        own = v[:, :, -q.shape[2] :].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return own.transpose(1, 2).contiguous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_plan"], name)

    def report(self, problem: str) -> None:
        self.problem = self.problem or problem

    def check_layer(self, name: str, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        """After a forward. Layers inside of this one come first, so the first report names one."""
        if _spread(outputs) and not _spread(inputs):
            where = f"{name} ({type(module).__name__})" if name else type(module).__name__
            self.report(f"{where} mixes tokens outside RingFA3's attention with {self.keyword}")

    def check_results(self, outputs: Any) -> None:
        """Checks that poison has reached attention; in a ring, that each output of the model has a
        row for each token, and that poison reached it."""
        if self.keyword == "ringfa3_mask":
            if not self.poisoned:
                self.report("its attention does not get the tokens of get_input_embeddings()")
            return
        named = outputs.items() if isinstance(outputs, dict) else enumerate(outputs)
        for name, value in named:
            for x in pytree.tree_leaves(value):
                if isinstance(x, torch.Tensor) and x.is_floating_point() and not _by_token(x):
                    self.report(
                        f"its output {name} of shape {tuple(x.shape)} has no row per token: ask "
                        "for outputs with a row per token, and not for router losses"
                    )
        if self.key_plan is not None and not (self.poisoned and self.key_plan.poisoned):
            self.report("attention of its encoder or decoder does not get embedded tokens alone")
        results = _by_token(outputs)
        if not results or not results[0][POISONED].isnan().any():
            self.report("its outputs do not depend on get_input_embeddings()")
        if self.constant and any(_rows_differ(x[None, None]) for x in results):
            self.report(f"its outputs depend on {UNEQUAL}")


def check_model(
    model: torch.nn.Module,
    keyword: str = "ringfa3_plan",
    positions: bool = True,
    pairs: bool = False,
) -> None:
    """Raises ValueError: `model` mixes tokens outside of attention; FAILURES as they come.

    A model that passed is checked again after it changed. The two forwards have TOKENS
    tokens, no gradient, evaluation mode and no compiler.

    Args:
        keyword: "ringfa3_plan", or "ringfa3_mask" on one device.
        positions: whether the model may depend on positions by position_ids alone. Without,
            there is no second forward.
        pairs: `model` is an encoder-decoder, whose plan is a cross plan.
    """
    passed = _passed[keyword, positions, pairs]
    if passed.get(model) == _state(model):
        return
    for constant in (False, True) if positions else (False,):
        probe, cause, failure = Probe(constant, keyword, pairs), None, ""
        try:
            with torch.no_grad(), _watched(model, probe):
                probe.check_results(_run(model, probe, positions and not pairs))
        except FAILURES:
            raise
        except Exception as problem:
            cause = problem
            failure = f"a forward with position_ids raises {type(problem).__name__}: {problem}"
        if probe.problem is not None or cause is not None:
            where = "a ring" if keyword == "ringfa3_plan" else "a mask"
            verdict = "would be wrong under" if probe.problem else "cannot be checked for"
            raise ValueError(
                f"{keyword}: {type(model).__name__} {verdict} {where}: "
                f"{(probe.problem or failure).rstrip('.')}. Run it without {keyword}, on whole "
                "documents"
            ) from cause
    for module in model.modules():
        if hasattr(module, "config"):  # a model inside is called with the keyword, too
            passed[module] = _state(module)


def passed_as_part(model: torch.nn.Module) -> bool:
    """Whether `check_model` has passed an encoder-decoder with this part, which is still so."""
    return _passed["ringfa3_plan", True, True].get(model) == _state(model)


def _state(model: torch.nn.Module) -> _State:
    """What decides how `model` computes: its modules, their forwards, hooks and attention."""
    return tuple(
        (
            ref(x),  # not an id, which a later module may have again
            id(getattr(x.forward, "__func__", x.forward)),
            getattr(getattr(x, "config", None), "_attn_implementation", None),
            *x._forward_pre_hooks,
            *x._forward_hooks,
        )
        for x in model.modules()
    )


def _run(model: torch.nn.Module, probe: Probe, with_positions: bool) -> Any:
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    ids = torch.full((1, ENCODED), TOKEN, dtype=torch.int64, device=device)
    positions = torch.arange(TOKENS, dtype=torch.int64, device=device)[None]
    if probe.constant:  # not 0, where a recurrence may begin anew
        positions = torch.ones_like(positions)
    given: dict[str, Any] = {"use_cache": False, probe.keyword: probe}
    if probe.key_plan is None:
        given["input_ids"] = ids[:, :TOKENS]
    else:
        given |= {"input_ids": ids, "decoder_input_ids": ids[:, :TOKENS]}
    if with_positions:
        given["position_ids"] = positions
    if asks_for_router_logits(model, {}):  # a call that does not is the only one allowed
        given["output_router_logits"] = False
    return model(**given)


@contextmanager
def _watched(model: torch.nn.Module, probe: Probe) -> Iterator[None]:
    """In evaluation mode, uncompiled, with a NaN token of each part, and with `check_layer`."""

    def poison(_: object, inputs: object, outputs: torch.Tensor) -> torch.Tensor:
        outputs = outputs.clone()
        rows = outputs.view(-1, *outputs.shape[-1:])
        rows[POISONED:][:1] = torch.nan  # none of a few tokens that a model adds
        return outputs

    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        parts: list[Any] = [model]
        if probe.key_plan is not None:
            parts = [model.get_encoder(), model.get_decoder()]  # type: ignore[operator]
        for embeddings in {part.get_input_embeddings() for part in parts}:
            stack.callback(embeddings.register_forward_hook(poison).remove)
        for name, module in model.named_modules():

            def check(layer: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
                probe.check_layer(name, layer, (args, kwargs), out)

            stack.callback(module.register_forward_hook(check, with_kwargs=True).remove)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def _by_token(outputs: object) -> list[torch.Tensor]:
    """The floating-point tensors with a row a token, as (tokens, ...)."""
    if not isinstance(outputs, torch.Tensor):
        leaves = (x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor))
        return [x for leaf in leaves for x in _by_token(leaf)]
    if not outputs.is_floating_point():
        return []
    if outputs.shape[:2] in ((1, TOKENS), (1, ENCODED)):
        return [outputs[0].flatten(1) if outputs.dim() > 2 else outputs[0, :, None]]
    by_token = outputs.dim() > 1 and outputs.shape[0] in (TOKENS, ENCODED)
    return [outputs.flatten(1)] if by_token else []


def _spread(values: object) -> bool:
    """Whether NaN is in more rows than one."""
    return any(int(x.isnan().any(1).sum()) > 1 for x in _by_token(values))


def _rows_differ(x: torch.Tensor) -> bool:
    """Whether rows of (1, h, s, d) differ by more than rounding, the poisoned one left out."""
    rows = x[0].transpose(0, 1).flatten(1)
    rows = rows[[i for i in range(len(rows)) if i != len(rows) + POISONED]]
    bound = float(torch.finfo(x.dtype).eps) ** 0.5 * rows.abs().max()
    return bool((rows - rows[0]).abs().max() > bound)
