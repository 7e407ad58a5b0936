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
    happens once a kind. `moved` are arguments that lie elsewhere since (`operands.moving`).
    """

    __slots__ = ("_bind", "_call", "_calls", "_given", "_w", "moved", "rules")

    def __init__(self, operands: Callable[[int, Any], Operands], w: int) -> None:
        self._bind, self._w = operands, w
        self._calls: dict[Any, Call] = {}
        self._call: Call | None = None  # the newest, and what it was given
        self._given: tuple[Any, ...] = ()
        self.moved: tuple[Any, ...] = ()
        self.rules = operands(NO_TREES, ()).rules

    def __call__(self, bs: int, trees: int = NO_TREES, given: tuple[Tensor, ...] = ()) -> None:
        """Queue it for `bs` live requests. `given` are the three tensors of LINKS or PARENTS,
        contiguous. Raises UsageError where one is too short.
        """
        held = self._given
        if (
            self._call is None
            or bs != held[0]
            or (given and (given[0] is not held[1] or given[1] is not held[2]))
            or self.moved
        ):
            self._call = self._turn(bs, trees, given)
            # tensors that are held stay where they are
            self._given = (bs, *(given or (None, None)))
        self._call()

    def _turn(self, bs: int, trees: int, given: tuple[Tensor, ...]) -> Call:
        """The launch for other arguments than the last one's."""
        if not given:
            call = self._bound(NO_TREES, NO_TREES, given)
            call.put(3, (bs, *self.moved))
            return call
        one, two, three = given
        rows = bs * self._w
        if one.numel() < rows or two.numel() < rows or three.numel() < bs:
            raise UsageError(
                f"trees of {bs} requests of {self._w} rows were expected, found arrays of "
                f"{one.numel()}, {two.numel()} and {three.numel()}."
            )
        call = self._bound((trees, one.dtype, two.dtype, three.dtype), trees, given)
        call.put(0, (one, two, three, bs, *self.moved))
        return call

    def _bound(self, kind: Any, trees: int, given: tuple[Tensor, ...]) -> Call:
        call = self._calls.get(kind)
        if call is None:
            if not all(part.is_contiguous() for part in given):
                raise UsageError("trees are expected in contiguous arrays, found others.")
            call = self._calls[kind] = self._bind(trees, given).launch
        return call
