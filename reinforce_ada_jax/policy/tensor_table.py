"""Names and layouts of the tensors in Hugging Face folders, and the part of our weights that each tensor is."""

import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np

from reinforce_ada_jax.policy import transformer
from reinforce_ada_jax.policy.architecture import Architecture

# Our weight: (its axes, Hugging Face's name, the axes there). Letters written together are one axis there. A torch
# Linear is [out, in] where ours are [in, out]; the embedding is [V, D] in both.
TABLE = {
    "embedding": ("V D", "model.embed_tokens.weight", "V D"),
    "layers.attention_norm": ("L D", "model.layers.{}.input_layernorm.weight", "D"),
    "layers.attention.query": ("L D N H", "model.layers.{}.self_attn.q_proj.weight", "NH D"),
    "layers.attention.key": ("L D K H", "model.layers.{}.self_attn.k_proj.weight", "KH D"),
    "layers.attention.value": ("L D K H", "model.layers.{}.self_attn.v_proj.weight", "KH D"),
    "layers.attention.query_bias": ("L N H", "model.layers.{}.self_attn.q_proj.bias", "NH"),
    "layers.attention.key_bias": ("L K H", "model.layers.{}.self_attn.k_proj.bias", "KH"),
    "layers.attention.value_bias": ("L K H", "model.layers.{}.self_attn.v_proj.bias", "KH"),
    "layers.attention.query_norm": ("L H", "model.layers.{}.self_attn.q_norm.weight", "H"),
    "layers.attention.key_norm": ("L H", "model.layers.{}.self_attn.k_norm.weight", "H"),
    "layers.attention.output": ("L N H D", "model.layers.{}.self_attn.o_proj.weight", "D NH"),
    "layers.mlp_norm": ("L D", "model.layers.{}.post_attention_layernorm.weight", "D"),
    "layers.mlp.gate": ("L D F", "model.layers.{}.mlp.gate_proj.weight", "F D"),
    "layers.mlp.up": ("L D F", "model.layers.{}.mlp.up_proj.weight", "F D"),
    "layers.mlp.down": ("L F D", "model.layers.{}.mlp.down_proj.weight", "D F"),
    "final_norm": ("D", "model.norm.weight", "D"),
    "head": ("D V", "lm_head.weight", "V D"),
}
# Other architectures have the following tensors instead, or in addition. In `EXPERTS` each expert (E) of a layer is a
# tensor of its own.
NORM_AFTER = {
    "layers.attention_norm": ("L D", "model.layers.{}.post_attention_layernorm.weight", "D"),
    "layers.mlp_norm": ("L D", "model.layers.{}.post_feedforward_layernorm.weight", "D"),
}
NORM_AROUND = {
    "layers.attention_out_norm": ("L D", "model.layers.{}.post_attention_layernorm.weight", "D"),
    "layers.mlp_norm": ("L D", "model.layers.{}.pre_feedforward_layernorm.weight", "D"),
    "layers.mlp_out_norm": ("L D", "model.layers.{}.post_feedforward_layernorm.weight", "D"),
}
QK_NORM_WHOLE = {
    "layers.attention.query_norm": ("L N H", "model.layers.{}.self_attn.q_norm.weight", "NH"),
    "layers.attention.key_norm": ("L K H", "model.layers.{}.self_attn.k_norm.weight", "KH"),
}
EXPERTS = {
    "layers.mlp.router": ("L D E", "model.layers.{}.mlp.gate.weight", "E D"),
    "layers.mlp.expert_gate": ("L E D X", "model.layers.{}.mlp.experts.{}.gate_proj.weight", "X D"),
    "layers.mlp.expert_up": ("L E D X", "model.layers.{}.mlp.experts.{}.up_proj.weight", "X D"),
    "layers.mlp.expert_down": ("L E X D", "model.layers.{}.mlp.experts.{}.down_proj.weight", "D X"),
}
# All experts of a layer are one tensor; Y are the columns of gate and up, which alternate.
GPT_OSS = {
    "layers.attention.output_bias": ("L D", "model.layers.{}.self_attn.o_proj.bias", "D"),
    "layers.attention.sinks": ("L N", "model.layers.{}.self_attn.sinks", "N"),
    "layers.mlp.router": ("L D E", "model.layers.{}.mlp.router.weight", "E D"),
    "layers.mlp.router_bias": ("L E", "model.layers.{}.mlp.router.bias", "E"),
    "layers.mlp.expert_gate_up": ("L E D Y", "model.layers.{}.mlp.experts.gate_up_proj", "E D Y"),
    "layers.mlp.expert_gate_up_bias": ("L E Y", "model.layers.{}.mlp.experts.gate_up_proj_bias", "E Y"),
    "layers.mlp.expert_down": ("L E X D", "model.layers.{}.mlp.experts.down_proj", "E X D"),
    "layers.mlp.expert_down_bias": ("L E D", "model.layers.{}.mlp.experts.down_proj_bias", "E D"),
}
# Tensors of a layer that hold several of `TABLE`, one after the other along the first axis.
JOINED = {
    "phi3": {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    }
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One Hugging Face tensor: a weight of ours, or one layer of a stacked one, or one expert of a layer."""

    weight: str  # our dotted name
    layer: int | None  # its index along the weight's first axis; None where it is the whole weight
    expert: int | None  # its index along the second axis; None where it is the whole layer
    ours: tuple[int, ...]  # its shape there, 1 along the axes of layers and experts
    theirs: tuple[int, ...]  # its shape in the file
    transposed: bool  # whether the file has the axes in the other order

    @property
    def start(self) -> tuple[int, ...]:
        """Indices of its first element in the weight."""
        return (self.layer or 0, self.expert or 0, *[0] * len(self.ours))[: len(self.ours)]

    @property
    def order(self) -> tuple[int, ...]:
        """Axes of the weight as they are in the files, from the outermost to the innermost."""
        axes, outer = range(len(self.ours)), (self.layer is not None) + (self.expert is not None)
        if not self.transposed:
            return tuple(axes)
        middle = next(axis for axis in axes if math.prod(self.ours[outer:axis]) == self.theirs[-1] and axis > outer)
        return (*axes[:outer], *axes[middle:], *axes[outer:middle])

    def _cuts(self, index: tuple[slice, ...]) -> tuple[tuple[slice, ...], list[int], tuple[slice, ...]]:
        """Returns the region of the tensor, the shape of what is read, without transposing, and what is cut after."""
        outer = (self.layer is not None) + (self.expert is not None)
        sizes = iter(self.ours[outer:])
        cuts = iter([part.indices(size)[:2] for part, size in zip(index, self.ours, strict=True)][outer:])
        region, shape, inner = [], [*self.ours[:outer]], [slice(None)] * outer
        for merged in self.theirs[::-1] if self.transposed else self.theirs:
            count, (first, last) = next(sizes), next(cuts)
            run = merged // count
            region.append(slice(first * run, last * run))
            shape.append(last - first)
            inner.append(slice(None))
            while count < merged:
                size = next(sizes)
                count *= size
                shape.append(size)
                inner.append(slice(*next(cuts)))
        return tuple(region[::-1] if self.transposed else region), shape, tuple(inner)

    def region(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Returns the region of the tensor in the file that `read` asks for."""
        return self._cuts(index)[0]

    def read(self, index: tuple[slice, ...], get: Callable[[tuple[slice, ...]], np.ndarray]) -> np.ndarray:
        """Returns the elements at `index` of this part of the weight, in our layout.

        `get` returns a region of the tensor in the file. Where several of our axes are one axis in the file, the region
        is cut along the first of them alone; the others are cut after reading.
        """
        region, shape, inner = self._cuts(index)
        tensor = get(region)
        return (tensor.T if self.transposed else tensor).reshape(shape)[inner]

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """Returns a view of `value`, which has our layout, in the file's layout."""
        return value.reshape(self.theirs[::-1]).T if self.transposed else value.reshape(self.theirs)


def axis_sizes(architecture: Architecture) -> dict[str, int]:
    """Returns the size of each axis letter of `TABLE`."""
    return {
        "L": architecture.num_layers, "V": architecture.vocab_size, "D": architecture.hidden_size,
        "F": architecture.ffn_size, "N": architecture.num_heads, "K": architecture.num_kv_heads,
        "H": architecture.head_dim, "E": architecture.num_experts, "X": architecture.expert_size,
        "Y": 2 * architecture.expert_size,
    }  # fmt: skip


def table(architecture: Architecture) -> dict[str, tuple[str, str, str]]:
    """Returns `TABLE` with the entries that this architecture has instead or in addition."""
    norms = {"before": {}, "after": NORM_AFTER, "around": NORM_AROUND}[architecture.norm_place]
    experts = EXPERTS | (GPT_OSS if architecture.expert_limit else {})
    return TABLE | experts | norms | (QK_NORM_WHOLE if architecture.qk_norm_whole else {})


def parts(architecture: Architecture) -> dict[str, Part]:
    """Returns every tensor of a Hugging Face folder of this architecture, by its name there."""
    sizes, names, found = axis_sizes(architecture), table(architecture), {}
    for weight, (shape, _) in transformer.weight_shapes(architecture).items():
        our_axes, name, their_axes = names[weight]
        theirs = tuple(math.prod(sizes[letter] for letter in axis) for axis in their_axes.split())
        by_expert = name.count("{}") == 2
        inner = our_axes.removeprefix("L ").removeprefix("E " if by_expert else "")
        transposed = inner.replace(" ", "") != their_axes.replace(" ", "")
        layers = range(architecture.num_layers) if our_axes.startswith("L ") else (None,)
        experts = range(architecture.num_experts) if by_expert else (None,)
        num_outer = len(shape) - len(inner.split())
        ours = (*[1] * num_outer, *shape[num_outer:])
        for layer, expert in itertools.product(layers, experts):
            found[name.format(layer, expert)] = Part(weight, layer, expert, ours, theirs, transposed)
    return found


def joined(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Returns the names of tensors that hold several of `parts`, each with the names of these parts in order."""
    return {
        f"model.layers.{layer}.{name}.weight": tuple(f"model.layers.{layer}.{each}.weight" for each in names)
        for name, names in JOINED.get(architecture.family, {}).items()
        for layer in range(architecture.num_layers)
    }


def stored(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Returns the names of all tensors of a folder, each with the names of the `parts` that it holds; most hold one."""
    several = joined(architecture)
    inside = {name for names in several.values() for name in names}
    return several | {name: (name,) for name in parts(architecture) if name not in inside}
