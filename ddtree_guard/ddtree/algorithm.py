"""Registers algorithm DDTREE with SGLang and gives it a flag, a keyword and what it must refuse.

    --speculative-algorithm DDTREE --speculative-ddtree-budget 16 --attention-backend triton
    Engine(speculative_algorithm="DDTREE", speculative_ddtree_budget=16, ...)
    SGLANG_DDTREE_BUDGET=16                    where neither can be passed

Server arguments of a resolved DDTREE server: `speculative_ddtree_budget` B, block size b in
`speculative_dflash_block_size`, and `speculative_num_draft_tokens` D = max(B + 1, b), from which
SGLang sizes slots, reservations and rows of `req_to_token`. The draft worker gets D = b.

SGLANG_DDTREE_INCIDENT=on reproduces the incident: the target's (stock) attention backend is shown
b while it is made, so it splits a batch of B + 1 rows per request into b per request. Its output
is garbage for B + 1 > b. For demonstrations only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import sys
from typing import Any

from ddtree_guard.attention.backend import graph_mask
from ddtree_guard.attention.backend import install as install_backend
from ddtree_guard.config import Config, TreeConfig
from ddtree_guard.ddtree.limits import (
    check_arguments,
    check_backends,
    check_budget,
    refuse_request,
)
from ddtree_guard.errors import IncompatibleError
from ddtree_guard.hooks.facts import ALGORITHM, BUDGET, VARIES, facts_of, release
from ddtree_guard.hooks.patching import Original, Patch, PatchReport, apply

log = logging.getLogger("ddtree_guard")
ARGS = "sglang.srt.server_args.ServerArgs"
WORKER = "sglang.srt.speculative.dflash_worker_v2"
FLAG = "--speculative-ddtree-budget"
TESTED = ("0.5.16", "0.5.17")  # the DFlash v2 worker that `worker` is built on
# The budget between `from_cli_args` and the `ServerArgs.__init__` that it calls.
_FROM_CLI: list[int | None] = []
_SERVED: list[PatchReport] = []  # what `_worker_class` has patched


def install() -> PatchReport | None:
    """Register DDTREE, or return None where SGLang has its own or no DFlash v2 worker to build on.

    Raises IncompatibleError if SGLang is not what any tested release is; then nothing is changed.
    """
    if importlib.util.find_spec("sglang") is None or not _has(WORKER):
        return None
    info = importlib.import_module("sglang.srt.speculative.spec_info")
    registry = importlib.import_module("sglang.srt.speculative.spec_registry")
    known = registry.get_spec(ALGORITHM)
    if ALGORITHM in info.SpeculativeAlgorithm.__members__ or not _ours(known):
        return None
    report = apply(ARGUMENTS)
    try:
        report.require()
        if known is None:
            info.SpeculativeAlgorithm.register(
                ALGORITHM, supports_overlap=True, spec_class=_spec_class(info, registry)
            )(_worker_class)
    except Exception:
        report.restore()
        raise
    return report


def _ours(spec: Any) -> bool:
    """Whether the name is free, or taken by an earlier call of `install`."""
    return spec is None or getattr(spec, "factory", None) is _worker_class


def uninstall() -> None:
    """Undo what a DDTREE server patched, and take DDTREE out of SGLang's registry if it is ours."""
    while _SERVED:
        _SERVED.pop().restore()
    registry = sys.modules.get("sglang.srt.speculative.spec_registry")
    known = registry.get_spec(ALGORITHM) if registry is not None else None
    if registry is not None and known is not None and _ours(known):
        del registry._REGISTRY[ALGORITHM]


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _worker_class(server_args: Any) -> type:
    """The factory that SGLang calls in the scheduler process of a DDTREE server, and only there.

    It runs before the attention backends are made, so the choice of backend is installed here and
    a server that does not run DDTREE keeps its own.
    """
    incident = TreeConfig.from_env().incident
    _SERVED.append(apply([*SERVER, *([INCIDENT] if incident else [])]).require())
    backend = None if incident else install_backend(Config.from_env().backend)
    if backend is not None:
        _SERVED.append(backend)
    from ddtree_guard.ddtree.worker import DDTreeWorker

    return DDTreeWorker


