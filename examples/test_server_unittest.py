"""A server as a child process, in the style of SGLang's own tests. Needs a GPU and a model.

    MODEL=... DRAFT=... pytest --ddtree-guard=log examples/test_server_unittest.py

or without pytest, as SGLang runs its suites:

    SGLANG_DDTREE_GUARD=log SGLANG_DDTREE_GUARD_DUMP_DIR=evidence python3 test_server_unittest.py
    ddtree-guard ci-report evidence
"""

import json
import os
import unittest
import urllib.request

try:
    import pytest

    guarded = pytest.mark.ddtree_guard(device="cuda", steps="required")
except ImportError:  # python3 test_server_unittest.py, where there is no pytest

    def guarded(case: type) -> type:
        return case


URL = "http://127.0.0.1:31017"


@guarded
class TestDFlash(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        from sglang.srt.utils import kill_process_tree
        from sglang.test.test_utils import popen_launch_server

        args = ["--attention-backend", "triton", "--speculative-algorithm", "DFLASH"]
        args += ["--speculative-draft-model-path", os.environ["DRAFT"]]
        # without `env` the server gets this process's environment, which the plugin has prepared
        cls.server = popen_launch_server(os.environ["MODEL"], URL, timeout=600, other_args=args)
        cls.addClassCleanup(kill_process_tree, cls.server.pid)

    def test_two_requests(self) -> None:
        body: dict[str, object] = {"text": ["The Zen of Python", "Beautiful is better than"]}
        body["sampling_params"] = {"temperature": 0.0, "max_new_tokens": 64}
        request = urllib.request.Request(
            f"{URL}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert len(json.load(answer)) == 2


if __name__ == "__main__":
    unittest.main()
