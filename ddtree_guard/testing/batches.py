"""SGLang's own ForwardBatch and spec infos, filled for a verify case."""

from __future__ import annotations

from typing import Any

import torch

from ddtree_guard.testing.cases import Inputs, VerifyCase
from ddtree_guard.testing.fakes import sglang
from ddtree_guard.testing.steps import paint_mask


def verify_batch(inputs: Inputs, lanes: int | None = None, spec: Any = None) -> Any:
    """SGLang's ForwardBatch of a verify step, padded to `lanes` requests as its runner pads."""
    case, tree = inputs.case, inputs.tree
    live, lanes = case.bs, lanes or case.bs
    info = sglang("model_executor.forward_batch_info")
    seq_lens = torch.ones(lanes, dtype=torch.int64)
    seq_lens[:live] = torch.tensor(case.lens)
    rows, loc, positions, tokens = (
        torch.zeros(lanes, dtype=torch.int64),
        torch.zeros(lanes * case.w, dtype=torch.int64),
        torch.zeros(lanes * case.w, dtype=torch.int64),
        torch.zeros(lanes * case.w, dtype=torch.int64),
    )
    rows[:live] = inputs.rows
    loc[: live * case.w] = torch.cat([s[-case.w :] for s in inputs.slots])
    depths = torch.from_numpy(tree.depths)
    positions[: live * case.w] = (seq_lens[:live, None] + depths).reshape(-1)
    tokens[: live * case.w] = torch.from_numpy(tree.tokens).reshape(-1)
    return info.ForwardBatch(
        forward_mode=info.ForwardMode.TARGET_VERIFY,
        batch_size=lanes,
        input_ids=tokens,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=loc,
        seq_lens_sum=int(seq_lens.sum()),
        seq_lens_cpu=seq_lens.clone(),
        positions=positions,
        spec_info=spec or tree_spec(inputs),
    )


def tree_spec(inputs: Inputs) -> Any:
    """The spec info of the case's step: w rows, the mask of its trees, and the trees.

    DDTREE has no class of its own in SGLang; it verifies on DFLASH's, with a mask and parents.
    """
    case, tree = inputs.case, inputs.tree
    cells, _ = paint_mask(tree, case.lens, case.w, case.lens)
    links = [
        torch.from_numpy(getattr(tree, f"retrieve_{name}"))
        for name in ("index", "next_token", "next_sibling")
    ]
    tokens = torch.from_numpy(tree.tokens).reshape(-1)
    spec = spec_info(case, tokens, torch.from_numpy(cells).bool(), links)
    if case.algorithm == "DDTREE":
        spec.parents = torch.from_numpy(tree.parents)
        spec.depths = torch.from_numpy(tree.depths)
        spec.tree_sizes = torch.from_numpy(tree.sizes)
        spec.retrieve_index, spec.retrieve_next_token, spec.retrieve_next_sibling = links
    return spec


def dummy_spec(inputs: Inputs, lanes: int) -> Any:
    """The spec info that a graph runner captures with: every committed length is 1."""
    w = inputs.case.w
    mask = torch.ones(lanes * w * (1 + w), dtype=torch.bool)
    return spec_info(inputs.case, None, mask, [None, None, None])


def spec_info(case: VerifyCase, tokens: Any, mask: Any, links: list[Any]) -> Any:
    """The verify input of the case's algorithm, of SGLang's own class."""
    if case.algorithm in ("DDTREE", "DFLASH"):
        return sglang("speculative.dflash_info").DFlashVerifyInput(
            draft_token=tokens,
            positions=None,
            draft_token_num=case.w,
            custom_mask=mask if case.algorithm == "DDTREE" else None,
        )
    if case.algorithm == "NGRAM":  # positional: the mask's parameter has had two names
        ngram = sglang("speculative.ngram_info").NgramVerifyInput
        return ngram(tokens, mask, None, *links, case.w)
    modes = sglang("model_executor.forward_batch_info").CaptureHiddenMode
    return sglang("speculative.eagle_info").EagleVerifyInput(
        draft_token=tokens,
        custom_mask=mask,
        positions=None,
        retrieve_index=links[0],
        retrieve_next_token=links[1],
        retrieve_next_sibling=links[2],
        retrieve_cum_len=None,
        spec_steps=case.w - 1,
        topk=case.topk,
        draft_token_num=case.w,
        capture_hidden_mode=modes.FULL,
        seq_lens_sum=sum(case.lens),
        seq_lens_cpu=torch.tensor(case.lens),
    )
