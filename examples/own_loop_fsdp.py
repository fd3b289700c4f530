"""Several ranks as a worker, sharded by FSDP2: torchrun --nproc-per-node 2 examples/own_loop_fsdp.py RUN.json REGION

With `ddp` as third argument every rank holds the whole model, under DistributedDataParallel.
"""

import sys

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import geotrain
from geotrain.config import load_run


def main(run_file: str, region: str, form: str = "fsdp") -> None:
    torch.distributed.init_process_group()
    run = load_run(run_file)
    torch.manual_seed(run.seed)  # DDP begins with rank 0's weights; then the server's come
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**run.model.config))
    if torch.cuda.is_available():
        torch.cuda.set_device(torch.distributed.get_rank() % torch.cuda.device_count())
        model = model.cuda()
    device = next(model.parameters()).device
    if form == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    with geotrain.OuterLoop(run_file, region, model, state={"adam": optimizer}) as outer:
        for tokens in outer.batches():
            tokens = tokens.to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            outer.after_step(loss)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
