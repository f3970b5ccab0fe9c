"""Layer modules and parameters: the local norm, backends, cuts of parameters, and the CPU platform's bounds."""

from types import SimpleNamespace

import pytest
import torch

from megatron_longstraw import cpu_platform
from megatron_longstraw.demo import demo_groups
from tests.ranks import Layout, Ranks


def _norms() -> list[float]:
    from megatron_longstraw.models.backend import Norm

    x = torch.randn(7, 16, dtype=torch.float64)
    apart = []
    for kind in ("RMSNorm", "LayerNorm"):
        for zero_centered in (False, True):
            config = SimpleNamespace(
                normalization=kind,
                layernorm_zero_centered_gamma=zero_centered,
                sequence_parallel=True,
                params_dtype=torch.float64,
            )
            norm = Norm(config, 16, 1e-6)
            assert norm.weight.sequence_parallel
            norm.weight.data += torch.randn(16, dtype=torch.float64)
            gamma = norm.weight + 1 if zero_centered else norm.weight
            centered = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
            want = centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gamma
            apart.append((norm(x) - want).abs().max().item())
    return apart


def test_norm_is_the_formula(ranks: Ranks) -> None:
    assert max(ranks.run(Layout(), _norms)[0]) < 1e-14


def _backends() -> tuple[str, str]:
    from megatron_longstraw.config import ConfigError
    from megatron_longstraw.models.backend import resolve_backend

    try:
        resolve_backend("transformer_engine")
    except ConfigError as error:
        return resolve_backend("auto")[1], str(error)
    return resolve_backend("auto")[1], "accepted"


def test_backend_without_a_gpu(ranks: Ranks) -> None:
    ((name, error),) = ranks.run(Layout(), _backends)
    assert name == "local"
    assert "model.backend=transformer_engine can't be used" in error
    assert "needs model.backend=local" in error


def _cuts() -> None:
    from megatron_longstraw.models.parameters import Shard

    full = torch.arange(24.0).view(12, 2)
    for stride in (1, 2, 3):
        shards = [Shard(0, stride, rank, 2) for rank in range(2)]
        parts = [s.cut(full) for s in shards]
        assert shards[0].full_shape(parts[0].shape) == [12, 2]
        assert torch.equal(shards[0].join(parts), full)
    gate_up = [Shard(0, 2, rank, 2).cut(full) for rank in range(2)]
    assert torch.equal(gate_up[0], torch.cat([full[:3], full[6:9]]))  # gate and up are cut one by one
    assert torch.equal(Shard(None, 1, 1, 2).cut(full), full)
    assert torch.equal(Shard(1, 1, 1, 2).cut(full), full[:, 1:])


def test_cuts_join_to_the_whole(ranks: Ranks) -> None:
    ranks.run(Layout(), _cuts)


def test_cpu_platform_refuses_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="this one has a device"):
        cpu_platform.install()
    assert torch.cuda.current_device is before
    assert not cpu_platform.is_installed()


def _installed() -> tuple[bool, str, str]:
    return cpu_platform.is_installed(), torch.zeros(1, device="cuda").device.type, torch.zeros(1).type()


def test_cpu_platform_in_ranks_only(ranks: Ranks) -> None:
    assert ranks.run(Layout(), _installed)[0] == (True, "cpu", "torch.cuda.FloatTensor")
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_demo_groups_are_real_text_and_the_same_each_time() -> None:
    groups = list(demo_groups(3))
    assert groups == list(demo_groups(3))
    for group in groups:
        assert len(group["prompt"].encode()) >= 8192
        assert len(group["responses"]) == 8
        assert group["responses"][0]["reward"] == 1.0
        assert all(len(r["text"]) >= 60 for r in group["responses"])
