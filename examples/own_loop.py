"""A plain torch loop as a worker of a run: python examples/own_loop.py RUN.json REGION

The model is what RUN.json's `model.config` says, from transformers; vision.py has one that GeoTrain does not know.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import geotrain
from geotrain.config import load_run


def main(run_file: str, region: str) -> None:
    run = load_run(run_file)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**run.model.config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    with geotrain.OuterLoop(run_file, region, model, state={"adam": optimizer}) as outer:
        for tokens in outer.batches():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            outer.after_step(loss, grad_norm=float(norm))


if __name__ == "__main__":
    main(*sys.argv[1:])
