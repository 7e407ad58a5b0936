"""Everything that touches SGLang, and the contract that it keeps with its host.

- Never raise into SGLang unless the mode is `raise`.
- Never change a return value, a signature or an object's identity.
- Never swallow the host's exception.
- No device sync and no allocation inside graph capture.
- With nothing to do, every SGLang object stays the original one.
- Every patch says in one sentence why it exists, and can be undone.
"""
