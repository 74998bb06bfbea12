"""What a run's programs do at least, and how fast a chip could do it. Arithmetic only; nothing is compiled here.

FLOPs are those of the matrix products, attention's among them, which XLA computes over the whole square before it
masks, and splash attention over the blocks up to the diagonal. Bytes are weights, cache, gradients, optimiser state,
the activations kept between layers and attention's scores, each as often as a program cannot do without; other
activations are not counted, so the least time is a lower bound.
`cost_analysis` counts the body of a loop once and sees nothing inside Pallas kernels; `Work.once` is counted the same
way, so that the two can be held against each other. What passes between chips is read from the compiled program.
"""

import dataclasses
import math
import re

import jax.numpy as jnp

from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.sampling.pallas_attention import padded_head_dim
from reinforce_ada_jax.sampling.state import EngineOptions

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU slice, as the compiler sees it.

    Attributes:
      hbm_bytes: what a program may use.
      bandwidth: of HBM, bytes a second.
      flops: peak in bfloat16, a second.
      link: bytes a second over one link to a neighbour, one way.
    """

    hbm_bytes: int
    bandwidth: float
    flops: float
    link: float


# Bandwidth and peak: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, each "per chip" (tpu7x bandwidth: jax's
# pallas/mosaic/tpu_info.py). hbm_bytes: the "available HBM" of libtpu 0.0.51's own CompileTimeHbmOom. link: the table
# "ICI BW/link (one-way)" of jax-ml.github.io/scaling-book/tpus; Google's own pages give 400 GB/s (v5e), 800 (v6e) and
# 1200 (v5p) a chip for both ways of 4, 4 and 6 links, a tenth more. A tpu7x chip is two devices, and a v4 chip is
# compiled for as two (a real one may show them as one): those have half a chip each.
CHIPS = {
    "v4": Chip(int(15.25 * GIB), 1200e9 / 2, 275e12 / 2, 45e9 / 2),
    "v5e": Chip(int(15.75 * GIB), 819e9, 197e12, 45e9),
    "v5p": Chip(int(95.73 * GIB), 2765e9, 459e12, 90e9),
    "v6e": Chip(int(31.24 * GIB), 1640e9, 918e12, 90e9),
    "tpu7x": Chip(int(94.74 * GIB), 7400e9 / 2, 2307e12 / 2, 90e9 / 2),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one device does at least.

    Attributes:
      flops: floating-point operations.
      bytes: read from or written to HBM.
      once: FLOPs with the body of every loop counted once, as the compiler counts them; None: not to be compared.
    """

    flops: float
    bytes: float
    once: float | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that an update or a scoring pass works on, and how the mesh splits them.

    Attributes:
      micro_batches: how many.
      rows: of one micro-batch, on all devices together.
      tokens: positions of a row, to which every one is padded.
      head_tokens: those of them that meet the output head.
      prompt_tokens: limit of a prompt.
      tile: (response positions, words) of a block in which logits exist.
      kernels: the head is met in Pallas kernels, which make the logits once more and which the compiler doesn't count.
      remat: of `transformer.REMAT`, what is computed again backwards.
      block: positions of a block of splash attention; None: attention of the whole square, by the compiler.
      row_shards: devices along `data` and `fsdp`.
      weight_shards: devices along `fsdp`.
      tensor: devices along `tensor`.
      itemsize: bytes of an activation.
      adapters: weights of one layer's adapters, where they alone are trained; 0: all weights are.
    """

    micro_batches: int
    rows: int
    tokens: int
    head_tokens: int
    prompt_tokens: int
    tile: tuple[int, int]
    kernels: bool
    remat: str
    block: int | None
    row_shards: int
    weight_shards: int
    tensor: int
    itemsize: int
    adapters: int = 0

    @property
    def devices(self) -> int:
        """Over which the work is split."""
        return self.row_shards * self.tensor


def layer_weights(a: Architecture) -> int:
    """Weights of one layer's matrices."""
    return a.hidden_size * (a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads) + 3 * a.ffn_size)


def token_bytes(a: Architecture, o: EngineOptions) -> int:
    """Of one token's keys and values in the cache, all layers, with the columns that pages have for the kernel."""
    columns = padded_head_dim(a.head_dim, o.attention)
    return 2 * a.num_layers * a.num_kv_heads * columns * jnp.dtype(o.dtype).itemsize


