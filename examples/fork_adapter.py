"""Teach the guard a fork's own attention backend: one matcher, one reader, one registration.

Put the registration into the fork's SGLang plugin (group `sglang.srt.plugins`); the guard then
hooks the backend's class and reads every verify step through your function. Run this file to see
it at work on two requests of a made-up backend whose offsets step by 8 instead of 17.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from ddtree_guard.guard import Guard
from ddtree_guard.hooks.adapters import adapter_for, register_adapter
from ddtree_guard.hooks.view import View
from ddtree_guard.step import Contract, Layout, Step, Who, Widths


class CorpTreeBackend:
    """The fork's backend: it keeps its offsets in a plan of its own."""

    def __init__(self, stride: int) -> None:
        self.corp_plan = SimpleNamespace(q_offsets=np.arange(3) * stride)


def is_corp_backend(backend_class: type) -> bool:
    """Decide by what the class looks like, never by a version string."""
    return backend_class.__name__.startswith("CorpTree")


def read_corp_step(view: View) -> Step:
    """Fill what is known. A rule whose fields stay None is "not checked", never passed."""
    w = int(view.batch.spec_info.draft_token_num)
    return Step(
        bs=view.bs,
        padded_bs=len(view.batch.req_pool_indices),
        widths=Widths(w=w, budget=w - 1),
        layout=Layout(
            qo_indptr=view.backend.corp_plan.q_offsets,
            rows={"positions": len(view.batch.positions)},
        ),
        who=Who(rids=view.rids, step_id=view.step_id, rank=view.rank, backend="corp"),
        contract=Contract(name="ddtree-corp", backend="corp"),
    )


if __name__ == "__main__":
    register_adapter(
        "corp-tree", is_corp_backend, read_corp_step, supplies=("layout.qo_indptr", "layout.rows")
    )
    batch: Any = SimpleNamespace(
        spec_info=SimpleNamespace(draft_token_num=17), req_pool_indices=[0, 1], positions=range(34)
    )
    view = View(CorpTreeBackend(stride=8), batch, runner=None, rids=("chat-1", "chat-2"))
    for finding in Guard().check(adapter_for(CorpTreeBackend).read_step(view)).findings:
        print(f"{finding.rule} {finding.name} {finding.rid}: {finding.equation}")
