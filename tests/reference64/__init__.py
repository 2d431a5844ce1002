"""MSA in float64, written from the formulas for the tests alone.

Nothing here imports the product. Tensors are token-major and packed ([T, heads, dim]); a batch is
a list of fragments, so packed, batched and context-parallel problems are all the same thing. One
file an idea:

    geometry.py   fragments, visibility, which keys a token attends to
    selection.py  block scores, the exact selection, and the check of a selection with rounding
    attention.py  forward, KL rows, the five gradients by their explicit formulas
    rounding.py   how far rounding alone moves each of these results
"""

from .attention import Gradients, Inputs, Rows, backward, forward
from .geometry import Fragment, Problem, attended_keys, batched, packed, read_keys
from .rounding import rounding
from .selection import best_blocks, block_scores, selection_faults

__all__ = [
    "Fragment",
    "Gradients",
    "Inputs",
    "Problem",
    "Rows",
    "attended_keys",
    "backward",
    "batched",
    "best_blocks",
    "block_scores",
    "forward",
    "packed",
    "read_keys",
    "rounding",
    "selection_faults",
]
