"""A vision model as a worker. `python examples/vision.py save` writes its initial weights beside examples/vision.json;
then `python examples/vision.py REGION [RUN.json]` trains in a region. Nothing of it is downloaded: images are made.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import geotrain

RUN = Path(__file__).parent / "vision.json"


class Stripes:
    """Noisy stripes, 1 × 16 × 16, in eight directions: the class is the direction."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        random = torch.Generator().manual_seed(index)
        angle, phase = torch.tensor(index % 8 * torch.pi / 8), 6.3 * torch.rand(1, generator=random)
        y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        image = torch.sin(x * angle.cos() + y * angle.sin() + phase)
        return (image + torch.randn(16, 16, generator=random))[None], index % 8


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 8)),
    )


def train(run: Path, region: str) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with geotrain.OuterLoop(run, region, model.named_parameters(), state={"adam": optimizer}) as outer:
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
        geotrain.save_parameters(RUN.with_name("vision.safetensors"), network())
    else:
        train(Path(sys.argv[2]) if len(sys.argv) > 2 else RUN, sys.argv[1])
