"""Bytes that a device sends to others: read from a compiled program, or counted by hand where a target shows none."""

import re
from typing import NamedTuple

from reinforce_ada_jax.planning import latency
from reinforce_ada_jax.planning.latency import Starts
from reinforce_ada_jax.planning.roofline import BatchLayout, layer_weights
from reinforce_ada_jax.policy.architecture import Architecture

_SIZES = dict(pred=1, s8=1, u8=1, bf16=2, f16=2, s16=2, u16=2, f32=4, s32=4, u32=4, f64=8, s64=8, u64=8)
_COLLECTIVE = re.compile(
    r"= (?P<type>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?P<start>-start)?\("
    r".*?channel_id=(?P<channel>\d+)"
)
_GROUPS = re.compile(
    r"replica_groups=(?:\[\d+,(?P<size>\d+)\]|\{\{(?P<listed>[\d,]+)\}|mesh\[(?P<mesh>[^\]]*)\] \{(?P<axes>[^}]*)\})"
)
# What runs as a kernel of its own. The start of a copy in the background does not, nor do custom calls but Pallas's and
# those of CUDA's libraries (`__cublas$gemm`, `__cudnn$fmhaSoftmax`, `__gpu$xla.gpu.triton`).
_KERNEL = re.compile(
    r"= .*? (?:(?:fusion|copy|convolution|dot|reduce|sort|scatter|gather|dynamic-slice|dynamic-update-slice)\("
    r"|(?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    r'|custom-call\(.*custom_call_target="(?:tpu_custom_call|__[a-z]+\$))'
)
_LOOP = re.compile(
    r" while\(.*condition=%?(?P<condition>[\w.-]+), body=%?(?P<body>[\w.-]+)"
    r'(?:.*"known_trip_count":\{"n":"(?P<turns>\d+)"\})?'
)
_CALLED = re.compile(r"(?:calls|to_apply|(?:true|false)_computation)=(%?[\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def gathered_once_bytes(a: Architecture, layout: BatchLayout) -> float:
    """Bytes that a device receives of the layers' weights where a call gathers them once; 0 where it doesn't."""
    fsdp = layout.weight_shards
    gathered = a.num_layers * layer_weights(a) * (fsdp - 1) / fsdp * layout.itemsize / layout.tensor_shards
    return gathered if layout.gathers_once else 0.0


def learner_summed_bytes(a: Architecture, layout: BatchLayout, *, update: bool) -> float:
    """Bytes of an update or a scoring pass that a device sends for sums along `tensor`, and waits for.

    The outputs of attention and MLP are summed, with the inputs' gradients and once recomputed. Under adapters the
    inputs' gradients are 5 sums in place of 2, because those of queries, keys and values, and those of gate and up, are
    summed over devices one by one.
    """
    tensor, frozen = layout.tensor_shards, layout.adapter_weights > 0
    activations = layout.micro_rows / layout.row_shards * layout.row_tokens * a.hidden_size * layout.itemsize
    sums = (5 + 3 * frozen if update else 2) * a.num_layers * 2 * (tensor - 1) / tensor * activations
    return layout.micro_batches * sums


def learner_sent_bytes(a: Architecture, layout: BatchLayout, *, update: bool) -> float:
    """Bytes that a device sends in an update or in a scoring pass, counted by hand.

    Along `fsdp` a layer's weights are gathered, in an update once more where it is recomputed, and its gradient is
    scattered; with `gathers_once` only the gradient is sent in every micro-batch. The head is gathered and its gradient
    scattered too; this has the masters' precision, twice as wide. Weights under adapters and the head have no gradient
    to scatter then. The sums along `tensor` come in addition.
    Seven compiled updates of all weights, 1.5B to 7B on v5e, send between 16 % less and 9 % more.
    """
    fsdp, tensor = layout.weight_shards, layout.tensor_shards
    gathered = (fsdp - 1) / fsdp * layout.itemsize / tensor
    frozen = layout.adapter_weights > 0
    layer_passes, adapter_passes, head_passes = (3 - frozen, 3, 2 if frozen else 4) if update else (1, 1, 1)
    once = gathered_once_bytes(a, layout)
    layer_passes = (1 if update else 0) if layout.gathers_once else layer_passes
    weights = a.num_layers * (layer_passes * layer_weights(a) + adapter_passes * layout.adapter_weights) * gathered
    head = head_passes * a.vocab_size * a.hidden_size * gathered
    return once + layout.micro_batches * (weights + head) + learner_summed_bytes(a, layout, update=update)


def decode_sent_bytes(a: Architecture, rows: int, tensor: int, itemsize: int) -> float:
    """Bytes that a device sends in a decode step of `rows` slots, counted by hand.

    Summed along `tensor` are the embedding's rows, the outputs of attention and MLP of each layer, and two numbers of
    four bytes a slot: the head's largest logit and sum. Each device sends its candidate for the sampled token: score,
    index and log-probability.
    """
    summed = (1 + 2 * a.num_layers) * a.hidden_size * itemsize + 2 * 4
    return rows * (2 * (tensor - 1) / tensor * summed + (tensor - 1) * 3 * 4)


def _array_bytes(hlo_type: str) -> list[float]:
    sizes = []
    for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", hlo_type):
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


def _collective_bytes(found: re.Match[str], line: str) -> float:
    """Bytes over the busiest link of a collective on a line of chips."""
    n, kind, hlo_type = _group_size(line), found["kind"], found["type"]
    if found["start"]:
        hlo_type = hlo_type.replace("u32[]", "")  # contexts
    arrays = _array_bytes(hlo_type)
    if found["start"] and kind != "all-reduce":
        arrays = arrays[len(arrays) // 2 :]  # what starts names its operands before its results
    size = sum(arrays)
    if kind == "collective-permute":
        return size
    factor = {"all-gather": (n - 1) / n, "all-to-all": (n - 1) / n, "all-reduce": 2 * (n - 1) / n}
    return size * factor.get(kind, n - 1)  # a reduce-scatter's result is one of n parts


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """(lines of each computation, name of the entry)."""
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        begins = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if begins:
            name = begins[2]
            computations[name] = []
            entry = name if begins[1] else entry
        elif name:
            computations[name].append(line)
    return computations, entry


def _branches(line: str) -> list[str]:
    return [name.strip(" %") for each in _BRANCHES.findall(line) for name in each.split(",")]


def _callees(line: str) -> list[str]:
    return [name.strip(" %") for name in _CALLED.findall(line)] + _branches(line)


def by_loop(hlo: str) -> dict[tuple[str, ...], list[str]]:
    """Returns the kinds of collectives in each loop and branch of a compiled program that has some.

    The key is its nesting: bodies of loops and branches of conditionals, from the outermost to its own.
    """
    computations, entry = _computations(hlo)
    found: dict[tuple[str, ...], dict[str, str]] = {}

    def walk(name: str, nesting: tuple[str, ...]) -> None:
        for line in computations.get(name, ()):
            collective, loop = _COLLECTIVE.search(line), _LOOP.search(line)
            if collective:
                found.setdefault(nesting, {})[collective["channel"]] = collective["kind"]
            bodies = [loop["body"]] if loop else _branches(line)
            for body in bodies:
                walk(body, (*nesting, body))
            for callee in [] if loop else _callees(line):
                if callee not in bodies:
                    walk(callee, nesting)

    walk(entry, ())
    return {nesting: list(kinds.values()) for nesting, kinds in found.items()}


class Traffic(NamedTuple):
    """Bytes that a device sends in one call of a compiled program, and what it begins.

    Attributes:
      sent_bytes: to other devices.
      collectives: how many there are in the program, by kind.
      starts: kernels and collectives that begin one after the other.
    """

    sent_bytes: float
    collectives: dict[str, int]
    starts: Starts


def traffic(hlo: str, trip_count: float | None, platform: str = "tpu") -> Traffic:
    """Reads the traffic of one call from a compiled program.

    Loops have the turns that the text names, or the constant that their condition compares with. Each collective counts
    once, however many fusions the compiler has spread it over. Those inside of fusions overlap with products, and so
    does one that starts and is awaited later. Of the branches of a conditional all are counted.

    Args:
      hlo: text of the compiled program.
      trip_count: of the outermost loop where data ends it; the one that sends most counts. None: the constant.
      platform: "tpu" or "gpu". The host of a GPU reads the condition of a loop that data ends, before each turn and
        after the last.
    """
    computations, entry = _computations(hlo)
    seen: set[str] = set()
    kinds: dict[str, int] = {}

    def constant_trip_count(condition: str) -> int:
        constant = re.compile(r"s32\[\]\S* constant\((\d+)\)")
        return max((int(x) for line in computations[condition] for x in constant.findall(line)), default=1)

    def total(name: str, outermost: bool, fused: bool) -> tuple[float, Starts]:
        size, starts, loops = 0.0, Starts(), [(0.0, Starts())]
        for line in computations.get(name, ()):
            if not fused and _KERNEL.search(line):
                starts += Starts(kernels=1)
            found = _COLLECTIVE.search(line)
            if found and found["channel"] not in seen:
                seen.add(found["channel"])
                kinds[found["kind"]] = kinds.get(found["kind"], 0) + 1
                sent = _collective_bytes(found, line)
                size += sent
                if not fused and (not found["start"] or '"is_sync":true' in line):
                    hops = latency.hops(found["kind"], _group_size(line))
                    starts += Starts(collectives=1, hops=hops, awaited_bytes=sent)
            loop = _LOOP.search(line)
            if loop:
                inside, once = total(loop["body"], False, fused)
                given = trip_count if outermost and not loop["turns"] else None
                turns = int(loop["turns"] or constant_trip_count(loop["condition"])) if given is None else given
                once = once.times(turns)
                if platform == "gpu" and not loop["turns"]:
                    once += Starts(host_reads=turns + 1)
                if given is None:
                    size, starts = size + turns * inside, starts + once
                else:
                    loops.append((turns * inside, once))
                continue
            for callee in _callees(line):
                in_fusion = " call(" not in line and callee not in _branches(line)
                inside, once = total(callee, outermost, fused or in_fusion)
                size, starts = size + inside, starts + once
        inside, once = max(loops, key=lambda each: (each[0], each[1].kernels))
        return size + inside, starts + once

    size, starts = total(entry, outermost=True, fused=False)
    return Traffic(size, kinds, starts)
