"""What DDTREE cannot serve, each refusal one sentence with the flag to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddtree_guard.ddtree.tree import BUDGET_MAX, DEPTH_MAX
from ddtree_guard.errors import IncompatibleError, UsageError

REQUEST_KEY = "ddtree_budget"  # in a request's custom_params: a smaller budget for its steps

# (argument, values that are fine, what DDTREE needs, the flag to change)
_ARGUMENTS: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    ("page_size", (None, 1), "one token per KV page", "set --page-size 1"),
    ("pp_size", (1,), "no pipeline parallelism", "set --pp-size 1"),
    ("dcp_size", (1,), "no decode context parallelism", "set --dcp-size 1"),
    ("enable_dp_attention", (False,), "no DP attention", "drop --enable-dp-attention"),
    ("enable_lora", (None, False), "no LoRA", "drop --enable-lora"),
    ("lora_paths", (None, [], {}), "no LoRA", "drop --lora-paths"),
    ("disaggregation_mode", ("null", None), "one server for prefill and decode",
     "drop --disaggregation-mode"),
    ("enable_two_batch_overlap", (False,), "one batch per step",
     "drop --enable-two-batch-overlap"),
    ("enable_pdmux", (False,), "no PD multiplexing", "drop --enable-pdmux"),
    ("enable_strict_thinking", (None, False), "no token filter on thoughts, which is a grammar",
     "drop --enable-strict-thinking"),
    ("enable_return_routed_experts", (None, False), "tokens that stay in their KV slot",
     "drop --enable-return-routed-experts"),
    ("enable_page_major_kv_layout", (None, False), "KV rows of a layer side by side",
     "drop --enable-page-major-kv-layout"),
    ("kv_canary", (None, "none"), "no KV canary, which takes every batch for a chain",
     "drop --kv-canary"),
    ("speculative_adaptive", (False,), "a fixed budget", "drop --speculative-adaptive"),
    ("speculative_draft_window_size", (None,), "a drafter that sees the whole prefix",
     "drop --speculative-draft-window-size"),
)  # fmt: skip


def check_arguments(server_args: Any) -> None:
    """Raise IncompatibleError for server arguments that DDTREE does not support."""
    for name, fine, needs, change in _ARGUMENTS:
        value = getattr(server_args, name, fine[0])
        if value not in fine:
            raise IncompatibleError(f"DDTREE needs {needs}, found {name}={value!r}; {change}.")


def check_backends(backends: tuple[str | None, ...]) -> None:
    """Raise IncompatibleError unless the target's attention backends are all Triton."""
    for backend in backends:
        if backend != "triton":
            raise IncompatibleError(
                f"DDTREE verifies trees on the Triton attention backend, found {backend}; "
                "set --attention-backend triton."
            )


def check_budget(budget: int | None, block: int | None = None) -> int:
    """The budget, or UsageError. With `block` also checks the depth that it allows."""
    if budget is None:
        raise UsageError(
            "DDTREE needs a tree budget, found none; set --speculative-ddtree-budget N or "
            "SGLANG_DDTREE_BUDGET=N (the number of draft nodes to verify, for example 16)."
        )
    if isinstance(budget, bool) or not isinstance(budget, int) or not 1 <= budget <= BUDGET_MAX:
        raise UsageError(
            f"DDTREE needs a tree budget of 1 to {BUDGET_MAX}, found {budget!r}; change "
            "--speculative-ddtree-budget."
        )
    if block is not None and not 2 <= block <= DEPTH_MAX + 1:
        raise UsageError(
            f"DDTREE needs a draft block of 2 to {DEPTH_MAX + 1} tokens, found {block}; change "
            "--speculative-dflash-block-size."
        )
    return budget


