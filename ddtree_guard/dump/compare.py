"""What differs between two steps, by meaning: causes before effects, places before values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree_guard.dump.redact import TOKEN_FIELDS
from ddtree_guard.recorder.ring import tree_bits
from ddtree_guard.step import PARTS, Static, Step

# In the order in which a step comes about, so that the first difference is the likely cause.
MEANING: Mapping[str, str] = {
    "widths": "rows per request, as each part of the server holds it",
    "layout": "offsets handed to the attention kernel",
    "tree": "the draft tree",
    "mask": "the visibility mask",
    "positions": "rotary positions",
    "slots": "where keys and values live",
    "graph": "the captured graph",
    "device": "the device checker",
    "peers": "what other ranks hold",
    "attention": "operands and rows of the verify attention",
    "shadow": "attention rows against dense answers",
    "outcome": "what verification decided",
    "limits": "what the deployment can hold",
    "contract": "what the kernel is declared to read",
    "who": "whose step it is",
}
WHOSE = ("who.rids", "who.step_id", "who.rank", "mask.rids")  # differ between any two steps
# Each rank holds its own share of these.
OF_A_RANK = ("graph.born", "graph.live", "attention", "limits.vocab_per_rank",
             "limits.vocab_per_rank_padded", "tree.columns", "device", "peers",
             "shadow")  # fmt: skip
_BUFFERS = ("graph.born", "graph.live")


@dataclass(frozen=True, slots=True)
class Difference:
    """One place where two steps differ: `where` is a dotted path with the index of an array.

    `only` names the step, A or B, that alone holds the field: the other one may just not have
    recorded it.
    """

    where: str
    a: str
    b: str
    only: str = ""

    @property
    def meaning(self) -> str:
        """What the field is about."""
        part = self.where.split(".")[0].split("[")[0]
        return MEANING.get(part, "the size of the batch")

    def __str__(self) -> str:
        return f"{self.where}: {self.a} in A, {self.b} in B ({self.meaning})"


def differences(
    a: Step, b: Step, skip: Collection[str] = WHOSE, same_ids: bool = True
) -> Iterator[Difference]:
    """Every field that differs, causes first. `skip` holds dotted paths and prefixes of them.

    `same_ids` False compares token ids by which of them are equal to each other: two redacted
    dumps of different jobs hash the same token differently. Addresses of buffers are always
    compared so, as every process has its own.
    """
    a, b = _with_bits(a, b), _with_bits(b, a)
    for name in ("bs", "padded_bs"):
        yield from _compare(name, getattr(a, name), getattr(b, name))
    ids: tuple[dict[int, int], dict[int, int]] | None = None if same_ids else ({}, {})
    for part in MEANING:
        for field in dataclasses.fields(PARTS[part]):
            path = f"{part}.{field.name}"
            if path in skip or part in skip:
                continue
            x, y = a.get(path), b.get(path)
            if path in _BUFFERS:
                x, y = _placed(a, x), _placed(b, y)
            if ids is not None and path in TOKEN_FIELDS:
                x, y = _canonical(x, ids[0]), _canonical(y, ids[1])
            yield from _compare(path, x, y)


def _with_bits(step: Step, other: Step) -> Step:
    """The step with the tree columns of its mask as bits, where the other one has only those."""
    if step.mask.tree_bits is not None or other.mask.tree_bits is None:
        return step
    return step.replace(mask__tree_bits=tree_bits(step))


def _placed(step: Step, buffers: Mapping[str, Static]) -> Mapping[str, Mapping[str, Any]]:
    """Buffers with the first name that has the same address for their address."""
    names: dict[int, str] = {}
    for path in _BUFFERS:
        for name, buffer in sorted(step.get(path).items()):
            names.setdefault(buffer.pointer, f"{path}.{name}")
    return {
        name: {**dataclasses.asdict(buffer), "pointer": names[buffer.pointer]}
        for name, buffer in buffers.items()
    }


def _canonical(ids: Any, seen: dict[int, int]) -> Any:
    """Ids replaced by the order in which they first occur; negative ones stay."""
    if ids is None:
        return None
    flat = np.asarray(ids).reshape(-1)
    out = [int(i) if i < 0 else seen.setdefault(int(i), len(seen)) for i in flat]
    return np.array(out, np.int64).reshape(np.shape(ids))


def _compare(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        yield from _arrays(path, a, b)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            yield from _compare(f"{path}.{key}", a.get(key), b.get(key))
    elif isinstance(a, np.ndarray) or isinstance(b, np.ndarray) or repr(a) != repr(b):
        only = "A" if b is None else "B" if a is None else ""
        yield Difference(path, _short(a), _short(b), only)


def _arrays(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if a.shape != b.shape:
        yield Difference(f"{path} shape", str(a.shape), str(b.shape))
        return
    unequal = a != b
    if a.dtype.kind == b.dtype.kind == "f":
        unequal &= ~(np.isnan(a) & np.isnan(b))
    if unequal.any():
        at = np.unravel_index(int(np.argmax(unequal)), a.shape)
        more = int(unequal.sum()) - 1
        index = ", ".join(map(str, at))
        tail = f" and {more} more" if more else ""
        yield Difference(f"{path}[{index}]{tail}", _short(a[at].item()), _short(b[at].item()))


def _short(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape}"
    text = repr(value) if isinstance(value, (str, tuple)) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
