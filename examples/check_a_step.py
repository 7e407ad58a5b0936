"""Check one verify step of your own: fill a Step, run the Guard, print what it says.

Two requests with committed prefixes of 100 and 50 tokens. The batch carries 17 rows per request
(budget 16 and the root), and the attention backend was built for blocks of 8.
"""

import numpy as np

from ddtree_guard import Guard, Step
from ddtree_guard.render import block, summary
from ddtree_guard.step import Layout, Mask, Tree, Who, Widths

LENS, W, BLOCK = (100, 50), 17, 8


def chain_tree() -> Tree:
    """A chain of 8 nodes per request; the other rows are padding."""
    rows = np.arange(W)
    node = rows < BLOCK
    parents = np.tile(np.where(node, rows - 1, -1), (len(LENS), 1))
    depths = np.tile(np.where(node, rows, 0), (len(LENS), 1))
    tokens = np.arange(len(LENS) * W).reshape(len(LENS), W)
    return Tree(tokens=tokens, parents=parents, depths=depths, sizes=np.full(len(LENS), BLOCK))


def step_with_width(width: int) -> Step:
    """The step with offsets as a backend of this width computes them."""
    lens = np.array(LENS)
    return Step(
        bs=2,
        padded_bs=2,
        widths=Widths(w=W, holders={"backend": width}, block=BLOCK, budget=W - 1),
        layout=Layout(
            qo_indptr=np.arange(3) * width,
            mask_indptr=np.concatenate([[0], np.cumsum(width * (lens + width))]),
            kv_indptr=np.concatenate([[0], np.cumsum(lens)]),
            prefix_lens=lens,
            max_extend_len=width,
            rows={"q": 2 * W},
        ),
        mask=Mask(present=True),
        tree=chain_tree(),
        who=Who(rids=("request-a", "request-b")),
    )


def main() -> None:
    """Check the step as the stock backend lays it out, then as it should be."""
    for width in (BLOCK, W):
        step = step_with_width(width)
        report = Guard().check(step)
        for finding in report.findings:
            print(block(finding, step), end="\n\n")
        print(f"backend width {width}: {summary(report)}\n")


if __name__ == "__main__":
    main()