def check_model(runner: Any, recurrent: bool) -> None:
    """Raise IncompatibleError for a target model whose state a tree cannot branch."""
    if recurrent:
        raise IncompatibleError(
            "DDTREE needs a target without recurrent layers, because their state cannot branch, "
            "found one with them; use --speculative-algorithm DFLASH."
        )
    if runner.sliding_window_size is not None and runner.sliding_window_size > 0:
        raise IncompatibleError(
            "DDTREE needs full attention in the target, found a sliding window of "
            f"{runner.sliding_window_size} tokens; use --speculative-algorithm DFLASH."
        )
    pool = runner.token_to_kv_pool
    if pool is not None and not can_move(pool):
        raise IncompatibleError(
            f"DDTREE moves accepted keys and values between slots and knows no way to do so in "
            f"{type(pool).__name__}; use --kv-cache-dtype auto and an MHA or GQA model."
        )


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that one verify step allocates beside what the model itself needs."""

    logits: int
    mask: int
    hidden: int

    @property
    def total(self) -> int:
        """All of them together."""
        return self.logits + self.mask + self.hidden


def step_bytes(bs: int, w: int, tokens: int, vocab: int, hidden: int, item: int) -> StepBytes:
    """What a step of `bs` requests x `w` rows needs, with `tokens` committed tokens in all.

    Logits are held in the model's type (`item` bytes) and in float32. `hidden` is the width of the
    hidden states that the drafter is given.
    """
    rows = bs * w
    return StepBytes(
        logits=rows * vocab * (item + 4), mask=w * (tokens + rows), hidden=rows * hidden * item
    )


def check_step(need: StepBytes, free: int | None, bs: int, w: int) -> None:
    """Raise IncompatibleError where the largest step cannot fit into `free` bytes (None: unknown).

    Without it a wide budget starts, serves a few requests, and dies of memory under load.
    """
    if free is None or need.total <= free:
        return

    def gib(size: int) -> str:
        return f"{size / 2**30:.2f} GiB"

    raise IncompatibleError(
        f"DDTREE needs {gib(need.total)} of free device memory for a verify step of {bs} requests "
        f"x {w} rows (logits {gib(need.logits)}, mask {gib(need.mask)}, hidden states "
        f"{gib(need.hidden)}), found {gib(free)}; lower --speculative-ddtree-budget, "
        "--max-running-requests or --mem-fraction-static."
    )


def can_move(pool: Any) -> bool:
    """Whether the KV pool is plain per-layer rows of keys and values, one behind the other."""
    if not all(hasattr(pool, name) for name in ("k_buffer", "v_buffer", "data_ptrs")):
        return False
    rows = (*pool.k_buffer, *pool.v_buffer)
    apart = any(part.dim() != 3 or not part.is_contiguous() for part in rows)
    scaled = getattr(pool, "k_scale_buffer", None) is not None
    return not apart and not scaled and not getattr(pool, "use_hnd", False)


def refuse_request(req: Any) -> str | None:
    """Why DDTREE cannot serve this request, or None. A sentence for the client."""
    params = req.sampling_params
    if req.return_logprob:
        return "DDTREE does not return logprobs; drop return_logprob."
    if getattr(req, "return_hidden_states", False):
        return "DDTREE does not return hidden states; drop return_hidden_states."
    if getattr(req, "custom_logit_processor", None):
        return "DDTREE does not run custom logit processors; drop custom_logit_processor."
    for name in ("json_schema", "regex", "ebnf", "structural_tag"):
        if getattr(params, name, None) is not None:
            return f"DDTREE does not support grammar-constrained decoding; drop {name}."
    given = getattr(params, "custom_params", None) or {}
    if not isinstance(given, dict):  # SGLang does not look at what a client sends here
        return f"custom_params must be an object of names and values, found {type(given).__name__}."
    asked = given.get(REQUEST_KEY, 1)
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        return f"custom_params.{REQUEST_KEY} must be a whole number of at least 1, found {asked!r}."
    # Penalties depend on the path to a node, which differs from row to row of a tree.
    for name, neutral in (
        ("frequency_penalty", 0.0),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("min_new_tokens", 0),
    ):
        if getattr(params, name, neutral) != neutral:
            return f"DDTREE does not support {name}; set it to {neutral}."
    return None