def chip_of(topology: str) -> Chip:
    """The chip of a topology's name.

    Raises:
      ValueError: no such chip.
    """
    generation, _, shape = topology.partition(":")
    if generation not in CHIPS or not shape:
        raise ValueError(
            f"--topology is {topology!r}; write CHIP:SHAPE with a chip of {', '.join(CHIPS)}, such as v5e:2x4 or "
            "v5p:2x2x1."
        )
    return CHIPS[generation]


# ---- decoding ----------------------------------------------------------------------------------------------------


def decode_turn(a: Architecture, o: EngineOptions, tensor: int, mean_context: float) -> Work:
    """One token for every slot, on each of `tensor` devices.

    2 FLOPs a weight and slot, 4 N H a layer for each token that a slot sees (q k and p v). Every weight is read once
    (of an embedding that isn't also the output head only a row a slot, not counted), and the slots' live cache.
    """
    head = a.vocab_size * a.hidden_size
    matrices = a.num_layers * layer_weights(a) + head
    attention = 4 * a.num_heads * a.head_dim * a.num_layers * mean_context
    weights = (a.num_parameters - (0 if a.tied_embedding else head)) * jnp.dtype(o.dtype).itemsize
    cache = o.slots * mean_context * token_bytes(a, o)
    return Work(o.slots * (2 * matrices + attention) / tensor, (weights + cache) / tensor)


def prefill_call(a: Architecture, o: EngineOptions, tensor: int, tokens: int) -> Work:
    """`prefill_rows` prompts of a bucket of `tokens`, on each of `tensor` devices.

    As `decode_turn`, without the head; attention over the whole square, which is what XLA computes before it masks.
    """
    matrices = a.num_layers * layer_weights(a)
    attention = 4 * a.num_heads * a.head_dim * a.num_layers * tokens
    positions = o.prefill_rows * tokens
    bytes_ = matrices * jnp.dtype(o.dtype).itemsize + positions * token_bytes(a, o)
    return Work(positions * (2 * matrices + attention) / tensor, bytes_ / tensor)


# ---- learning ----------------------------------------------------------------------------------------------------


def _flops(a: Architecture, r: Rows, passes: int) -> tuple[float, float]:
    """FLOPs on each device, (in all, with every loop's body once), where a product is computed `passes` times over;
    with weights once less where it is kept.

    2 a weight and position, of the head for the positions that predict a response token; 4 N H T^2 a layer. The head's
    kernels for the gradients of hidden states and of the head make the logits each for itself. Splash attention leaves
    out blocks above the diagonal; of its 7 products backwards, 3 make scores and slopes that it has made already.

    Weights under adapters have no gradient: theirs and the head's products are computed once less, and no kernel makes
    the logits for it. Of each adapter one half isn't split over `tensor`; it is counted as if it were.
    """
    kept = r.remat == "dots" and passes > 1
    frozen = r.adapters > 0 and passes > 1
    matrices = 2 * r.tokens * ((passes - kept - frozen) * layer_weights(a) + (passes - kept) * r.adapters)
    square = 2 * a.num_heads * a.head_dim * r.tokens**2
    if r.block is None:
        attention = passes * 2 * square
        seen = matrices + attention
    else:
        blocks = math.ceil(r.tokens / r.block)
        attention = (2 if passes == 1 else 2 + 2 + 7) * square * (blocks + 1) / (2 * blocks)
        seen = matrices
    layer = matrices + attention
    products = passes - 1 if frozen else passes + (r.kernels and passes > 1)
    head = products * 2 * a.vocab_size * a.hidden_size * r.head_tokens
    positions, words = r.rows * r.head_tokens / r.row_shards, a.vocab_size / r.tensor
    block = 0 if r.kernels else products * 2 * a.hidden_size * min(positions, r.tile[0]) * min(words, r.tile[1])
    each = r.rows / r.devices
    return r.micro_batches * each * (a.num_layers * layer + head), each * seen + block


def _micro_batch_bytes(a: Architecture, r: Rows, *, weight_reads: int, score_passes: int) -> float:
    """Layers' weights as a device's products read them, whole along `fsdp`, and attention's scores [rows, N, T, T].

    Splash attention has no scores outside of its kernels.
    """
    weights = weight_reads * a.num_layers * (layer_weights(a) + r.adapters) * r.itemsize / r.tensor
    scores = score_passes * a.num_layers * a.num_heads * r.rows * r.tokens**2 * r.itemsize / r.devices
    return weights + (scores if r.block is None else 0)


