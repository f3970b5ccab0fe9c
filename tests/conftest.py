"""Fixtures that all tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import Ranks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--megatron-checkout", help="a Megatron-LM checkout of tag core_v0.19.0, for tests of patches/")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Rank processes that live as long as the test run."""
    pools = Ranks()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def agent_rollouts() -> Path:
    """Real agent histories, which lie beside the checkout and not in it."""
    path = Path(__file__).resolve().parents[2] / "shared" / "data" / "agent_rollouts.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return path
