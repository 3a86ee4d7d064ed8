import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmoe import trees
from fedmoe.training.flat import Layout

SHAPES = st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4)


@given(shapes=SHAPES, clients=st.integers(1, 3))
def test_packing_and_unpacking_gives_the_same_tensors(shapes, clients):
    params = {f"p{i}": {"weight": torch.randn(clients, *shape)} for i, shape in enumerate(shapes)}
    layout = Layout.of(params)
    flat = layout.pack(params)
    assert flat.shape == (clients, sum(layout.sizes))
    for back, original in ((layout.unpack(flat), params), (layout.unpack(flat[0]), trees.pick(params, 0))):
        for name, tensor in trees.to_named(original).items():
            assert torch.equal(trees.to_named(back)[name], tensor)


def test_packing_copies_and_unpacking_does_not():
    params = {"w": torch.zeros(2, 3)}
    layout = Layout.of(params)
    flat = layout.pack(params)
    flat += 1
    assert not params["w"].any()
    assert layout.unpack(flat)["w"].data_ptr() == flat.data_ptr()


def test_one_tensor_is_copied_too():
    """A cohort that shares one broadcast is a view of it: training must not write through."""
    shared = {"w": torch.zeros(3)}
    flat = Layout.of(stacked := trees.stack([shared, shared])).pack(stacked)
    flat += 1
    assert not shared["w"].any() and flat.sum() == 6