def _head_bytes(a: Architecture, r: Rows, *, backward: bool) -> float:
    """What the sweeps over the vocabulary read, whole along `fsdp`.

    Those for statistics and for the hidden states' gradient read the head once for each block of positions, that for
    the head's own gradient, which a frozen one has not, reads the hidden states once for each block of words.
    """
    head = a.vocab_size * a.hidden_size * r.itemsize / r.tensor
    positions = r.rows * r.head_tokens / r.row_shards
    blocks = math.ceil(positions / r.tile[0])
    if not backward:
        return blocks * head
    if r.adapters:
        return 2 * blocks * head
    return (2 * blocks + 1) * head + a.vocab_size / r.tensor / r.tile[1] * positions * a.hidden_size * r.itemsize


def score_call(a: Architecture, r: Rows) -> Work:
    """The old policy's log-probabilities of a minibatch, on each device: one forward pass."""
    flops, once = _flops(a, r, 1)
    bytes_ = _micro_batch_bytes(a, r, weight_reads=1, score_passes=2) + _head_bytes(a, r, backward=False)
    return Work(flops, r.micro_batches * bytes_, once)


def update_call(a: Architecture, r: Rows, master_itemsize: int) -> Work:
    """One optimiser step on a minibatch, on each device.

    Every product is computed forwards, once more where the backward pass recomputes its layer, and twice backwards:
    8 FLOPs a weight and position where 6 are necessary; under adapters 6 where 4 are. The layers' inputs are written
    and read, and what products with weights gave where it is kept; sums of gradients are read and written for every
    micro-batch; the step reads and writes weights and both moments, all three of adapters where those are trained.
    """
    flops, once = _flops(a, r, 4)
    trained = a.num_layers * r.adapters or a.num_parameters
    shard = trained * master_itemsize / (r.weight_shards * r.tensor)
    kept = r.remat == "dots"
    width = a.hidden_size / r.row_shards
    if kept:
        width += (a.head_dim * (a.num_heads + 2 * a.num_kv_heads) + a.hidden_size + 2 * a.ffn_size) / r.devices
    inputs = 2 * a.num_layers * r.rows * r.tokens * width * r.itemsize
    each = _micro_batch_bytes(a, r, weight_reads=3 - kept, score_passes=8) + _head_bytes(a, r, backward=True)
    each += inputs + 2 * shard
    bytes_ = r.micro_batches * each + 7 * shard
    return Work(flops, bytes_, once)


def necessary_flops(a: Architecture, r: Rows) -> float:
    """What an update needs by the usual rule, on each device: 6 N a position, and 12 N_heads H T a layer.

    Where adapters are trained, 4 N and 6 a weight of theirs in place of 6 N.
    """
    weights = 4 * a.num_parameters + 6 * a.num_layers * r.adapters if r.adapters else 6 * a.num_parameters
    position = weights + 12 * a.num_layers * a.num_heads * a.head_dim * r.tokens
    return r.micro_batches * r.rows * r.tokens * position / r.devices


def features_call(a: Architecture, r: Rows) -> Work:
    """The value head's hidden states of one chunk of prompts, on each device."""
    matrices = layer_weights(a) + r.adapters
    layer = r.rows * r.prompt_tokens * (2 * matrices + 4 * a.num_heads * a.head_dim * r.prompt_tokens)
    weights = a.num_layers * matrices * r.itemsize / r.tensor
    return Work(a.num_layers * layer / r.devices, weights, layer / r.devices)


# ---- between chips -----------------------------------------------------------------------------------------------


def learner_sent(a: Architecture, r: Rows, *, update: bool) -> float:
    """What a device sends in an update, or in a scoring pass, counted by hand: for targets that don't show their HLO.

    Along `fsdp` a layer's weights are gathered, in an update once more where it is recomputed, and its gradient is
    scattered; the head's weights go the same way, and their gradient in the masters' precision, twice as wide. Along
    `tensor` the outputs of attention and feed-forward are summed, with the inputs' gradients and once recomputed.
    Weights under adapters have no gradient to scatter, nor has the head; the adapters' own count as layers' weights do.
    The inputs' gradients are 5 sums in place of 2: those of queries, keys and values are not added before they are
    summed over devices, nor those of gate and up.
    Seven compiled updates of all weights, 1.5B to 7B on v5e, send between 16 % less and 9 % more.
    """
    f, t = r.weight_shards, r.tensor
    gather = (f - 1) / f * r.itemsize / t
    frozen = r.adapters > 0
    of_layer, of_adapters, of_head = (3 - frozen, 3, 2 if frozen else 4) if update else (1, 1, 1)
    weights = a.num_layers * (of_layer * layer_weights(a) + of_adapters * r.adapters) * gather
    head = of_head * a.vocab_size * a.hidden_size * gather
    stream = r.rows / r.row_shards * r.tokens * a.hidden_size * r.itemsize
    sums = (5 + 3 * frozen if update else 2) * a.num_layers * 2 * (t - 1) / t * stream
    return r.micro_batches * (weights + head + sums)


