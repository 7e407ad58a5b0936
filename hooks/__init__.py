"""Everything that touches SGLang. The contract with the host, each clause with its test:

1. Off means the original objects: without a mode and without a tree nothing is patched
   (tests/hooks/test_plugin.py, tests/matrix/test_hooks.py).
2. Wrappers return what the original returned and let its exceptions through; arguments, signatures
   and results are not changed (test_server_loop.py: guarded and unguarded servers send the same).
3. The guard's own faults are counted per site, said once, and disarm the site; they reach the
   server only in mode raise, and never out of a graph capture (test_fuses.py, test_branch.py,
   test_server_loop.py).
4. A clean step does not wait for the device, except the few that are read whole (the first two of
   a state, then one in 16,384; one in 64 at depth full); inside a capture nothing is allocated or
   read (tests/gpu, benchmarks/device_check.py).
5. Arming is proven: required hooks, a self-test, and a report of every rank; who is not guarded
   is named (test_boot.py, test_server_loop.py).
6. Ranks are compared through the process group's key-value store, never in a collective, so a
   rank without the guard or one that lags is not waited for (test_ranks.py).
7. Every patch is data with a target, an expected signature and one sentence why; restoring puts the
   original back unless somebody else has replaced ours since (test_patching.py).

A step: `sites` (where) -> `runtime.ServerGuard` (when) -> a `checker` (how) -> rules -> `journal`.
"""
