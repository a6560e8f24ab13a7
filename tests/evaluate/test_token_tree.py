"""Batches and trees against what they stand for, written out sequence by sequence."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cann_llm_quant.evaluate.token_tree import common_prefix, grow_tree, plan_batches

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9))
def test_common_prefix_counts_equal_leading_tokens(a, b) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(tuple(a), tuple(b)) == expected


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(1, 30), st.data())
def test_every_sequence_is_in_one_batch_of_bounded_size(sequences, batch_tokens, data) -> None:
    sharable = [data.draw(st.integers(0, len(sequence) - 1)) for sequence in sequences]
    batches = plan_batches(sequences, sharable, batch_tokens)
    assert sorted(s for batch in batches for s in batch.members) == list(range(len(sequences)))
    for batch in batches:
        members = [sequences[s] for s in batch.members]
        assert members == sorted(members)
        assert len({sequence[: batch.shared] for sequence in members}) == 1
        assert all(batch.shared <= sharable[s] for s in batch.members)
        below = {sequence[:end] for sequence in members for end in range(batch.shared + 1, len(sequence) + 1)}
        assert batch.nodes == len(below)
        assert batch.nodes <= batch_tokens or len(members) == 1


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, st.integers(0, 4))
def test_a_tree_holds_every_distinct_beginning_once(sequences, trunk) -> None:
    beginning = (1,) * trunk
    whole = sorted(beginning + sequence for sequence in sequences)
    tree = grow_tree(whole, trunk)
    beginnings = {}
    for sequence, path in zip(whole, tree.paths, strict=True):
        assert tree.ids[path].tolist() == list(sequence[trunk:])
        assert tree.depths[path].tolist() == list(range(trunk, len(sequence)))
        for step, node in enumerate(path.tolist()):
            beginnings.setdefault(node, set()).add(sequence[: trunk + step + 1])
            ancestors = path[: step + 1].tolist()
            assert torch.nonzero(tree.visible[node])[:, 0].tolist() == sorted(ancestors)
    assert len(beginnings) == len(tree.ids)
    assert all(len(found) == 1 for found in beginnings.values())
    assert len({min(found) for found in beginnings.values()}) == len(tree.ids)
