"""Decode weights with several adapters side by side, loaded as requests name them."""

import collections
from collections.abc import Callable, Collection

from reinforce_ada_jax.policy import lora
from reinforce_ada_jax.policy.lora import Lora
from reinforce_ada_jax.policy.transformer import Params
from reinforce_ada_jax.sampling.engine import Engine
from reinforce_ada_jax.serving.sampler import NO_ADAPTER, Weights


class AdapterBank(Weights):
    """Weights of a base, and at most `num_adapters` adapters; `size` is the rank and the targets of the largest."""

    load: Callable[[str], tuple[Lora, Params]]  # by name, what adapters are and their arrays; set before any is used

    def __init__(self, engine: Engine, base: Params, size: Lora, num_adapters: int):
        weights = engine.decode_weights(base)
        super().__init__(lora.bank(weights, engine.architecture, size, num_adapters, engine.dtype))
        self._places: collections.OrderedDict[str, int] = collections.OrderedDict()  # last used at the end
        self._free = list(range(num_adapters))[::-1]

    def use(self, adapter: str, in_use: Collection[str]) -> bool:
        if not adapter:
            return True
        if adapter in self._places:
            self._places.move_to_end(adapter)
            return True
        if not self._free:
            unused = next((each for each in self._places if each not in in_use), None)
            if unused is None:
                return False
            self._free.append(self._places.pop(unused))
        chosen, params = self.load(adapter)
        place = self._free[-1]  # still free where the adapter does not fit
        self.params = lora.put_into_bank(self.params, params, chosen, place)
        self._places[adapter] = self._free.pop()
        return True

    def place(self, adapter: str) -> int:
        return self._places.get(adapter, NO_ADAPTER)
