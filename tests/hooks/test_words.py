"""The words of an armed process: every hook, every reason, nothing that a terminal obeys."""

from ddtree_guard.hooks.hook import Hook, HookStatus
from ddtree_guard.hooks.words import armed_words

HOOKS = (
    HookStatus(Hook("build", ()), True, "sglang.x.TritonAttnBackend.init_forward_metadata applied"),
    HookStatus(Hook("capture", (), required=False), False, "sglang.x.y absent\x1b[31m"),
)


def test_every_hook_and_every_reason_is_there() -> None:
    exempt = {"M2": "no mask here", "M1": "no mask here", "T5": "no parents"}
    words = armed_words(HOOKS, exempt, "0.5.12", "ddtree_guard shadow every=4")
    assert words[0] == "SGLang 0.5.12: cpu-tested"
    assert words[1].startswith("hook build in place: sglang.x.TritonAttnBackend")
    assert words[2].startswith("hook capture NOT in place: sglang.x.y absent\\u001b")
    assert words[3] == "ddtree_guard shadow every=4"
    assert words[4:] == ("not checked M1, M2: no mask here", "not checked T5: no parents")


def test_no_exemption_and_a_long_detail() -> None:
    words = armed_words([HookStatus(Hook("a", ()), True, "x" * 9999)], {}, "fork")
    assert words[0] == "SGLang fork: untested"
    assert max(map(len, words)) == 300
