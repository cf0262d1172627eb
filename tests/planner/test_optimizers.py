"""Optimizer states against the real optimizers of torch, by their tensors."""

from __future__ import annotations

import pytest
import torch

from planner.memory.optimizers import ALIASES, OPTIMIZERS, find_optimizer


def real(name: str, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name.startswith("adamw"):
        return torch.optim.AdamW(parameters, fused=name == "adamw_torch_fused", foreach=name == "adamw_torch")
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3)
    return torch.optim.RMSprop(parameters) if name == "rmsprop" else torch.optim.Adagrad(parameters)


@pytest.mark.stack
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_torch", "rmsprop", "adagrad", "sgd"])
def test_states_of_real_optimizers(name: str, dtype: torch.dtype) -> None:
    width = torch.finfo(dtype).bits // 8
    parameter = torch.nn.Parameter(torch.ones(256, 512, dtype=dtype))
    optimizer = real(name, [parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t) and t.numel() > 1)
    predicted = sum(find_optimizer(name).state_bytes(width)) * parameter.numel()
    assert held == predicted


def test_widths_follow_the_parameter_or_are_fixed() -> None:
    assert find_optimizer("adamw_torch_fused").state_bytes(2) == (2.0, 2.0)
    assert find_optimizer("adamw_torch_fused").state_bytes(4) == (4.0, 4.0)
    for width in (2, 4):
        assert find_optimizer("paged_adamw_32bit").state_bytes(width) == (4.0, 4.0)
        assert find_optimizer("lion_32bit").state_bytes(width) == (4.0, 0.0)
        # One byte a value, and fp32 scales of blocks of 256: 4 / 256 = 0.0156 more.
        assert find_optimizer("adamw_bnb_8bit").state_bytes(width) == pytest.approx((1 + 4 / 256,) * 2, rel=0.002)


def test_adafactor_keeps_a_row_and_a_column_sum() -> None:
    """512 + 256 fp32 sums beside 131,072 elements are 0.023 bytes each."""
    assert sum(find_optimizer("adafactor").state_bytes(4)) == pytest.approx(4 * (512 + 256) / (512 * 256), abs=0.005)


def test_only_foreach_copies_in_its_step() -> None:
    assert [o.name for o in OPTIMIZERS.values() if o.step_transient] == ["adamw_torch"]


def test_aliases_lead_to_known_optimizers() -> None:
    for alias, name in ALIASES.items():
        assert find_optimizer(alias).name == name
        assert alias not in OPTIMIZERS


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'adamax' is not known; known: adafactor, adagrad"):
        find_optimizer("adamax")


def test_what_alters_numerics_or_needs_a_package() -> None:
    assert not find_optimizer("adamw_torch_fused").numerics
    assert find_optimizer("adamw_bnb_8bit").numerics
    assert find_optimizer("adamw_torch_8bit").needs == "torchao"
    assert all(o.device == "cuda" for o in OPTIMIZERS.values() if o.needs == "bitsandbytes")


def test_what_a_step_moves() -> None:
    """Fused reads four tensors and writes three; foreach makes eight passes for the same update, 21 tensors."""
    widths = {"weights": 4.0, "gradients": 4.0, "master": 0.0, "moment1": 4.0, "moment2": 4.0}
    assert find_optimizer("adamw_torch_fused").moved_bytes(**widths) == 7 * 4
    assert find_optimizer("adamw_torch").moved_bytes(**widths) == 21 * 4
    # DeepSpeed updates an fp32 master from a bf16 gradient and writes the bf16 weight.
    mixed = {**widths, "weights": 2.0, "gradients": 2.0, "master": 4.0}
    assert find_optimizer("adamw_torch_fused").moved_bytes(**mixed) == 2 * 2 + 2 + 2 * (4 + 4 + 4)
