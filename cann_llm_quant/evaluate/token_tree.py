"""Token sequences as a tree, so that one forward pass computes every shared beginning once.

The choices of a question share its context, the questions of a subject their examples. Sorted sequences are cut
into batches; a batch is a *trunk*, the tokens that all its sequences begin with, and a tree of *nodes* below it:

    trunk  [The following are multiple choice questions ...]      kept as keys and values between batches
    nodes  Question: Who ... ? Answer:  --+-- Scopes              node i stands at position depth[i] of its text
                                          +-- Linnaeus            and sees the trunk, its ancestors and itself

No token is padding, and what a sequence sees does not depend on its neighbours: results are those of one sequence
at a time, up to the order of float additions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences `members` (indices, in sorted order) whose first `shared` tokens are equal; `nodes` tokens below."""

    members: tuple[int, ...]
    shared: int
    nodes: int


@dataclass(frozen=True)
class TokenTree:
    """The nodes below a trunk; `paths[s]` lists the nodes of sequence s, trunk excluded, in the order of its text."""

    ids: Int[Tensor, " nodes"]
    depths: Int[Tensor, " nodes"]
    visible: Bool[Tensor, "nodes nodes"]
    paths: tuple[Int[Tensor, "_"], ...]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences share at their beginning, by bisection: comparing slices is fast."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def plan_batches(sequences: Sequence[tuple[int, ...]], sharable: Sequence[int], batch_tokens: int) -> list[Batch]:
    """Cut the sequences, sorted, into batches of at most `batch_tokens` nodes; a longer sequence gets its own.

    The first `sharable[s]` tokens of sequence s may lie in a trunk: nobody asks for what is predicted inside it.
    """
    order = sorted(range(len(sequences)), key=lambda s: sequences[s])
    batches: list[Batch] = []
    members: list[int] = []
    distinct = shared = 0
    for s in order:
        overlap = common_prefix(sequences[members[-1]], sequences[s]) if members else 0
        grown = distinct + len(sequences[s]) - overlap
        narrowed = min(shared, overlap, sharable[s]) if members else sharable[s]
        if members and grown - narrowed > batch_tokens:
            batches.append(Batch(tuple(members), shared, distinct - shared))
            members, grown, narrowed = [], len(sequences[s]), sharable[s]
        members.append(s)
        distinct, shared = grown, narrowed
    if members:
        batches.append(Batch(tuple(members), shared, distinct - shared))
    return batches


def grow_tree(sequences: Sequence[tuple[int, ...]], trunk: int) -> TokenTree:
    """The tree of sorted sequences below their first `trunk` tokens, which are equal."""
    ids: list[int] = []
    depths: list[int] = []
    paths: list[Tensor] = []
    forks: list[tuple[int, int, Tensor]] = []
    before: tuple[int, ...] = ()
    for sequence in sequences:
        shared = common_prefix(before, sequence) - trunk if paths else 0
        above = paths[-1][:shared] if paths else torch.empty(0, dtype=torch.int64)
        first = len(ids)
        ids.extend(sequence[trunk + shared :])
        depths.extend(range(trunk + shared, len(sequence)))
        forks.append((first, len(ids), above))
        paths.append(torch.cat([above, torch.arange(first, len(ids))]))
        before = sequence
    visible = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    for first, end, above in forks:
        visible[first:end, above] = True
        visible[first:end, first:end] = torch.ones(end - first, end - first, dtype=torch.bool).tril()
    return TokenTree(torch.tensor(ids), torch.tensor(depths), visible, tuple(paths))
