"""Learning rate and batch by the size of a model, from published pre-training recipes."""

from __future__ import annotations

import math
from typing import NamedTuple


class Recipe(NamedTuple):
    """For blocks of together ``parameters``: the peak learning rate and the tokens of a step.

    ``batch_tokens`` None means one sample for each data-parallel rank.
    """

    parameters: float
    lr: float
    batch_tokens: int | None


RECIPES = (
    Recipe(0.9e6, 3.0e-3, None),  # model=tiny, which learns in minutes on a CPU
    Recipe(85e6, 6.0e-4, 2**19),  # GPT-3 Small, "125M" (arXiv 2005.14165, table 2.1)
    Recipe(302e6, 3.0e-4, 2**19),  # GPT-3 Medium, "350M"
    Recipe(1.0e9, 3.0e-4, 2**19),  # Pythia 1B (arXiv 2304.01373); tokens of GPT-3 up to 760M
    Recipe(6.5e9, 3.0e-4, 2**22),  # Llama 2 7B (arXiv 2307.09288); Llama 3 8B
    Recipe(68e9, 1.5e-4, 2**22),  # Llama 2 70B
)


def recipe_of(parameters: int) -> Recipe:
    """The recipe for the nearest size, by ratio."""
    return min(RECIPES, key=lambda recipe: abs(math.log(recipe.parameters / max(parameters, 1))))
