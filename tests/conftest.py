"""JAX as every run has it, set up before any test module imports it."""

from hypothesis import settings

from lockstep.runtime import start_jax

start_jax()

import jax  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")

settings.register_profile("lockstep", deadline=None, derandomize=True, max_examples=25)
settings.load_profile("lockstep")
