"""`install` replaces the package ``flash_attn``, and restores it."""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest

from cs336_systems.compat import flash_attn
from cs336_systems.compat.flash_attn import flash_attn_func, flash_attn_kvpacked_func, install


def remove_modules():
    names = [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture(autouse=True)
def _not_imported():
    before = remove_modules()
    yield
    remove_modules()
    sys.modules.update(before)


def test_nested_until_closed():
    undo = install()
    with install():
        import flash_attn as package
        import flash_attn.flash_attn_interface as interface
        from flash_attn import flash_attn_interface
        from flash_attn.flash_attn_interface import flash_attn_kvpacked_func as kvpacked

        assert package.__name__ == "flash_attn"
        assert package.flash_attn_func is interface.flash_attn_func is flash_attn_func
        assert flash_attn_interface is interface
        assert kvpacked is flash_attn_kvpacked_func
        assert package.__version__ == flash_attn.__version__ == "2.8.3"
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.util.find_spec("flash_attn.ops") is None
    assert sys.modules["flash_attn"].flash_attn_func is flash_attn_func
    undo.close()
    assert not remove_modules()


def test_every_module_is_reached_both_ways():
    with install():
        import flash_attn as package
        import flash_attn.layers.rotary
        from flash_attn import bert_padding, flash_attn_with_kvcache
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb

        assert package.layers.rotary.apply_rotary_emb is apply_rotary_emb
        assert package.flash_attn_interface.flash_attn_with_kvcache is flash_attn_with_kvcache
        assert (bert_padding.pad_input, bert_padding.unpad_input) == (pad_input, unpad_input)
        assert index_first_axis.__module__ == "cs336_systems.compat.flash_attn_padding"
    assert not remove_modules()


def test_an_imported_package_is_kept_unless_forced():
    real, submodule = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    real.__file__ = "folder/flash_attn/__init__.py"
    sys.modules.update({"flash_attn": real, "flash_attn.bert_padding": submodule})
    message = "flash_attn must not be imported before, unless force is True; got the package in folder/flash_attn/"
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}"):
        install()
    assert sys.modules["flash_attn"] is real
    with install(force=True):
        assert sys.modules["flash_attn"].flash_attn_func is flash_attn_func
        assert sys.modules["flash_attn.bert_padding"] is not submodule
    assert remove_modules() == {"flash_attn": real, "flash_attn.bert_padding": submodule}
