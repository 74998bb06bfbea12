"""The engine: compiled programs over one decode state.

Rollouts decode in windows (`decode_window`). A caller that owns the slots returns to the host after every token
(`prefill`, `insert`, `decode_token`).

The engine holds no weights. Every call gets the learner's arrays, or the copy that `decode_weights` makes of them.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, UInt32

from reinforce_ada_jax.distributed.mesh import devices_of_processes, local_rows, num_learning
from reinforce_ada_jax.policy import lora, rounded
from reinforce_ada_jax.policy.architecture import Architecture
from reinforce_ada_jax.policy.transformer import Declared, Params, nest, weight_shapes
from reinforce_ada_jax.sampling.admission import Lengths
from reinforce_ada_jax.sampling.hand_over import HandOver
from reinforce_ada_jax.sampling.pages import num_pages
from reinforce_ada_jax.sampling.programs import (
    as_decoded,
    by_replica,
    learner_shardings,
    make_programs,
    num_replicas,
    weight_shardings,
)
from reinforce_ada_jax.sampling.rings import layout
from reinforce_ada_jax.sampling.state import (
    DecodeState,
    EngineOptions,
    Occupancy,
    Prefix,
    PromptTerms,
    SamplingParams,
    WindowInputs,
    WindowOutputs,
    kv_token_bytes,
    occupancy,
)
from reinforce_ada_jax.sampling.window_inputs import window_inputs


def enough_pages(options: EngineOptions) -> int:
    """Returns the number of pages with which no request waits: every slot and every open prompt at its longest.

    Where a prompt ends with tokens of a response, it holds pages that the response's slot would hold otherwise.
    """
    prompt_width = num_pages(options.max_prompt_tokens, options.page_size)
    return options.slots * options.table_width + options.open_prompts * prompt_width + 1


def enough_open_prompts(slots: int, samples_per_round: int) -> int:
    """Returns the open prompts with which slots stay busy while verdicts are on their way.

    A prompt fills at most as many slots as its round has draws, and none while its verdicts are pending. For rounds of
    4 and more, a quarter more prompts than slots is enough. With single draws a prompt waits after every response, 15
    to 20 % of its time. There half more prompts than slots makes 0.01 to 0.02 more of the slot-steps useful
    (docs/performance.md).
    """
    return slots + slots // (4 if samples_per_round >= 4 else 2)


def buckets(longest: int) -> list[int]:
    """Returns the lengths to which prompts are padded: powers of two, from 16 to the first that holds `longest`."""
    lengths = [16]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return lengths


def _are_alike(params: Params, expected: Params) -> bool:
    if jax.tree.structure(params) != jax.tree.structure(expected):  # adapters, or matrices to be quantised
        return False
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True)
    return all(w.dtype == x.dtype and w.sharding.is_equivalent_to(x.sharding, w.ndim) for w, x in pairs)


# `EngineOptions.tail` of models from this size on.
TAIL, SMALL_MODEL = (2, 4, 16), 500_000


def choose_tail(architecture: Architecture) -> tuple[int, ...]:
    """Returns `EngineOptions.tail`; each number costs 2 to 3 s of compilation, which small models do not gain back."""
    return TAIL if architecture.num_parameters >= SMALL_MODEL else EngineOptions.tail


def choose_apart(attention: str, dtype: str) -> bool:
    """Returns `EngineOptions.apart` of a training: True on GPUs, unless decoding reads the learner's own arrays."""
    return attention == "pallas_gpu" and dtype != "float32"


