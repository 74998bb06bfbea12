"""Kernels and collectives that a program begins one after the other, and the seconds that beginning them takes.

Bytes and FLOPs say nothing of this part: a decode step reads its weights in milliseconds, and begins a thousand kernels
and dozens of sums between chips. Where a target does not show its program, the counts are those of v5e programs.
"""

import dataclasses

from reinforce_ada_jax.planning.roofline import BatchLayout

# Seconds until a kernel of a running program computes. An assumption: no public figure was found.
KERNEL_S = 1e-6
# jax-ml.github.io/scaling-book/sharding: a hop to a neighbour takes about 1 us, whatever it sends ("A note on ICI
# latency"). A gather of 32 kB shards over 3 hops of a v5e took 8 us (its Pop Quiz 2): 5 us more than the hops.
HOP_S = 1e-6
COLLECTIVE_S = 5e-6

# Kernels of the programs of Qwen2.5-Math-1.5B for v5e:2x4, libtpu 0.0.51: of a decode step outside of its layers and in
# each layer; of a micro-batch outside, in each layer forwards, and backwards.
STEP_KERNELS, STEP_LAYER_KERNELS = 80, 31
MICRO_BATCH_KERNELS, FORWARD_KERNELS, BACKWARD_KERNELS = 100, 26, 125


@dataclasses.dataclass(frozen=True)
class Starts:
    """Numbers of what a device begins one after the other in one call or step.

    Attributes:
      kernels: fusions, copies, Pallas kernels and collectives.
      collectives: those that nothing overlaps: the device waits for their result.
      hops: between neighbours, of these collectives, one after the other.
    """

    kernels: float = 0.0
    collectives: float = 0.0
    hops: float = 0.0

    def __add__(self, other: "Starts") -> "Starts":
        """Returns both, one after the other."""
        return Starts(self.kernels + other.kernels, self.collectives + other.collectives, self.hops + other.hops)

    def times(self, count: float) -> "Starts":
        """Returns a loop of `count` turns."""
        return Starts(count * self.kernels, count * self.collectives, count * self.hops)

    @property
    def seconds(self) -> float:
        """Seconds by the constants of this module."""
        return KERNEL_S * self.kernels + COLLECTIVE_S * self.collectives + HOP_S * self.hops


def hops(kind: str, devices: int) -> int:
    """Returns the hops of a collective over a line of devices, one after the other."""
    return 1 if kind == "collective-permute" else (2 if kind == "all-reduce" else 1) * (devices - 1)


def decode_step(num_layers: int, tensor: int) -> Starts:
    """Counts those of a decode step by hand.

    Summed over `tensor` are the embedding's rows, two results in each layer, and five numbers of each slot
    (`collectives.decode_sent_bytes`).
    """
    sums = (1 + 2 * num_layers + 5) * (tensor > 1)
    return Starts(STEP_KERNELS + num_layers * STEP_LAYER_KERNELS, sums, sums * hops("all-reduce", tensor))


def learner_call(num_layers: int, layout: BatchLayout, *, update: bool) -> Starts:
    """Counts those of an update or a scoring pass by hand.

    Two results of each layer are summed over `tensor`, once more where they are recomputed, and two gradients. Gathers
    of weights and scatters of gradients overlap with products.
    """
    tensor = layout.tensor_shards
    sums = num_layers * (5 if update else 2) * (tensor > 1)
    kernels = MICRO_BATCH_KERNELS + num_layers * (FORWARD_KERNELS + BACKWARD_KERNELS * update)
    return Starts(kernels, sums, sums * hops("all-reduce", tensor)).times(layout.micro_batches)