def _spec_class(info: Any, registry: Any) -> type:
    class DDTreeAlgorithm(registry.CustomSpecAlgo):  # type: ignore[misc]
        """DDTREE in the eyes of SGLang: of the DFLASH family, wider on the target."""

        def is_dflash(self) -> bool:
            return True

        def is_dflash_family(self) -> bool:
            return True

        def supports_target_verify_for_draft(self) -> bool:
            return True

        def need_topk(self) -> bool:
            return False

        def carries_draft_hidden_states(self) -> bool:
            return False

        def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
            return info.SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)

        def handle_server_args(self, server_args: Any) -> None:
            resolve_arguments(server_args, info.SpeculativeAlgorithm.DFLASH)

        def get_num_tokens_per_req_for_target_verify(
            self, num_draft_tokens: int, is_draft_worker: bool
        ) -> int:
            width = draft_width if is_draft_worker else active_width
            return width(num_draft_tokens)

        def get_num_tokens_per_bs_for_target_verify(
            self, num_draft_tokens: int, is_draft_worker: bool
        ) -> int:
            return self.get_num_tokens_per_req_for_target_verify(num_draft_tokens, is_draft_worker)

    return DDTreeAlgorithm


def draft_width(default: int) -> int:
    """Rows per request on the draft of this process's server: its block. 0.5.17 hands in the
    target's D, because it reads D from the process and not from the draft worker's arguments.
    """
    args = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    return int(getattr(args, "speculative_dflash_block_size", None) or default)


def active_width(default: int) -> int:
    """Rows per request on the target of this process's server. D exceeds it where B + 1 < b."""
    args = importlib.import_module("sglang.srt.runtime_context").get_server_args()
    budget = getattr(args, BUDGET, None)
    return default if budget is None else int(budget) + 1


def resolve_arguments(server_args: Any, dflash: Any) -> None:
    """Check and complete the server arguments of a DDTREE server, in place."""
    if release() != "unknown" and not release().startswith(TESTED):
        raise IncompatibleError(
            f"DDTREE runs on SGLang {' and '.join(TESTED)}, found {release()}; install one of "
            "them, or use --speculative-algorithm DFLASH."
        )
    budget = check_budget(_requested_budget(server_args))
    check_arguments(server_args)
    check_backends(tuple(server_args._resolved_attention_backends()))
    dflash.handle_server_args(server_args)
    block = int(server_args.speculative_num_draft_tokens)
    check_budget(budget, block)
    if TreeConfig.from_env().incident:
        check_incident(budget + 1, block)
    server_args.speculative_dflash_block_size = block
    server_args.speculative_num_draft_tokens = max(budget + 1, block)
    setattr(server_args, BUDGET, budget)
    setattr(server_args, VARIES, True)  # requests may ask for less: see limits.REQUEST_KEY


def check_incident(width: int, block: int) -> None:
    """Raise IncompatibleError where the incident switch would do nothing, or harm."""
    if release().startswith(TESTED[1:]):
        raise IncompatibleError(
            f"SGLANG_DDTREE_INCIDENT=on reproduces a fault of SGLang {TESTED[0]}, found "
            f"{release()}, whose backend takes the width from the batch; unset it."
        )
    if width < block:
        raise IncompatibleError(
            f"the incident switch needs a tree wider than the draft block, found {width} rows "
            f"and a block of {block}: the stock kernel would write out of bounds; raise {FLAG}."
        )


def _requested_budget(server_args: Any) -> int | None:
    given = getattr(server_args, BUDGET, None)
    return TreeConfig.from_env().budget if given is None else given


def _init(original: Original) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        budget = kwargs.pop(BUDGET, _FROM_CLI[-1] if _FROM_CLI else None)
        if budget is not None:
            object.__setattr__(self, BUDGET, budget)
        original.value(self, *args, **kwargs)

    return __init__


def _add_cli_args(original: Original) -> Any:
    def add_cli_args(parser: Any) -> None:
        """SGLang's flags and the tree budget."""
        original.value(parser)
        parser.add_argument(
            FLAG,
            type=int,
            default=None,
            help="DDTREE only. Draft nodes to verify per request and step (1 to 1024).",
        )

    return add_cli_args


def _from_cli_args(original: Original) -> Any:
    def from_cli_args(cls: Any, args: Any) -> Any:
        """SGLang drops what is no field of its own: hand the budget over beside it."""
        _FROM_CLI.append(getattr(args, BUDGET, None))
        try:
            return original.value(cls, args)
        finally:
            _FROM_CLI.pop()

    return from_cli_args


def _get_spec_info(original: Original) -> Any:
    def get_spec_info(self: Any, num_tokens: int) -> Any:
        """Capture the target's verify graphs with a mask: without one it is compiled out."""
        spec = original.value(self, num_tokens)
        runner = self.model_runner
        if runner.spec_algorithm.name == ALGORITHM and not runner.is_draft_worker:
            backend = self.attn_backend
            spec.custom_mask = graph_mask(backend, facts_of(type(backend)))
        return spec

    return get_spec_info


