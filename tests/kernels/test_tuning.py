"""The table of tiles: complete, valid, chosen by device, and replaced by pins for as long as they last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import triton

from cs336_systems.kernels import tuning, versions
from cs336_systems.kernels.tuning import TileConfig

PASSES = get_args(tuning.Pass)
ARITHMETICS = get_args(tuning.Arithmetic)
HEAD_DIMS = (16, 32, 64, 128, 256)
CPU = torch.device("cpu")

ROWS = [
    (architecture, row, config)
    for tables in (tuning.TABLES, tuning.SMALL_GRIDS)
    for architecture, table in tables.items()
    for row, config in table.items()
]


def as_if_on(monkeypatch, capability, shared_kib=227):
    """A device of this compute capability, which need not be there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_kib * 1024, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    # What devices are is remembered, and no other index than a real one may be.
    for name in ("architecture_of", "processors_of"):
        monkeypatch.setattr(tuning, name, getattr(tuning, name).__wrapped__)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("capability", "shared_kib", "architecture"),
    [
        ((8, 0), 163, "sm_80"),
        ((8, 6), 99, "sm_86"),
        ((8, 9), 99, "sm_86"),
        ((9, 0), 227, "sm_90"),
        ((10, 0), 227, "sm_100"),
        ((10, 3), 227, "sm_100"),
        ((12, 0), 99, "sm_86"),
    ],
)
def test_every_pass_has_a_row_for_every_device(monkeypatch, capability, shared_kib, architecture):
    device = as_if_on(monkeypatch, capability, shared_kib)
    assert tuning.architecture_of(device) == architecture
    for name in PASSES:
        for arithmetic in ARITHMETICS:
            for head_dim in HEAD_DIMS:
                assert isinstance(tuning.lookup(name, arithmetic, head_dim, device), TileConfig)


def test_the_interpreter_has_a_table_too():
    assert tuning.architecture_of(CPU) in tuning.TABLES


SMALL_GRIDS = [(architecture, row) for architecture, table in tuning.SMALL_GRIDS.items() for row in table]
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}


@pytest.mark.parametrize(("architecture", "row"), SMALL_GRIDS)
def test_a_grid_too_small_for_the_device_gets_smaller_tiles(monkeypatch, architecture, row):
    device = as_if_on(monkeypatch, CAPABILITIES[architecture])
    name, arithmetic, head_dim = row
    usual, smaller = (tables[architecture][row] for tables in (tuning.TABLES, tuning.SMALL_GRIDS))
    tile = usual.tile_k if name == "dkdv" else usual.tile_q
    assert tuning.lookup(name, arithmetic, head_dim, device) == usual
    # The device has 132 processors.
    assert tuning.lookup(name, arithmetic, head_dim, device, length=11 * tile + 1, matrices=6) == usual
    assert tuning.lookup(name, arithmetic, head_dim, device, length=10 * tile + 1, matrices=6) == smaller
    assert smaller.programs(name, 10 * tile, 11) > usual.programs(name, 10 * tile, 11)


def test_a_row_without_smaller_tiles_serves_every_grid(monkeypatch):
    device = as_if_on(monkeypatch, (8, 0))
    assert tuning.lookup("dq", "half", 64, device, length=1, matrices=1) == tuning.TABLES["sm_80"]["dq", "half", 64]


def test_programs_divide_what_their_pass_writes():
    config = TileConfig(64, 32, 4, 1)
    assert [config.programs(name, 65, 3) for name in PASSES] == [6, 6, 9]


@pytest.mark.parametrize(("architecture", "row", "config"), ROWS)
def test_rows_are_what_kernels_can_be_compiled_for(architecture, row, config):
    name, arithmetic, head_dim = row
    assert name in PASSES
    assert arithmetic in ARITHMETICS
    assert head_dim in HEAD_DIMS
    for size in (config.tile_q, config.tile_k):
        assert size in (16, 32, 64, 128, 256)
    assert config.num_warps in (1, 2, 4, 8)
    assert 1 <= config.num_stages <= 5
    assert {"num_warps": config.num_warps, "num_stages": config.num_stages}.items() <= config.options.items()


def test_a_pin_replaces_one_pass_and_lasts_as_long_as_its_block():
    before = {name: tuning.lookup(name, "half", 64, CPU) for name in PASSES}
    outer, inner = TileConfig(16, 32, 1, 1), TileConfig(32, 16, 2, 1)
    with tuning.pin(dq=outer):
        assert tuning.lookup("dq", "half", 64, CPU) == tuning.lookup("dq", "float32", 256, CPU) == outer
        assert tuning.lookup("forward", "half", 64, CPU) == before["forward"]
        with tuning.pin(dq=inner, forward=outer):
            assert tuning.lookup("dq", "half", 64, CPU) == inner
            assert tuning.lookup("forward", "half", 64, CPU) == outer
        assert tuning.lookup("dq", "half", 64, CPU) == outer
        assert tuning.lookup("forward", "half", 64, CPU) == before["forward"]
    assert {name: tuning.lookup(name, "half", 64, CPU) for name in PASSES} == before


def test_a_pin_ends_with_an_error_too():
    before = tuning.lookup("dq", "half", 64, CPU)

    def fail_under_a_pin():
        with tuning.pin(dq=TileConfig(16, 16, 1, 1)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_under_a_pin()
    assert tuning.lookup("dq", "half", 64, CPU) == before


def test_the_version_changes_with_every_pin():
    versions = [tuning.version()]
    with tuning.pin(dq=TileConfig(16, 16, 1, 1)):
        versions.append(tuning.version())
        with tuning.pin(dq=TileConfig(16, 32, 1, 1)):
            versions.append(tuning.version())
        versions.append(tuning.version())
    versions.append(tuning.version())
    assert len(set(versions)) == len(versions)


@pytest.mark.every_triton
def test_the_installed_triton_has_its_tiles():
    assert tuning.BY_TRITON.keys() <= {*versions.KNOWN}
    own = tuning.BY_TRITON.get(triton.__version__[:4], {})
    assert tuning.TABLES["sm_90"] == tuning.TABLES["sm_90"] | own
