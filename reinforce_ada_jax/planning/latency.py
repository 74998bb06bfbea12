"""Kernels and collectives that a program begins one after the other, and the seconds that beginning them takes.

Bytes and FLOPs say nothing of this part: a decode step reads its weights in milliseconds, and begins a thousand kernels
and dozens of sums between chips. Where a TPU does not show its program, the counts are those of v5e programs.
"""

import dataclasses
from typing import NamedTuple

from reinforce_ada_jax.planning.roofline import BatchLayout


class Delays(NamedTuple):
    """Seconds that beginning takes on a platform.

    Attributes:
      kernel: until a kernel of a running program computes.
      collective: of a collective that nothing overlaps, beside its hops.
      hop: from one device to the next.
      host_read: until the host has read a number of the device and the next kernel begins.
    """

    kernel: float
    collective: float
    hop: float
    host_read: float


DELAYS = {
    # kernel: an assumption, no public figure was found. jax-ml.github.io/scaling-book/sharding: a hop to a neighbour
    # takes about 1 us, whatever it sends ("A note on ICI latency"). A gather of 32 kB shards over 3 hops of a v5e took
    # 8 us (its Pop Quiz 2): 5 us more than the hops. No host is in a TPU's loops.
    "tpu": Delays(kernel=1e-6, collective=5e-6, hop=1e-6, host_read=0.0),
    # kernel: XLA's cost model assumes it (`kKernelLaunchOverhead` in xla/service/gpu/model/gpu_performance_model_base.h
    # of github.com/openxla/xla). collective, hop: NCCL assumes them when it chooses an algorithm, here a ring with the
    # quickest protocol over NVLink (`baseLat` and `hwLat` in src/graph/tuning.cc; github.com/NVIDIA/nccl/issues/1334).
    # host_read: to launch a kernel and to wait for it took 5.75 us more than the kernel, on an RTX 5070 Ti
    # (susun-blog.com/blog/pegainfer-3-cuda-graph).
    "gpu": Delays(kernel=1e-6, collective=6.6e-6, hop=0.6e-6, host_read=5.75e-6),
}

# Kernels of the programs of Qwen2.5-Math-1.5B for v5e:2x4, libtpu 0.0.51: of a decode step outside of its layers and in
# each layer; of a micro-batch outside, in each layer forwards, and backwards.
STEP_KERNELS, STEP_LAYER_KERNELS = 85, 31
MICRO_BATCH_KERNELS, FORWARD_KERNELS, BACKWARD_KERNELS = 100, 26, 125
# The same of a decode step for h100:8, jax 0.10.2, without collectives over `tensor`, of which nothing overlaps one, a
# sum of the head's. The host reads the condition of the loop over steps, and of the six loops in it that data ends, one
# of which has a turn.
GPU_STEP_KERNELS, GPU_STEP_LAYER_KERNELS = 129, 25
GPU_STEP_HOST_READS = 8


@dataclasses.dataclass(frozen=True)
class Starts:
    """Numbers of what a device begins one after the other in one call or step.

    Attributes:
      kernels: fusions, copies, products, Pallas kernels and collectives.
      collectives: those that nothing overlaps: the device waits for their result.
      hops: between neighbours, of these collectives, one after the other.
      host_reads: numbers of a GPU that its host waits for.
      awaited_bytes: that the device sends in these collectives.
    """

    kernels: float = 0.0
    collectives: float = 0.0
    hops: float = 0.0
    host_reads: float = 0.0
    awaited_bytes: float = 0.0

    def __add__(self, other: "Starts") -> "Starts":
        """Returns both, one after the other."""
        return Starts(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def times(self, count: float) -> "Starts":
        """Returns a loop of `count` turns."""
        return Starts(*(count * number for number in dataclasses.astuple(self)))

    def seconds(self, platform: str) -> float:
        """Returns the seconds by the delays of a platform, without those that the bytes take."""
        counts = self.kernels, self.collectives, self.hops, self.host_reads
        return sum(delay * count for delay, count in zip(DELAYS[platform], counts, strict=True))


def hops(kind: str, devices: int) -> int:
    """Returns the hops of a collective over a line of devices, one after the other."""
    return 1 if kind == "collective-permute" else (2 if kind == "all-reduce" else 1) * (devices - 1)


def decode_step(num_layers: int, tensor: int, sent_bytes: float | int, platform: str) -> Starts:
    """Counts those of a decode step by hand.

    Summed over `tensor` are the embedding's rows, two results in each layer and two numbers of each slot. The devices'
    candidates for the sampled token are gathered (`collectives.decode_sent_bytes`). TPUs wait for all of these bytes.
    """
    sums, gathers = (3 + 2 * num_layers) * (tensor > 1), 1 * (tensor > 1)
    if platform == "gpu":
        kernels = GPU_STEP_KERNELS + num_layers * GPU_STEP_LAYER_KERNELS + sums + gathers
        return Starts(kernels, 1 * (tensor > 1), hops("all-reduce", tensor), GPU_STEP_HOST_READS)
    all_hops = sums * hops("all-reduce", tensor) + gathers * hops("all-gather", tensor)
    kernels = STEP_KERNELS + num_layers * STEP_LAYER_KERNELS
    return Starts(kernels, sums + gathers, all_hops, awaited_bytes=sent_bytes)


def learner_call(num_layers: int, layout: BatchLayout, summed_bytes: float | int, *, update: bool) -> Starts:
    """Counts those of an update or a scoring pass by hand.

    Two results of each layer are summed over `tensor`, once more where they are recomputed, and two gradients. Gathers
    of weights and scatters of gradients overlap with products.
    """
    tensor = layout.tensor_shards
    sums = num_layers * (5 if update else 2) * (tensor > 1)
    kernels = MICRO_BATCH_KERNELS + num_layers * (FORWARD_KERNELS + BACKWARD_KERNELS * update)
    starts = Starts(kernels, sums, sums * hops("all-reduce", tensor)).times(layout.micro_batches)
    return dataclasses.replace(starts, awaited_bytes=summed_bytes)
