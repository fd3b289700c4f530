"""A Hugging Face Trainer as a worker, by one callback: python examples/hf_trainer.py RUN.json REGION"""

import sys
import tempfile

from torch.utils.data import default_collate
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import geotrain
from geotrain.config import load_run


def batch(samples: list) -> dict:
    tokens = default_collate(samples)
    return {"input_ids": tokens, "labels": tokens}


def main(run_file: str, region: str) -> None:
    run = load_run(run_file)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**run.model.config))
    outer = geotrain.OuterLoopCallback(run_file, region)
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=outer.total_steps,
        per_device_train_batch_size=run.samples_per_step,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model, settings, batch, train_dataset=outer.stream(), callbacks=[outer]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
