"""The table of tiles: complete, valid, chosen by device, and replaced by pins for as long as they last."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import triton

from cs336_systems.kernels import launching, versions
from cs336_systems.kernels.triton import tiles
from cs336_systems.kernels.triton.tiles import TileConfig

PASSES = get_args(tiles.Pass)
PRECISIONS = get_args(tiles.Precision)
HEAD_DIMS = (16, 32, 64, 128, 256)
CPU = torch.device("cpu")
CAPABILITIES = {"sm_80": (8, 0), "sm_90": (9, 0), "sm_100": (10, 0)}
TABLES = {"usual": tiles.TABLES, "small_grids": tiles.SMALL_GRIDS, "with_mods": tiles.WITH_MODS}


def as_if_on(monkeypatch, capability, shared_kib=227):
    """A device of this compute capability, with 132 multiprocessors."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    properties = SimpleNamespace(shared_memory_per_block_optin=shared_kib * 1024, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(tiles, "architecture_of", tiles.architecture_of.__wrapped__)  # without their caches
    monkeypatch.setattr(launching, "num_sms", launching.num_sms.__wrapped__)
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
    assert tiles.architecture_of(device) == architecture
    for name in PASSES:
        for precision in PRECISIONS:
            for head_dim in (*HEAD_DIMS, 512, 1024):
                for with_mods in (False, True):
                    found = tiles.lookup(name, precision, head_dim, device, with_mods=with_mods)
                    assert isinstance(found, TileConfig)
            assert tiles.lookup_decode(precision, 128, device).tile_k >= 16


@pytest.mark.parametrize(
    ("architecture", "row"), [(name, row) for name, table in tiles.SMALL_GRIDS.items() for row in table]
)
def test_a_grid_too_small_for_the_device_gets_smaller_tiles(monkeypatch, architecture, row):
    device, (name, *others) = as_if_on(monkeypatch, CAPABILITIES[architecture]), row
    usual, smaller = (tables[architecture][row] for tables in (tiles.TABLES, tiles.SMALL_GRIDS))
    tile = usual.tile_k if name == "dkdv" else usual.tile_q
    assert tiles.lookup(name, *others, device) == usual
    assert tiles.lookup(name, *others, device, length=11 * tile + 1, batch_heads=6) == usual
    assert tiles.lookup(name, *others, device, length=10 * tile + 1, batch_heads=6) == smaller
    assert smaller.programs(name, 10 * tile, 11) > usual.programs(name, 10 * tile, 11)


def test_a_row_without_smaller_tiles_serves_every_grid(monkeypatch):
    device = as_if_on(monkeypatch, (8, 0))
    assert tiles.lookup("dq", "half", 64, device, length=1, batch_heads=1) == tiles.TABLES["sm_80"]["dq", "half", 64]


def test_programs_divide_what_their_pass_writes():
    config = TileConfig(64, 32, 4, 1)
    assert [config.programs(name, 65, 3) for name in PASSES] == [6, 6, 9]
    assert config.programs("dq", 65, 1, num_seqs=4) == 1 + 4 + 1


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_what_kernels_can_be_compiled_for(table):
    for rows in TABLES[table].values():
        for (name, precision, head_dim), config in rows.items():
            assert (name in PASSES, precision in ("half", "float32"), head_dim in HEAD_DIMS) == (True,) * 3
            assert {config.tile_q, config.tile_k} <= {16, 32, 64, 128, 256}
            assert config.num_warps in (1, 2, 4, 8)
            assert 1 <= config.num_stages <= 5
            assert config.options == {"num_warps": config.num_warps, "num_stages": config.num_stages}


def looked_up():
    return {name: tiles.lookup(name, "half", 64, CPU) for name in PASSES}


def test_pins_replace_passes_and_last_as_long_as_their_block():
    before, outer, inner = looked_up(), TileConfig(16, 32, 1, 1), TileConfig(32, 16, 2, 1)
    with tiles.pin(dq=outer, decode=outer):
        assert tiles.lookup("dq", "float32", 256, CPU) == tiles.lookup_decode("half", 64, CPU) == outer
        assert looked_up() == before | {"dq": outer}
        with suppress(ZeroDivisionError), tiles.pin(dq=inner, forward=outer):
            assert looked_up() == before | {"dq": inner, "forward": outer}
            raise ZeroDivisionError
        assert looked_up() == before | {"dq": outer}
    assert looked_up() == before


def test_plans_are_forgotten_when_a_pin_begins_and_ends(monkeypatch):
    cache = {}
    monkeypatch.setattr(tiles, "plan_caches", [cache])
    cache["before"] = 1
    with tiles.pin(dq=TileConfig(16, 16, 1, 1)):
        assert not cache
        cache["inside"] = 1
    assert not cache


@pytest.mark.every_triton
def test_the_installed_triton_has_its_tiles():
    assert tiles.BY_TRITON.keys() <= {*versions.KNOWN}
    own = tiles.BY_TRITON.get(triton.__version__[:4], {})
    assert tiles.TABLES["sm_90"] == tiles.TABLES["sm_90"] | own
