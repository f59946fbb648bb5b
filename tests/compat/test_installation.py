"""`install` in a process of its own: what finds `flash_attn`, and what is left after `uninstall`."""

import subprocess
import sys
from pathlib import Path

CODE = """
import importlib.metadata, importlib.util, sys
import flashtile.compat
from flashtile.errors import AttentionError

def state():
    return (list(sys.meta_path), {name for name in sys.modules if name.startswith("flash_attn")},
            importlib.util.find_spec("flash_attn"), importlib.metadata.packages_distributions())

before = state()
assert before[2] is None and "flash_attn" not in before[3]
assert not any(name.startswith("flashtile.compat.flash_attn") for name in sys.modules)
with flashtile.compat.install():
    flashtile.compat.install()  # a second time
    assert sys.meta_path.count(flashtile.compat.installation.FINDER) == 1
    spec = importlib.util.find_spec("flash_attn")
    assert spec.name == "flash_attn" and spec.submodule_search_locations is not None
    assert "flash_attn" not in sys.modules
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    for name in ("flash_attn", "flash-attn"):
        assert importlib.metadata.version(name) == "2.8.3"
        assert importlib.metadata.distribution(name).metadata["Name"] == "flash-attn"
    assert list(importlib.metadata.distributions(name="flash-attn", path=[])) == []
    assert importlib.metadata.version("torch")

    import flash_attn
    from flash_attn import flash_attn_func
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
    from flash_attn.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
    from flash_attn.flash_attn_interface import _flash_attn_forward, _wrapped_flash_attn_varlen_backward
    from flash_attn.layers.rotary import apply_rotary_emb
    import flashtile.compat.flash_attn as source
    assert flash_attn.__version__ == "2.8.3" and flash_attn.__spec__.name == flash_attn.__name__ == "flash_attn"
    assert flash_attn_func is source.flash_attn_func
    assert importlib.util.find_spec("flash_attn.bert_padding").parent == "flash_attn"
    try:
        from flash_attn.layers.rotary import ApplyRotaryEmb
    except ImportError as error:  # it says whose module it is
        assert "flashtile" in str(error), error
    assert importlib.util.find_spec("flash_attn.cute") is importlib.util.find_spec("flash_attn_2_cuda") is None
    assert source.__spec__.name == "flashtile.compat.flash_attn"
    assert importlib.util.find_spec("flash_attn_interface") is None
    with flashtile.compat.install(flash_attn_3=True):
        import flash_attn_interface
        from flashtile.compat import flash_attn_3
        for name in flash_attn_3.__all__:
            assert getattr(flash_attn_interface, name) is getattr(flash_attn_3, name)
        assert importlib.util.find_spec("flash_attn_interface").submodule_search_locations is None
        assert importlib.metadata.packages_distributions()["flash_attn_interface"] == ["flash-attn-3"]
        assert importlib.metadata.version("flash-attn-3") == "3.0.0"
    assert "flash_attn" not in importlib.metadata.packages_distributions()
    with flashtile.compat.install(flash_attn_4=True):
        from flash_attn.cute import flash_attn_func
        from flash_attn.cute.interface import flash_attn_varlen_func
        from flashtile.compat import flash_attn_4
        assert flash_attn_func is flash_attn_4.flash_attn_func
        assert set(importlib.metadata.packages_distributions()["flash_attn"]) == {"flash-attn", "flash-attn-4"}
        assert "flash-attn-3" not in {x.metadata["Name"] for x in importlib.metadata.distributions()}
assert "flash_attn_interface" not in sys.modules and importlib.util.find_spec("flash_attn_interface") is None
after = state()
assert after == before, after
with flashtile.compat.install():
    assert importlib.util.find_spec("flash_attn_interface") is None
try:
    import flash_attn
except ModuleNotFoundError:
    print("gone")
flashtile.compat.uninstall()  # changes nothing

sys.path.insert(0, sys.argv[2])  # where there is another flash_attn_interface
with flashtile.compat.install():
    import flash_attn_interface
    try:
        flashtile.compat.install(flash_attn_3=True)
    except AttentionError as error:
        print(error)
assert sys.modules["flash_attn_interface"].__file__.startswith(sys.path.pop(0))

sys.path.insert(0, sys.argv[1])  # where there is another
try:
    flashtile.compat.install()
except AttentionError as error:
    print(error)
import flash_attn
assert flash_attn.__version__ == "another"
sys.path.pop(0)
try:
    flashtile.compat.install()
except AttentionError as error:
    print(error)
"""


def test_install_and_uninstall(tmp_path: Path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text('__version__ = "another"\n')
    three = tmp_path / "three"
    three.mkdir()
    (three / "flash_attn_interface.py").touch()
    result = subprocess.run([sys.executable, "-c", CODE, str(tmp_path), str(three)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("gone\n")
    assert result.stdout.count("flash_attn exists already") == 2
    assert result.stdout.count("flash_attn_interface exists already") == 1
    assert str(tmp_path / "flash_attn" / "__init__.py") in result.stdout
