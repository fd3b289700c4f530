"""A DeepSpeed engine as a worker: deepspeed examples/own_loop_deepspeed.py RUN.json REGION [ZERO_STAGE]"""

import sys

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import geotrain
from geotrain.config import load_run


def main(run_file: str, region: str, stage: str = "1") -> None:
    run = load_run(run_file)
    block = {
        "train_batch_size": run.samples_per_step,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**run.model.config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=block)
    with geotrain.OuterLoop(run_file, region, engine, state={"adam": engine.optimizer}) as outer:
        for tokens in outer.batches():
            tokens = tokens.to(engine.device)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            outer.after_step(loss)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*(argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")))
