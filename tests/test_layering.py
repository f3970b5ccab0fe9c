"""Each module imports only what stands above it in this list, so that the list reads as the architecture."""

import ast
from pathlib import Path

import pytest

import megatron_longstraw

PACKAGE = Path(megatron_longstraw.__file__).parent

# Modules of one line don't know each other.
LAYERS = [
    ["megatron_settings", "pipeline_split", "hooks", "unique_yaml", "child"],
    ["config"],
    ["cpu_platform", "float64"],
    ["distributed"],
    ["rollouts", "recurrent_state", "kept_choices", "logprobs"],
    ["prompt_state", "partial_attention"],
    ["objectives", "attention", "row_gradients", "latent_rows", "token_shares"],
    ["position_choice", "sparse_attention"],
    ["work", "index_choices"],
    ["measure", "models", "samples", "schedule", "flops"],
    ["weights", "drop_in"],
    ["integrations"],
    ["trainer"],
    ["compare"],
    ["bench_point"],
    ["bench"],
    ["bench_plot"],
    ["doctor", "demo"],
    ["cli"],
    ["__main__", "launch_check"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
CPU_PLATFORM_USERS = {"distributed"}


def _module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: Path) -> set[str]:
    """The parts of this package that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "megatron_longstraw" and rest:
                found.add(rest.partition(".")[0])
    return found & RANK.keys()


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_up(path: Path) -> None:
    module = _module(path)
    assert module in RANK, f"{module} has no place in LAYERS"
    for imported in _imports(path) - {module}:
        assert RANK[imported] < RANK[module], f"{module} imports {imported}, which does not stand above it"


def test_only_the_entry_knows_the_cpu_platform() -> None:
    users = {_module(path) for path in FILES if "cpu_platform" in _imports(path)} - {"cpu_platform"}
    assert users == CPU_PLATFORM_USERS


def test_every_layer_exists() -> None:
    assert {_module(path) for path in FILES} == RANK.keys()


def test_input_side_needs_no_torch() -> None:
    """A wrong config or rollout file is refused before torch and Megatron load."""
    for name in ("config", "rollouts"):
        tree = ast.parse((PACKAGE / f"{name}.py").read_text())
        imported = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {(n.module or "").partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not imported & {"torch", "megatron", "transformers"}, name