class Engine:
    """Paged decoding for one architecture on one mesh. State goes in and comes out; only programs are kept.

    Along all axes but `tensor` the mesh holds replicas, which decode side by side; `options` are those of one of them.
    Each of several processes passes the inputs of its own `replicas` and gets their outputs. All processes call the
    same methods in the same order: a window is one program of the whole mesh.
    """

    def __init__(
        self, architecture: Architecture, options: EngineOptions, *, mesh: Mesh, learner_mesh: Mesh | None = None
    ):
        """Makes an engine on `mesh`, devices of all processes of the run; `options` are those of each replica.

        The learner may have other devices, on `learner_mesh`: `decode_weights` copies weights from there. If these are
        in other processes, each side calls its part of `hand_over` instead.
        """
        if options.weight_dtype == "int8" and architecture.num_experts:
            raise ValueError(
                f"sampling.weight_dtype is 'int8', and the experts of {architecture.family} can't be decoded in it: "
                "set it to 'model'. sampling.kv_dtype may be 'int8'."
            )
        rounds = rounded.applies(options.dtype, mesh.devices.flat[0].platform)
        is_plain = options.weight_dtype == "model" and options.adapters is None
        options = dataclasses.replace(options, rounds=rounds, apart=options.apart and is_plain)
        self.mesh, self.spans_processes = mesh, mesh.is_multi_process
        self._is_split = learner_mesh is not None and learner_mesh != mesh
        self.architecture, self.options, self.dtype = architecture, options, jnp.dtype(options.dtype)
        self.replicas = len(devices_of_processes(list(mesh.devices.flat))[0]) // mesh.shape["tensor"]
        self.hand_over: HandOver | None = None
        cast_shardings = weight_shardings(architecture, options, mesh)
        if learner_mesh is not None and self._is_split:
            cast_shardings = learner_shardings(architecture, options, learner_mesh)
            if num_learning(learner_mesh, mesh):
                self.hand_over = HandOver(architecture, options, learner_mesh, mesh)
        self._cast_shardings = cast_shardings
        self._programs = make_programs(architecture, options, mesh, cast_shardings)

    def _stack(self, of_replicas: Sequence[Any]) -> Any:
        """Returns a program's argument, made of one argument for each of this process's replicas."""
        if num_replicas(self.mesh) == 1:
            return of_replicas[0]
        stacked = jax.tree.map(lambda *x: np.stack(x), *of_replicas)
        return (
            jax.make_array_from_process_local_data(by_replica(self.mesh), stacked) if self.spans_processes else stacked
        )

    def _unstack(self, tree: Any) -> list[Any]:
        """Returns, for each of this process's replicas, its part of a program's result, on the host."""
        tree = jax.tree.map(local_rows, tree) if self.spans_processes else jax.device_get(tree)
        if num_replicas(self.mesh) == 1:
            return [tree]
        return [jax.tree.map(operator.itemgetter(replica), tree) for replica in range(self.replicas)]

    # ---- weights -------------------------------------------------------------------------------------------------

    def decodes_from(self, params: Params) -> bool:
        """Returns True if decoding reads `params`, or arrays of such shapes, as they are; else it reads a copy."""
        return _are_alike(params, self.abstract_weights())

    def _decodes_from_base(self, params: Params) -> bool:
        """Returns True if decoding reads the weights under adapters as they are, and copies the adapters alone."""
        if self.options.adapters is None:
            return False
        return _are_alike(lora.split(params)[0], lora.split(self.abstract_weights())[0])

    def decode_weights(self, params: Params) -> Params:
        """Returns `params` where they are laid out for decoding; else a copy, made by one jitted cast and reshard.

        All processes take part in that program, which also rounds to int8 and merges adapters into their weights where
        the options say so. Where the weights under adapters are laid out for decoding, only the adapters are copied.
        Where the learner has other devices of this process, the copy has the learner's layout, and then goes to those
        of the engine.
        """
        if self.decodes_from(params):
            return params
        if self._decodes_from_base(params):
            assert self.options.adapters is not None
            base, adapters = lora.split(params)
            return lora.adapted(base, self._programs.cast_adapters(adapters), self.options.adapters)
        params = self.cast_weights(params)
        if self._is_split:
            return jax.device_put(params, weight_shardings(self.architecture, self.options, self.mesh))
        return params

    def cast_weights(self, params: Params) -> Params:
        """Returns the decode weights of an engine with devices of its own, while they are on the learner's devices."""
        return self._programs.cast_weights(params)

    def abstract_copy(self, params: Params) -> Params | None:
        """Returns shapes, dtypes and shardings of what `decode_weights` makes of such weights; None for nothing."""
        if self.decodes_from(params):
            return None
        weights = self.abstract_weights()
        return lora.split(weights)[1] if self._decodes_from_base(params) else weights

    def abstract_weights(self, *, cast: bool = False) -> Params:
        """Returns shapes, dtypes and shardings of the decode weights; with `cast`, of those of `cast_weights`."""
        shardings = weight_shardings(self.architecture, self.options, self.mesh)
        adapters = self.options.adapters

        def of_learner(declared: Mapping[str, Declared]) -> Params:
            return nest({name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, (shape, _) in declared.items()})

        params = of_learner(weight_shapes(self.architecture))
        if adapters is not None:
            params = lora.adapted(params, of_learner(lora.adapter_shapes(self.architecture, adapters)), adapters)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            jax.eval_shape(functools.partial(as_decoded, options=self.options), params),
            self._cast_shardings if cast else shardings,
        )

    # ---- before the first call -----------------------------------------------------------------------------------

    def programs(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Returns the programs of rollouts, lowered on demand for the mesh's devices, which need not exist.

        The arguments are as rollouts pass them, so that a call finds the program compiled.
        """
        o, params, state = self.options, self.abstract_weights(), self._programs.init_state.eval_shape()
        nothing = window_inputs(o, [], np.zeros(o.open_prompts, bool), [], 0, Lengths(o.table_width).survivors())
        if not self.spans_processes:
            arguments: Any = (self._stack([nothing] * self.replicas),)
        else:
            layout, rows = by_replica(self.mesh), num_replicas(self.mesh)
            arguments = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype, sharding=layout), (nothing, np.int32(0))
            )
        return {"decode window": lambda: self._programs.decode_window.lower(params, state, *arguments)}

    def token_programs(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Returns the programs of decoding token by token, as `programs` does, except `insert`, which is small."""
        params, state = self.abstract_weights(), self._programs.init_state.eval_shape()

        def prefill(tokens: int) -> Callable[[], jax.stages.Lowered]:
            prompt = np.zeros((1, tokens), np.int32), np.ones(1, np.int32)
            return lambda: self._programs.prefill.lower(params, *prompt)

        programs = {"decode step": lambda: self._programs.decode_token.lower(params, state)}
        return programs | {f"prefill {tokens}": prefill(tokens) for tokens in buckets(self.options.max_prompt_tokens)}

    def lower_cast(self, params: Params) -> jax.stages.Lowered:
        """Returns the program with which `decode_weights` copies such weights, or their adapters, lowered."""
        if self._decodes_from_base(params):
            return self._programs.cast_adapters.lower(lora.split(params)[1])
        return self._programs.cast_weights.lower(params)

    @property
    def cache_bytes(self) -> int:
        """Bytes of a replica's pages: keys and values of all layers."""
        o, architecture = self.options, self.architecture
        of_all_layers = o.page_size * kv_token_bytes(architecture, o.activations, o.attention, o.kv_dtype)
        return layout(architecture, o).total * of_all_layers // architecture.num_layers

    # ---- rollouts ------------------------------------------------------------------------------------------------

    def init_decode_state(self) -> DecodeState:
        """Returns an empty state: no prompt open, no slot active, every page free."""
        return self._programs.init_state()

    def set_terms(self, state: DecodeState, terms: Sequence[PromptTerms]) -> DecodeState:
        """Sets the terms of each replica's prompts; those of open prompts must stay as they are."""
        return state.replace(terms=jax.device_put(self._stack(terms), by_replica(self.mesh)))

    def decode_window(
        self, params: Params, state: DecodeState, inputs: Sequence[WindowInputs], vote: int = 0
    ) -> tuple[DecodeState, WindowOutputs]:
        """Prefills and decodes, in one dispatch, up to `window` tokens in all slots (`decode.decode_window`).

        `inputs` has one entry for each of this process's replicas; `fetch_outputs` separates their outputs again. Each
        of several processes must launch the window, even without work; `WindowOutputs.agreed` has the largest `vote`.
        """
        votes = [self._stack([np.int32(vote)] * self.replicas)] if self.spans_processes else []
        return self._programs.decode_window(params, state, self._stack(inputs), *votes)

    def fetch_outputs(self, outputs: WindowOutputs) -> list[WindowOutputs]:
        """Waits for a window; returns each replica's outputs, on the host."""
        return self._unstack(outputs)

    def fetch(self, state: DecodeState) -> list[Occupancy]:
        """Waits for a state; returns each replica's pool, prompts, queue and slots, on the host."""
        return self._unstack(occupancy(state))

    # ---- token by token, one replica -----------------------------------------------------------------------------

    def prefill(self, params: Params, tokens: Int[np.ndarray, " T"], length: int) -> Prefix:
        """Returns keys and values of one prompt: the first `length` of `tokens`, which are padded to a bucket."""
        self.options.check_prompt(length)
        return self._programs.prefill(params, tokens[None], np.array([length], np.int32))

    def insert(
        self, state: DecodeState, prefix: Prefix, slot: int, address: UInt32[np.ndarray, " 4"], sampling: SamplingParams
    ) -> DecodeState:
        """Starts a response to a prefilled prompt in `slot`, and releases what the slot held before.

        Raises ValueError if there are several replicas, or the pool is too small for all slots at their longest.
        """
        o = self.options
        if self.replicas > 1:
            raise ValueError(
                f"slots can be filled one by one in one replica, and there are {self.replicas}: use a mesh with "
                "data = fsdp = context = 1."
            )
        if o.pages <= o.slots * o.table_width:
            raise ValueError(
                f"{o.slots} slots of {o.table_width} pages do not fit into a pool of {o.pages} (one is reserved), and "
                "a caller may fill them all: set sampling.pages = 0 to have them counted, or fewer slots."
            )
        return self._programs.insert(state, prefix, jnp.int32(slot), address, sampling.as_arrays)

    def decode_token(self, params: Params, state: DecodeState) -> tuple[DecodeState, Int[Array, "S 3"]]:
        """Decodes one token in every active slot.

        Returns:
          The state, and of each slot: the token, 1 if the slot was active, response tokens so far.
        """
        return self._programs.decode_token(params, state)
