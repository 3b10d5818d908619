"""The interface of an engine: it distributes a model over the ranks and takes optimiser steps.

In a step each rank gives every micro-batch to ``backward``, calls ``grad_norm``, and then ``step``
or ``discard``. Only ``shards`` may be called from another thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from train.config import Config
from train.data.batches import Batch
from train.engine.grad_norm import clip, norm_of
from train.engine.parallel import ParallelLayout
from train.engine.shard import Shard, shard_of, state_tensors
from train.engine.time_split import TimeSplit
from train.model.optim import make_optimizer, set_learning_rate
from train.model.transformer import LanguageModel, build_model


class Engine(ABC):
    """The model of ``config`` and its AdamW, on this rank of ``parallel``.

    ``n_tokens`` is the size of the tokenizer's vocabulary. Every rank makes the same calls in the
    same order, except ``shards``. ``groups`` are the process groups that the engine has created.
    Without ``draw`` the weights have no values until they are loaded.
    """

    def __init__(
        self, config: Config, n_tokens: int, parallel: ParallelLayout, draw: bool = True
    ) -> None:
        self.config, self.parallel, self.draw = config, parallel, draw
        self.groups: list[dist.ProcessGroup] = []
        self.model = self.wrap(self._build(n_tokens))
        self.parameters = dict(self.model.transformer.named_parameters())
        self.optimizer = make_optimizer(self.model.transformer, config.optim)
        self._create_optimizer_state()

    def _build(self, n_tokens: int) -> LanguageModel:
        parallel = self.parallel
        device, group = parallel.device, parallel.cp_group
        return build_model(self.config, n_tokens, device, group, draw=self.draw)

    @abstractmethod
    def wrap(self, model: LanguageModel) -> LanguageModel:
        """Distribute ``model`` over the ranks. Its initial parameters are the same on all."""

    @abstractmethod
    def backward(self, batch: Batch, scale: Tensor, last: bool) -> Tensor:
        """Add the gradients of ``scale`` times the sum of a micro-batch's losses.

        Returns the loss of every local token, (t,) float32, detached. The ``last`` micro-batch of a
        step reduces the gradients: they become the mean over all ranks.
        """

    def watch(self, times: TimeSplit) -> None:
        """Report to ``times`` when a backward waits for other ranks.

        It waits after the gradient of the embedding's output, the last one of the backward. The one
        kernel of the embedding's own gradient counts as waiting.
        """
        if self.parallel.world == 1:
            return

        def began(gradient: Tensor) -> None:
            times.enter("communication")

        def follow(module: nn.Module, inputs: object, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(began)

        self.model.transformer.embedding.register_forward_hook(follow)
        backward = self.backward

        def watched(batch: Batch, scale: Tensor, last: bool) -> Tensor:
            losses = backward(batch, scale, last)
            times.leave()
            return losses

        self.backward = watched

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The loss of every local token, (t,) float32, without gradients."""
        return self.model(batch)

    @torch.no_grad()
    def grad_norm(self, limit: float) -> Tensor:
        """Norm of the gradients of all parameters, (); clips them to ``limit``.

        The host does not wait for the norm. It is NaN or infinite if a gradient is not finite.
        """
        gradients = self._local_gradients()
        norm = self._norm_of_all(norm_of(gradients, self.parallel.device)).float()
        clip(gradients, norm, limit)
        return norm

    def _local_gradients(self) -> list[Tensor]:
        """This rank's part of every gradient."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def _norm_of_all(self, local: Tensor) -> Tensor:
        """The norm of all gradients, from the norm of this rank's part of them."""
        return local

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's elements, flat) of every gradient, before ``step`` or ``discard``.

        All ranks together hold every element equally often, so a ratio of sums over ranks is right.
        Every rank must call this.
        """
        rank, world = self.parallel.rank, self.parallel.world
        for name, parameter in self.parameters.items():
            whole = self._gradient(parameter)
            yield name, whole.flatten().tensor_split(world)[rank]

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """A whole gradient."""
        return parameter.grad

    def step(self, lr: float) -> None:
        """Take an optimiser step with learning rate ``lr`` and drop the gradients."""
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def shards(self) -> dict[str, Shard]:
        """This rank's part of weights and optimiser state, not copied, without communication.

        A tensor has the same name and the same shape in all engines, so any engine can load the
        checkpoint of any other.
        """
        rank, world = self.parallel.rank, self.parallel.world
        tensors = state_tensors(self.parameters, self.optimizer)
        return {name: shard_of(tensor, rank, world) for name, tensor in tensors}

    def loaded(self) -> None:  # noqa: B027
        """Use the values that were written to ``shards()`` in place. Every rank must call this."""

    def _create_optimizer_state(self) -> None:
        """Create the optimiser's tensors by a step with zero gradients and zero learning rate."""
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self.step(0.0)
        for entry in self.optimizer.state.values():
            entry["step"].zero_()
