"""How well a checkpoint is protected, and what is brief: told by a look around a node, as by one at all of the tree."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvserve.cache.eviction import BRIEF_TOKENS
from kvserve.cache.eviction_rank import BRANCH_POINT, NEWEST, PLAIN, is_brief, level_of
from kvserve.cache.node import Node
from kvserve.cache.records import BoundaryKind
from kvserve.cache.tree import PrefixTree
from kvserve.core import TokenSequence
from tests.cache.payloads import make_tree, store
from tests.laws import IS_FULL, num_examples

kinds = st.sampled_from(["user", "message", "message", "answer"])
rows = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=4, max_size=14), st.lists(st.tuples(st.integers(1, 14), kinds))),
    min_size=1,
    max_size=6,
)


def newest_of(path: list[Node]) -> list[Node]:
    """On a path the last two checkpoints and the last one behind a user message."""
    states = [node for node in path if node.checkpoint is not None]
    users = [node for node in states if node.checkpoint is not None and node.checkpoint.kind == "user"]
    return [*states[-2:], *users[-1:]]


@given(rows=rows)
@settings(max_examples=num_examples(200) if IS_FULL else 80, deadline=None)
def test_levels_are_those_that_all_paths_show(rows: list[tuple[list[int], list[tuple[int, BoundaryKind]]]]) -> None:
    """Any tree: what is among the newest of some path, where branches part, and the rest."""
    tree = make_tree(needs_checkpoints=True)
    for ids, stops in rows:
        places = {min(end, len(ids)): kind for end, kind in stops}
        store(tree, TokenSequence(tuple(ids)), sorted(places) or None, kinds=places)
    paths = [list(path) for path in tree.sequences()]
    newest = {node for path in paths for node in newest_of(path)}
    for node in {node for path in paths for node in path if node.checkpoint is not None}:
        expected = NEWEST if node in newest else BRANCH_POINT if len(node.children) > 1 else PLAIN
        assert level_of(node) == expected


def leaf_of(tree: PrefixTree, tokens: TokenSequence) -> Node:
    return tree.lookup(TokenSequence((*tokens.ids, -1))).node


@pytest.mark.parametrize("num_tokens", [1, BRIEF_TOKENS - 1, BRIEF_TOKENS, 3 * BRIEF_TOKENS])
@pytest.mark.parametrize("num_system", [0, 1000])
def test_what_stands_behind_system_and_tools_makes_it_brief(num_tokens: int, num_system: int) -> None:
    """However long they are, and wherever rows stopped; the end of system and tools is not brief itself."""
    tree = make_tree()
    tokens = TokenSequence(tuple(range(num_system + num_tokens)))
    ends = [end for end in range(num_system or 97, len(tokens), 97)]
    store(tree, tokens, [*ends, len(tokens)], kinds={num_system: "system"} if num_system else {})
    [path] = tree.sequences()
    is_long = num_tokens >= BRIEF_TOKENS
    assert {is_brief(node) for node in path if node.end > num_system} == {not is_long}
    assert not any(is_brief(node) for node in path if node.end == num_system)