def _dummy_verify_input(original: Original) -> Any:
    def create_dummy_verify_input(
        spec_algorithm: Any, server_args: Any, custom_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """SGLang's warm-up states D rows per request; where B + 1 < b the batch has fewer."""
        spec = original.value(spec_algorithm, server_args, custom_mask, *args, **kwargs)
        bound = inspect.signature(original.value).bind(
            spec_algorithm, server_args, custom_mask, *args, **kwargs
        )
        if spec_algorithm.name == ALGORITHM and not bound.arguments["is_draft_worker"]:
            spec.draft_token_num = spec.num_tokens_per_req = bound.arguments["num_tokens_per_req"]
        return spec

    return create_dummy_verify_input


def _need_hidden_states(original: Original) -> Any:
    def spec_need_hidden_states(server_args: Any = None) -> bool:
        args = server_args
        if args is None:
            args = importlib.import_module("sglang.srt.runtime_context").get_server_args()
        if args.speculative_algorithm == ALGORITHM:
            return False
        return bool(original.value(server_args))

    return spec_need_hidden_states


def _validate_request(original: Original) -> Any:
    def validate_dflash_request(req: Any, enable_overlap: bool) -> str | None:
        args = importlib.import_module("sglang.srt.runtime_context").get_server_args()
        if args.speculative_algorithm == ALGORITHM:
            return refuse_request(req)
        return original.value(req, enable_overlap)  # type: ignore[no-any-return]

    return validate_dflash_request


def _row_room(original: Original) -> Any:
    def get_req_to_token_extra_context_len(server_args: Any) -> int:
        """Columns behind the context in a row of `req_to_token`.

        SGLang reserves 2 * D slots behind what the host knows to be committed, and gives a row
        D + 4 columns for them. A request near the context limit would write the rest into the next
        request's row, which then attends to slots that are not its own. A step that runs ahead of
        the host starts up to a block later.
        """
        extra = int(original.value(server_args))
        if server_args.speculative_algorithm != ALGORITHM:
            return extra
        ahead = int(server_args.speculative_dflash_block_size)
        return max(extra, 2 * int(server_args.speculative_num_draft_tokens) + ahead)

    return get_req_to_token_extra_context_len


def _show_block_size(original: Original) -> Any:
    def create_triton_backend(runner: Any) -> Any:
        """The incident: a stock backend that is told the draft block size."""
        args = runner.server_args
        if runner.is_draft_worker or args.speculative_algorithm != ALGORITHM:
            return original.value(runner)
        module = importlib.import_module("sglang.srt.layers.attention.triton_backend")
        wide, block = args.speculative_num_draft_tokens, args.speculative_dflash_block_size
        log.warning(
            "ddtree_guard: SGLANG_DDTREE_INCIDENT is on: the target's attention backend is told "
            "%d rows per request instead of %d; its output is garbage.",
            block,
            getattr(args, BUDGET) + 1,
        )
        object.__setattr__(args, "speculative_num_draft_tokens", block)
        try:
            return module.TritonAttnBackend(runner)
        finally:
            object.__setattr__(args, "speculative_num_draft_tokens", wide)

    return create_triton_backend


# In every process: what it takes to name DDTREE and its budget.
ARGUMENTS = (
    Patch(f"{ARGS}.__init__", "takes the keyword speculative_ddtree_budget", _init),
    Patch(f"{ARGS}.add_cli_args", f"adds the flag {FLAG}", _add_cli_args, ("parser",)),
    Patch(f"{ARGS}.from_cli_args", "keeps the flag's value", _from_cli_args, ("cls", "args")),
)
# In the scheduler of a DDTREE server only.
SERVER = (
    Patch(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner"
        ".get_spec_info",
        "captures DDTREE's verify graphs with the tree mask",
        _get_spec_info,
        ("self", "num_tokens"),
    ),
    Patch(
        "sglang.srt.model_executor.runner.base_runner.create_dummy_verify_input",
        "warms up with as many rows as the tree has",
        _dummy_verify_input,
        ("spec_algorithm", "server_args", "custom_mask"),
    ),
    Patch(
        "sglang.srt.speculative.spec_utils.spec_need_hidden_states",
        "DDTREE relays no hidden states between steps, like DFLASH",
        _need_hidden_states,
        ("server_args",),
    ),
    Patch(
        "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len",
        "gives a request near the context limit room for the slots that SGLang reserves",
        _row_room,
        ("server_args",),
    ),
    Patch(
        "sglang.srt.managers.scheduler.validate_dflash_request",
        "refuses requests that a tree cannot serve",
        _validate_request,
        ("req", "enable_overlap"),
    ),
)
INCIDENT = Patch(
    "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS[triton]",
    "reproduces the incident on purpose",
    _show_block_size,
    ("runner",),
)
