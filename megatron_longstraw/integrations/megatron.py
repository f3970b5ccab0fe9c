"""Puts the schedule in the place of Megatron's in hosts that run Megatron-Core.

    from megatron_longstraw.integrations.megatron import adopt, install

    install(ScheduleConfig(prompt_chunk_tokens=8192))   # before the host asks for its schedule
    model = adopt(model)                                # after the host has built its model

Hosts import `get_forward_backward_func` by name, so `install` replaces that name in each module that has it, and
`uninstall` puts it back; Megatron-Core itself stays as it is.
"""

import functools
import importlib
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from megatron_longstraw.config import ConfigError, ScheduleConfig
from megatron_longstraw.drop_in import check_options, get_forward_backward_func
from megatron_longstraw.hooks import TESTED_VERSIONS
from megatron_longstraw.models.adopt import adopt

__all__ = ["HOSTS", "adopt", "install", "uninstall"]

HOSTS = (
    "megatron.training.training",
    "megatron.rl.rl_utils",
    "verl.workers.engine.megatron.transformer_impl",
    "slime.backends.megatron_utils.model",
    "nemo_rl.models.megatron.train",
    "swift.megatron.trainers.base",
)
"""Modules known to import the name."""

_NAME = "get_forward_backward_func"
_OWN = ("megatron.core.", "megatron_longstraw.")
_replaced: dict[ModuleType, Any] = {}
"""Module -> what the name meant in it."""


def install(options: ScheduleConfig | None = None, modules: Iterable[str] | None = None) -> list[str]:
    """Makes hosts take this package's schedule, in this process. Again: with other options.

    Args:
        options: how the schedule runs.
        modules: the modules to change, which are imported where they aren't yet; by default those of `HOSTS` that are
            imported.

    Returns:
        The modules that were changed.

    Raises:
        ConfigError: Megatron-Core is of a version that isn't tested, or an option doesn't work here (names it), or
            there is no module to change, or one is Megatron-Core's or this package's, can't be imported, or does not
            have the name. Nothing is changed then.
    """
    check_version()
    options = options or ScheduleConfig()
    check_options(options)
    if isinstance(modules, str):
        raise ConfigError(f"modules={modules!r}: needs a list of names of modules")
    names = [name for name in HOSTS if name in sys.modules] if modules is None else list(modules)
    if not names and modules is not None:
        raise ConfigError("modules is empty: needs names of modules of the host, or None for those that are known")
    if not names:
        raise ConfigError(f"none of {', '.join(HOSTS)} is imported: import the host first, or name its modules")
    found = [_host_module(name) for name in names]
    ours = functools.partial(get_forward_backward_func, options=options)
    for module in found:
        _replaced.setdefault(module, getattr(module, _NAME))
        setattr(module, _NAME, ours)
    return names


def uninstall() -> list[str]:
    """Undoes `install`, in all modules. Returns their names."""
    modules = list(_replaced)
    for module in modules:
        setattr(module, _NAME, _replaced.pop(module))
    return [module.__name__ for module in modules]


def _host_module(name: Any) -> ModuleType:
    if not isinstance(name, str) or not name or name.startswith("."):
        raise ConfigError(f"modules has {name!r}: needs whole names of modules")
    if f"{name}.".startswith(_OWN):  # the schedule asks Megatron-Core for the schedule that it stands on
        raise ConfigError(f"{name} is what the schedule stands on: needs modules of the host, which call it")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"{name} can't be imported: {error}; needs modules of the host") from error
    if not hasattr(module, _NAME):
        raise ConfigError(f"{name} has no {_NAME} to replace: is it another version of the host?")
    return module


def check_version() -> None:
    """Raises ConfigError where megatron-core is of a version that isn't tested."""
    from megatron.core.package_info import __shortversion__

    if __shortversion__ not in TESTED_VERSIONS:
        raise ConfigError(
            f"megatron-core {__shortversion__} is not tested: needs {' or '.join(TESTED_VERSIONS)} "
            f"(pip install megatron-core=={TESTED_VERSIONS[0]})"
        )
