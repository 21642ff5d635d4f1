"""How a pickled policy comes back. What unpickling imports first is this module, which is light: JAX comes after."""

from __future__ import annotations

import pickle


def unpickled(content: bytes) -> object:
    """The policy, in a process that is set up as its programs need it."""
    from lockstep.runtime import start_jax

    start_jax()
    from lockstep.run.policy import revive

    return revive(*pickle.loads(content))
