import pytest
import torch

from geotrain.config import architecture_from_hf
from geotrain.parameters.initial import initial_tensor
from geotrain.parameters.parameter_map import Parameter, canonical_parameters

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8,
    "num_attention_heads": 4,
}  # fmt: skip


def test_each_parameter_has_its_own_distribution() -> None:
    for parameter in canonical_parameters(architecture_from_hf(CONFIG)):
        tensor = initial_tensor(parameter, seed=1)
        assert tensor.dtype == torch.float32
        assert tuple(tensor.shape) == parameter.shape
        if parameter.init == "ones":
            assert bool((tensor == 1).all())
        else:
            residual = parameter.name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.02 / 4 if residual else 0.02
            assert tensor.std().item() == pytest.approx(std, rel=5 * (2 * parameter.numel) ** -0.5)
            assert abs(tensor.mean().item()) < 5 * std * parameter.numel**-0.5


def test_states_decay_and_step_as_they_were_designed() -> None:
    for init, makes, bounds in (
        ("log_uniform", torch.exp, (0.01, 16)),
        ("time_steps", torch.nn.Softplus(), (1e-3, 0.1)),
    ):
        made = makes(initial_tensor(Parameter("w", (4096,), 0, init, 0.0), 1))
        assert (made.min().item(), made.max().item()) == pytest.approx(bounds, rel=0.05, abs=0.01 * bounds[1])
        middle = sum(bounds) / 2 if init == "log_uniform" else (bounds[0] * bounds[1]) ** 0.5
        assert made.median().item() == pytest.approx(middle, rel=0.1), init


def test_seed_and_name_decide_and_nothing_else() -> None:
    first, second = (Parameter(name, (64, 32), 0, "normal", 1.0) for name in ("a", "b"))
    torch.manual_seed(1)
    once = initial_tensor(first, 1)
    torch.manual_seed(2)
    initial_tensor(second, 1)
    assert torch.equal(initial_tensor(first, 1), once)
    for other in (initial_tensor(second, 1), initial_tensor(first, 2)):
        assert abs(torch.corrcoef(torch.stack([once.flatten(), other.flatten()]))[0, 1]) < 6 * once.numel() ** -0.5


def test_golden_values() -> None:
    """A run started again from its seed must start from the same weights."""
    assert initial_tensor(Parameter("w", (2, 2), 0, "normal", 1.0), 1234).flatten().tolist() == pytest.approx(
        GOLDEN, abs=1e-5
    )


GOLDEN = [0.920851, -0.328306, 0.866918, 0.601751]
