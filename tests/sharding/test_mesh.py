"""The mesh: one outer axis, then twos; every device once; clear refusals."""

import jax
import pytest

from sharding.mesh import REPLICA, MeshError, Target, compiling_for, exact_products, group_axes, make_mesh


@pytest.mark.parametrize(
    ("count", "shape"),
    [(1, (1,)), (2, (1, 2)), (3, (3,)), (4, (1, 2, 2)), (5, (5,)), (6, (3, 2)), (7, (7,)), (8, (1, 2, 2, 2))],
)
def test_trailing_axes_of_size_two(count, shape):
    mesh = make_mesh(count)
    assert mesh.devices.shape == shape
    assert mesh.axis_names[0] == REPLICA
    assert mesh.axis_names[1:] == tuple(f"s{i}" for i in reversed(range(len(shape) - 1)))
    assert list(mesh.devices.flat) == jax.devices()[:count]


def test_all_devices_by_default_and_given_ones():
    assert make_mesh().size == len(jax.devices()) == 8
    given = jax.devices()[5:7]
    assert list(make_mesh(devices=given).devices.flat) == given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_devices": 9}, r"9 devices asked for, but there are 8 \(cpu\)"),
        ({"num_devices": -1}, "must not be negative, got -1"),
        ({"devices": []}, "at least one device"),
    ],
)
def test_refuses(arguments, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(**arguments)


def test_nested_groups_are_trailing_axes():
    axes = make_mesh(8).axis_names[1:]
    assert [group_axes(axes, degree) for degree in (1, 2, 4, 8)] == [(), ("s0",), ("s1", "s0"), ("s2", "s1", "s0")]
    for degree in (0, 3, 16):
        with pytest.raises(MeshError, match=f"no group of {degree} devices"):
            group_axes(axes, degree)


def test_gpus_multiply_float32_in_float32_unless_the_user_chose(monkeypatch):
    def precision(dtype, platform="gpu", before=None):
        with monkeypatch.context() as patch, compiling_for(Target(platform, 90)):
            patch.setattr(jax.config, "update", lambda name, value: chosen.append((name, value)))
            chosen: list = []
            with jax.default_matmul_precision(before):
                exact_products(dtype)
        return chosen

    assert precision("float32") == [("jax_default_matmul_precision", "highest")]
    assert (
        not precision("bfloat16")
        and not precision("float32", "cpu")
        and not precision("float32", before="tensorfloat32")
    )
