"""Faults of the tree family."""

from __future__ import annotations

from ddtree_guard.step import Step
from ddtree_guard.testing.faults.registry import Planted, fault


def last_node(step: Step, request: int) -> int:
    """The last row of a request that holds a node; every row of a chain does."""
    sizes = step.tree.sizes
    return (step.w if sizes is None else int(sizes[request])) - 1


def with_child(step: Step, request: int) -> tuple[Step, int]:
    """The step, its request having a child of the root, and that child's row."""
    for row in range(1, last_node(step, request) + 1):
        if step.tree.parents[request, row] == 0:
            return step, row
    names = ("sizes", "tokens", "parents", "depths")
    sizes, tokens, parents, depths = (getattr(step.tree, name).copy() for name in names)
    sizes[request] = 2
    tokens[request, 1] = (tokens[request, 0] + 1) % step.limits.vocab
    parents[request, 1], depths[request, 1] = 0, 1
    grown = step.replace(
        tree__sizes=sizes, tree__tokens=tokens, tree__parents=parents, tree__depths=depths
    )
    return grown, 1


@fault("T1")
def own_parent(step: Step, request: int) -> Planted:
    """The last node of `request` is its own parent."""
    parents, row = step.tree.parents.copy(), last_node(step, request)
    parents[request, row] = row
    return Planted(step.replace(tree__parents=parents), request, row)


@fault("T2")
def deeper_node(step: Step, request: int) -> Planted:
    """The last node of `request` is a level too deep."""
    depths, row = step.tree.depths.copy(), last_node(step, request)
    depths[request, row] += 1
    return Planted(step.replace(tree__depths=depths), request, row)


@fault("T3")
def circular_link(step: Step, request: int) -> Planted:
    """The root of `request` is its own first child, which a walk would follow for ever."""
    links = step.tree.retrieve_next_token.copy()
    links[request, 0] = 0
    return Planted(step.replace(tree__retrieve_next_token=links), request, 0)


@fault("T4")
def equal_siblings(step: Step, request: int) -> Planted:
    """The second child of a node repeats the first one's token; without siblings, a size of w+1."""
    tree, seen = step.tree, dict[int, int]()
    for row in range(1, last_node(step, request) + 1):
        parent = int(tree.parents[request, row])
        if parent in seen:
            tokens = tree.tokens.copy()
            tokens[request, row] = tokens[request, seen[parent]]
            return Planted(step.replace(tree__tokens=tokens), request, row)
        seen[parent] = row
    sizes = tree.sizes.copy()
    sizes[request] = step.w + 1
    return Planted(step.replace(tree__sizes=sizes), request, 0)


@fault("T5")
def missing_heir(step: Step, request: int) -> Planted:
    """No child of the root of `request` holds the drafter's most probable token."""
    step, _ = with_child(step, request)
    top1 = step.tree.top1.copy()
    # A token outside the vocabulary: certainly none of the children's.
    top1[request, 0] = step.limits.vocab
    return Planted(step.replace(tree__top1=top1), request, 0)


@fault("T6")
def padding_token(step: Step, request: int) -> Planted:
    """The last node of `request` holds the first id behind the vocabulary."""
    tokens, row = step.tree.tokens.copy(), last_node(step, request)
    tokens[request, row] = step.limits.vocab
    return Planted(step.replace(tree__tokens=tokens), request, row)
