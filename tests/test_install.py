"""install() and uninstall(): which modules of hosts take the schedule, and what is refused."""

import sys
import types
from typing import Any

import pytest

from megatron_longstraw.config import ConfigError, ScheduleConfig
from tests.exactness import UNEVEN


def test_install_replaces_the_name_where_hosts_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_longstraw.integrations import megatron

    monkeypatch.setattr(megatron, "HOSTS", ("verl.workers.engine.megatron.transformer_impl", "no.such.host"))
    stock = object()
    for name in ("verl.workers.engine.megatron.transformer_impl", "my_host"):
        module: Any = types.ModuleType(name)
        module.get_forward_backward_func = stock
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "bare_host", types.ModuleType("bare_host"))
    verl, mine = sys.modules["verl.workers.engine.megatron.transformer_impl"], sys.modules["my_host"]
    assert megatron.install(UNEVEN) == [verl.__name__]
    assert mine.get_forward_backward_func is stock
    assert verl.get_forward_backward_func().keywords["options"] is UNEVEN
    assert megatron.install(modules=["my_host", verl.__name__]) == ["my_host", verl.__name__]
    assert verl.get_forward_backward_func(pp_size=2, vp_size=None).keywords["options"] is not UNEVEN
    assert megatron.uninstall() == [verl.__name__, "my_host"]
    assert mine.get_forward_backward_func is verl.get_forward_backward_func is stock
    assert megatron.uninstall() == []
    for name in ("megatron.core", "megatron.core.pipeline_parallel", "megatron_longstraw.schedule"):
        with pytest.raises(ConfigError, match=f"{name} is what the schedule stands on"):
            megatron.install(modules=["my_host", name])
    with pytest.raises(ConfigError, match=r"no_such_host can't be imported: No module named 'no_such_host'"):
        megatron.install(modules=["my_host", "no_such_host"])
    with pytest.raises(ConfigError, match="bare_host has no get_forward_backward_func"):
        megatron.install(modules=["my_host", "bare_host"])
    with pytest.raises(ConfigError, match=r"schedule.pack_tokens=64 is not supported: needs 0"):
        megatron.install(ScheduleConfig(pack_tokens=64), modules=["my_host"])
    for modules, message in (
        ("my_host", "modules='my_host': needs a list of names"),
        ([], "modules is empty: needs names"),
        (["my_host", ""], "modules has '': needs whole names"),
        (["my_host", ".host"], r"modules has '\.host': needs whole names"),
    ):
        with pytest.raises(ConfigError, match=message):
            megatron.install(modules=modules)
    assert mine.get_forward_backward_func is stock


def test_a_module_that_is_gone_is_put_right_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_longstraw.integrations import megatron

    stock, hosts = object(), [types.ModuleType(name) for name in ("first_host", "second_host")]
    for host in hosts:
        host.get_forward_backward_func = stock  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, host.__name__, host)
    assert megatron.install(modules=["first_host", "second_host"]) == ["first_host", "second_host"]
    monkeypatch.delitem(sys.modules, "first_host")
    assert megatron.uninstall() == ["first_host", "second_host"]
    assert all(host.get_forward_backward_func is stock for host in hosts)


def test_install_refuses_unknown_versions_and_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import package_info

    from megatron_longstraw.integrations import megatron

    monkeypatch.setattr(megatron, "HOSTS", ("no.such.host",))
    with pytest.raises(ConfigError, match=r"none of no\.such\.host is imported"):
        megatron.install()
    monkeypatch.setattr(package_info, "__shortversion__", "0.20.0")
    with pytest.raises(ConfigError, match=r"megatron-core 0\.20\.0 is not tested: needs 0\.19\.2"):
        megatron.install()
