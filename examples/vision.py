"""A vision model as a worker: python examples/vision.py examples/vision.json REGION

First `python examples/vision.py save` writes its initial weights, which the run file names. Its images are made up.
"""

import sys

import torch
from torch import nn

import geotrain


class Stripes:
    """Noisy stripes, 1 × 16 × 16, in eight directions: the class is the direction."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        random = torch.Generator().manual_seed(index)
        angle, phase = torch.tensor(index % 8 * torch.pi / 8), 6.3 * torch.rand(1, generator=random)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        image = torch.sin(x * angle.cos() + y * angle.sin() + phase)
        return (image + 0.5 * torch.randn(16, 16, generator=random))[None], index % 8


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 8)),
    )


def main(run_file: str, region: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with geotrain.OuterLoop(run_file, region, model, state={"adam": optimizer}) as outer:
        for images, labels in outer.batches(Stripes()):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.after_step(loss)
    print(f"{region}: loss {loss.item():.3f} at the end")


if __name__ == "__main__":
    if sys.argv[1] == "save":
        torch.manual_seed(1)
        geotrain.save_parameters("examples/vision.safetensors", network())
    else:
        main(*sys.argv[1:])
