"""FLOPs of an optimiser step: matrix products and attention, and what the backward recomputes.

A multiplication and an addition are 2 FLOPs. Norms, rotations, activations, the softmax and the
optimiser do not count. Counts are sums over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from train.config import MemoryConfig, ModelConfig

# FLOPs per allowed pair, query head and channel
FORWARD_PER_PAIR = 4  # the products Q K and P V
BACKWARD_PER_PAIR = 8  # dP, dV, dQ, dK
AGAIN_PER_PAIR = 2  # Q K, which the backward recomputes because the scores are not stored


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a step.

    ``linear`` and ``attention`` are the model's forward and backward. ``repeated_linear`` and
    ``repeated_attention`` are what the backward computes a second time to save memory. That
    includes the scores, which attention never stores.
    """

    linear: int
    attention: int
    repeated_linear: int
    repeated_attention: int

    @property
    def model(self) -> int:
        """The FLOPs that MFU counts: without recomputation."""
        return self.linear + self.attention

    @property
    def hardware(self) -> int:
        """The FLOPs that HFU counts: with recomputation."""
        return self.model + self.repeated_linear + self.repeated_attention

    def utilisation(self, seconds: float, ranks: int, peak_tflops: float) -> dict[str, float]:
        """``mfu`` and ``hfu``, shares of the peak of ``ranks`` devices in a step of ``seconds``."""
        available = seconds * ranks * peak_tflops * 1e12
        return {"mfu": self.model / available, "hfu": self.hardware / available}


def attention_weights(model: ModelConfig) -> int:
    """Number of elements in the four projections of a block's attention."""
    heads = 2 * model.n_heads + 2 * model.n_kv_heads
    return model.dim * model.resolved_head_dim() * heads


def mlp_weights(model: ModelConfig) -> int:
    """Number of elements in the three matrices of a block's SwiGLU."""
    return 3 * model.dim * model.ffn_dim


def step_flops(
    model: ModelConfig, memory: MemoryConfig, rows: int, tokens: int, pairs: int
) -> StepFlops:
    """FLOPs of a step with ``tokens`` tokens in all its samples, whose layers allow ``pairs``.

    ``rows`` is the number of rows of the head. ``pairs`` is the sum over layers and ranks of
    ``window.allowed_pairs``, exact for packed documents and windows. If only some layers recompute
    attention, each counts as an average one.
    """
    block = attention_weights(model) + mlp_weights(model)
    forward = 2 * tokens * (model.n_layers * block + rows * model.dim)
    each = pairs * model.n_heads * model.resolved_head_dim()
    recomputed = memory.recomputed(model.n_layers)
    attention_again = AGAIN_PER_PAIR * each
    if memory.recompute == "full":
        attention_again += FORWARD_PER_PAIR * each * recomputed // model.n_layers
    # The recomputation of a block ends before `down`, whose output no gradient needs. A chunked MLP
    # recomputes gate and up, a chunked loss the logits.
    gate_and_up = mlp_weights(model) * 2 // 3
    again = recomputed * (attention_weights(model) + gate_and_up)
    if memory.mlp_chunk is not None:
        again += (model.n_layers - recomputed) * gate_and_up
    return StepFlops(
        linear=3 * forward,
        attention=(FORWARD_PER_PAIR + BACKWARD_PER_PAIR) * each,
        repeated_linear=2 * tokens * (again + rows * model.dim),
        repeated_attention=attention_again,
    )
