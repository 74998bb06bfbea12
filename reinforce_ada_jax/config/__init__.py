"""Every setting of a run: its default, what it may be, the rules between settings, and what a resume may change."""

from reinforce_ada_jax.config.defaults import *  # noqa: F403
