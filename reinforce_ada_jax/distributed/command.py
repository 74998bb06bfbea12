"""Start of a command that several processes may run together."""

from collections.abc import Callable

from absl import flags

from reinforce_ada_jax import cli


def run(main: Callable[[], None], groups: cli.Groups | None = None) -> None:
    """Defines the flag --distributed, and runs a command as `cli.run` does, as one of the processes of a run."""
    text = "One process of several, which the cluster (TPU pod, Slurm, MPI) knows; start it on all."
    distributed = flags.DEFINE_bool("distributed", False, text)

    def start() -> None:
        from reinforce_ada_jax.distributed import processes  # noqa: PLC0415  (it imports JAX, after the flags are parsed)

        with processes.joined(cluster=distributed.value):
            main()

    cli.run(start, groups)
