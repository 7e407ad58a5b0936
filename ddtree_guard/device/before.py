"""What a check needs before it, in one launch: bs, the live trees, and slots beside the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtree_guard.device.call import Call
from ddtree_guard.device.edges import NO_TREES
from ddtree_guard.device.operands import Operands, Tensor
from ddtree_guard.errors import UsageError


class Before:
    """Queues `before_kernel` for one set of buffers.

    `operands(trees, given)` binds it for tensors of some kind, see `operands.table_operands`; that
    happens once a kind. `moved` are arguments that lie elsewhere from the next launch on
    (`operands.moving`).
    """

    __slots__ = (
        "_bind",
        "_bs",
        "_call",
        "_calls",
        "_one",
        "_three",
        "_two",
        "_w",
        "moved",
        "rules",
    )

    def __init__(self, operands: Callable[[int, Any], Operands], w: int) -> None:
        self._bind, self._w = operands, w
        self._calls: dict[Any, Call] = {}
        self._call: Callable[[], None] | None = None  # the newest, and what it was given
        self._bs, self._one, self._two, self._three = 0, None, None, None
        self.moved: tuple[Any, ...] = ()
        self.rules = operands(NO_TREES, ()).rules

    def __call__(
        self, bs: int, trees: int = NO_TREES, one: Tensor = None, two: Tensor = None,
        three: Tensor = None,
    ) -> None:  # fmt: skip
        """Queue it for `bs` live requests. With LINKS or PARENTS the three tensors are theirs,
        contiguous. Raises UsageError where one is too short.
        """
        call = self._call
        # tensors that are held stay where they are
        if (
            call is None
            or one is not self._one
            or two is not self._two
            or three is not self._three
            or bs != self._bs
            or self.moved
        ):
            call = self._call = self._turn(bs, trees, one, two, three)
            self._bs, self._one, self._two, self._three = bs, one, two, three
        call()

    def _turn(self, bs: int, trees: int, one: Tensor, two: Tensor, three: Tensor) -> Call:
        """The launch for other arguments than the last one's."""
        moved, self.moved = self.moved, ()  # nothing of a step is held for longer than it takes
        if trees == NO_TREES:
            call = self._bound(NO_TREES, NO_TREES, ())
            call.put(3, (bs, *moved))
            return call
        rows = bs * self._w
        if one.numel() < rows or two.numel() < rows or three.numel() < bs:
            raise UsageError(
                f"trees of {bs} requests of {self._w} rows were expected, found arrays of "
                f"{one.numel()}, {two.numel()} and {three.numel()}."
            )
        given = one, two, three
        if not all(part.is_contiguous() for part in given):
            raise UsageError("trees are expected in contiguous arrays, found others.")
        call = self._bound((trees, one.dtype, two.dtype, three.dtype), trees, given)
        call.put(0, (*given, bs, *moved))
        return call

    def _bound(self, kind: Any, trees: int, given: tuple[Tensor, ...]) -> Call:
        call = self._calls.get(kind)
        if call is None:
            call = self._calls[kind] = self._bind(trees, given).launch
        return call