_SIZES = dict(pred=1, s8=1, u8=1, bf16=2, f16=2, s16=2, u16=2, f32=4, s32=4, u32=4, f64=8, s64=8, u64=8)
_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
    r".*?channel_id=(?P<channel>\d+)"
)
_GROUPS = re.compile(
    r"replica_groups=(?:\[\d+,(?P<size>\d+)\]|\{\{(?P<listed>[\d,]+)\}|mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\})"
)
_CALLED = re.compile(r"(?:calls|to_apply|(?:true|false)_computation)=(%?[\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def _arrays(type_: str) -> list[float]:
    sizes = []
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", type_):
        size = _SIZES.get(dtype, 4)
        for axis in filter(None, shape.split(",")):
            size *= int(axis)
        sizes.append(float(size))
    return sizes


def _group_size(line: str) -> int:
    found = _GROUPS.search(line)
    if found is None:
        return 1
    if found["size"]:
        return int(found["size"])
    if found["listed"]:
        return len(found["listed"].split(","))
    sizes, product = dict(re.findall(r"'(\w+)'=(\d+)", found["mesh"])), 1
    for axis in re.findall(r"'(\w+)'", found["axes"]):
        product *= int(sizes[axis])
    return product


def _sent(found: re.Match, line: str) -> float:
    """Bytes over the busiest link of a collective, on a line of chips: what the last one must hear, or tell."""
    arrays, n = _arrays(found["type"]), _group_size(line)
    kind = found["kind"]
    if kind == "collective-permute":
        return arrays[0]
    # A started one names what goes in beside what comes out.
    size = max(arrays) if found["start"] and kind == "all-gather" else sum(arrays)
    share = {"all-gather": (n - 1) / n, "all-to-all": (n - 1) / n, "all-reduce": 2 * (n - 1) / n}
    return size * share.get(kind, n - 1)  # of reduce-scatter, what comes out is one of n parts


def sent_bytes(text: str, turns: int | None) -> tuple[float, dict[str, int]]:
    """What a device sends in one call of a compiled program, (bytes, number of collectives by kind).

    Loops are followed by the constant that their condition compares with. Each collective counts once, however many
    fusions the compiler has spread it over.

    Args:
      text: the compiled HLO.
      turns: of the outermost loop, of which the busiest counts, where the program ends it by data; None: the constant.
    """
    computations, entry, name = {}, "", ""
    for line in text.splitlines():
        begins = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if begins:
            name = begins[2]
            computations[name] = []
            entry = name if begins[1] else entry
        elif name:
            computations[name].append(line)
    seen: set[str] = set()
    kinds: dict[str, int] = {}

    def loop_turns(condition: str) -> int:
        constants = [
            int(x) for line in computations[condition] for x in re.findall(r"s32\[\]\S* constant\((\d+)\)", line)
        ]
        return max(constants, default=1)

    def total(name: str, outermost: bool) -> float:
        here, loops = 0.0, [0.0]
        for line in computations.get(name, ()):
            found = _COLLECTIVE.search(line)
            if found and found["channel"] not in seen:
                seen.add(found["channel"])
                kinds[found["kind"]] = kinds.get(found["kind"], 0) + 1
                here += _sent(found, line)
            loop = re.search(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)", line)
            if loop and outermost and turns is not None:
                loops.append(turns * total(loop[2], outermost=False))
            elif loop:
                here += loop_turns(loop[1]) * total(loop[2], outermost=False)
            else:
                for called in _CALLED.findall(line) + _BRANCHES.findall(line):
                    for callee in called.split(","):
                        here += total(callee.strip(" %"), outermost)
        return here + max(loops)

    return total(entry, outermost=True), kinds


def roofline(work: Work, chip: Chip, sent: float = 0.0) -> tuple[float, str]:
    """(least seconds, which takes them: "bandwidth", "compute" or "links"), all three going on side by side."""
    by = {"bandwidth": work.bytes / chip.bandwidth, "compute": work.flops / chip.flops, "links": sent / chip.link}
    bound = max(by, key=lambda name: by[name])
    return by[bound], bound
