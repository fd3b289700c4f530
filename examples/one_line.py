"""A loop that joins a run without a file: python examples/one_line.py HOST:PORT NAME [STEPS]

Where `geotrain serve` runs, it prints HOST:PORT and a token, which goes into the environment as GEOTRAIN_TOKEN. NAME
is this worker's own. Each learns from numbers of its own; the model is what all of them have learned.
"""

import sys

import torch
from torch import nn

import geotrain


def main(address: str, name: str, steps: int = 2000) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    random = torch.Generator().manual_seed(sum(name.encode()))
    with geotrain.OuterLoop.join(address, name, model, every=8, state={"adam": optimizer}) as outer:
        for _ in range(steps):
            x = torch.randn(64, 8, generator=random)
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            outer.after_step(loss)
            if outer.finished:
                break
    print(f"{name}: loss {loss.item():.3f} at the end")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
