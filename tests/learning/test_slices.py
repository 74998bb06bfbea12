"""Meshes over several slices: the numbers of one device, and one sum over the network between slices an update."""

import types

import jax
import numpy as np
import pytest

from reinforce_ada_jax.distributed.mesh import make_mesh
from reinforce_ada_jax.policy import transformer
from tests.compiled_collectives import by_loop
from tests.learning.test_context import assert_numbers_of_one_device, axes, batch, learner
from tests.policy import recording
from tests.policy.adapting import ALL, random_adapters


@pytest.mark.parametrize(
    ("family", "split", "rank"),
    [
        ("qwen2", axes(slices=2, data=2, fsdp=2), 0),  # the program of the test below
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen2", axes(slices=2, data=2, fsdp=2, tensor=2), 0),
                ("qwen2", axes(slices=2, data=4, tensor=2), ALL.rank),
                ("qwen3_moe", axes(slices=2, data=2, fsdp=2, tensor=2), 0),
                ("gemma3", axes(slices=2, data=2, context=2, fsdp=2), 0),
            )
        ),
    ],
)
def test_slices_give_the_numbers_of_one_device(family, split, rank):
    assert_numbers_of_one_device(family, split, rank, tolerance=2e-5)


def collectives(split, rank=0):
    """(kinds inside of the loop over micro-batches, kinds outside) of the program of an update."""
    of, (architecture, params, _) = learner("qwen2", split, rank), recording.golden("qwen2")
    base = jax.device_put(params, transformer.param_shardings(architecture, of.mesh)) if rank else None
    trained = random_adapters(architecture) if rank else params
    state = of.init(jax.device_put(jax.tree.map(np.array, trained), of.param_shardings))
    found = by_loop(of.update.programs(state, of.put(batch(5)), base)["update"]().compile().as_text() or "")
    inside = {nesting: sorted(kinds) for nesting, kinds in found.items() if nesting}
    return sorted(inside.values()), found.get((), [])


@pytest.mark.slow  # it is about bytes; the test above has the numbers
def test_micro_batches_send_nothing_between_slices():
    of_slices, after_slices = collectives(axes(slices=2, data=2, fsdp=2))
    of_one, after_one = collectives(axes(fsdp=2))
    assert of_slices == of_one  # the same collectives as a slice alone
    assert len(after_slices) > len(after_one)


@pytest.mark.slow  # it is about what the test above counts
def test_copies_on_one_slice_sum_in_each_micro_batch():
    of_slices, of_copies = (
        collectives(axes(**split))[0] for split in (dict(slices=2, data=2, fsdp=2), dict(data=2, fsdp=2))
    )
    assert sum(map(len, of_copies)) > sum(map(len, of_slices))


def test_devices_that_are_slices_need_as_many_copies():
    devices = [
        types.SimpleNamespace(platform="tpu", process_index=slice_, id=slice_ * 4 + number, slice_index=slice_)
        for slice_ in (1, 0)
        for number in range(4)
    ]
    with pytest.raises(ValueError, match=r"mesh\.data is 1, and the devices are 2 slices: .* a multiple of 2\."):
        make_mesh(fsdp=8, devices=devices)


class Planned:
    """Device of a topology of one slice, as libtpu describes it ahead of time: without the number of a slice."""

    platform, process_index = "tpu", 0

    def __init__(self, number):
        self.id = number


def test_planned_devices_of_one_slice_need_no_number_of_it():
    assert "slice" not in make_mesh(fsdp=4, devices=[Planned(number) for number in range(4)]).shape


def test_slices_are_equal_parts_of_the_devices_in_order():
    mesh = make_mesh(data=4, tensor=2, slices=2)
    assert dict(mesh.shape) == {"slice": 2, "data": 2, "fsdp": 1, "context": 1, "tensor": 2}
    numbers = np.vectorize(lambda device: device.id)(mesh.devices)
    assert [sorted(part.ravel().tolist()) for part in numbers] == [[0, 1, 2, 3], [4, 5, 6, 7]]
