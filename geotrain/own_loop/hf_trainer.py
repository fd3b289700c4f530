"""Makes a Hugging Face `Trainer` a worker, by one callback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import IterableDataset, get_worker_info
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from geotrain.common.names import ENDLESS_SAMPLES
from geotrain.config import ConfigError, RunConfig, load_run
from geotrain.data.loader import RunSamples
from geotrain.own_loop.enroll import is_address
from geotrain.own_loop.loop import MapStyle, OuterLoop, length_of, places_of, whole_steps

WITHOUT_END = "constant", "constant_with_warmup", "inverse_sqrt"  # Trainer's schedules that max_steps has no part in


class OuterLoopCallback(TrainerCallback):
    """Makes a `transformers.Trainer` a worker of the run: give it as a callback, and `stream(data)` as train_dataset.

    run, region, options: as for `OuterLoop`, which is made when training begins; or as for `OuterLoop.join`, with the
    batch of Trainer's step as `samples_per_step`. Set max_steps to `total_steps`, in
    a run without an end to any number, and per_device_train_batch_size × gradient_accumulation_steps × processes to
    the run's samples of a step. Training ends when the run's data does. Trainer's schedules (torch's LambdaLR) follow
    the run's progress, over max_steps.
    """

    def __init__(self, run: str | Path, region: str, **options: Any) -> None:
        self.run: str | RunConfig = str(run) if is_address(run) else load_run(run)
        self.region, self.options = region, options
        if isinstance(self.run, RunConfig) and options.get("cluster") is None:
            self.options["cluster"] = Path(run).parent / "cluster.json"
        self.outer: OuterLoop | None = None
        self._scheduler: LambdaLR | None = None
        self._loss: Any = None  # of the micro-batches of this step so far; None: Trainer computes it by itself
        self._share = 1.0  # of a micro-batch in a step

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, over all workers. Raises ConfigError: it has no end."""
        if isinstance(self.run, str):
            raise ConfigError(
                f"total_steps: {self.run} says it when training begins; set max_steps to the --steps of its "
                "`geotrain serve`, where it has none to any number"
            )
        return whole_steps(self.run)

    def stream(self, data: MapStyle | None = None) -> IterableDataset[Any]:
        """Stream the samples of a map-style data set that are leased to this worker; without one, of the run's own.
        Trainer's processes share each step's among themselves."""
        return _Leased(self, data)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        states = {"optimizer": kwargs["optimizer"], **self.options.pop("state", {})}
        with ExitStack() as opened:
            if isinstance(self.run, str):
                joining = {"samples_per_step": batch, **self.options}
                self.outer = OuterLoop.join(self.run, self.region, kwargs["model"], state=states, **joining)
                opened.callback(self.outer.close)
                self.run = self.outer.run
            scheduler = kwargs.get("lr_scheduler")
            scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
            self._check(self.run, batch, args, scheduler)
            opened.pop_all()
        if self.outer is None:
            self.outer = OuterLoop(self.run, self.region, kwargs["model"], state=states, **self.options)
        self._scheduler = scheduler
        # Samples are leased: Trainer skips none of them where it resumes, and the run says when it ends.
        args.ignore_data_skip = True
        state.max_steps += state.global_step
        self._share = 1 / args.gradient_accumulation_steps
        kwargs["model"].register_forward_hook(self._note_loss, with_kwargs=True)
        self._follow()
        control.should_training_stop = self.outer.finished

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.outer is not None
        loss, self._loss = float("nan") if self._loss is None else self._loss, None
        self.outer.after_step(loss, lr=kwargs["optimizer"].param_groups[0]["lr"])
        self._follow()
        control.should_training_stop |= self.outer.finished

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.outer is not None:
            self.outer.__exit__(None, None, None)  # who has joined by an address leaves, where the run goes on

    def _check(self, run: RunConfig, batch: int, args: TrainingArguments, scheduler: Any) -> None:
        """Compare Trainer's settings with the run's. Raises ConfigError."""
        if run.data.rampup_batch_size is not None:
            raise ConfigError(
                "data.rampup_batch_size: Trainer's batch is fixed; leave it out, or write a loop with OuterLoop"
            )
        if batch != run.samples_per_step:
            raise ConfigError(
                f"Trainer trains {batch} samples in a step (per_device_train_batch_size × "
                f"gradient_accumulation_steps × processes), the run {run.samples_per_step}; make them equal"
            )
        needs_end = args.lr_scheduler_type not in WITHOUT_END or run.data.train_samples < ENDLESS_SAMPLES
        if needs_end and args.max_steps != (total := whole_steps(run)):
            raise ConfigError(
                f"TrainingArguments.max_steps is {args.max_steps}, the run has {total} steps over all "
                "workers, by which schedules go: set max_steps=callback.total_steps"
            )
        if scheduler is not None and not isinstance(scheduler, LambdaLR):
            raise ConfigError(
                f"the schedule {type(scheduler).__name__} goes by this worker's own steps, and cannot be moved to "
                "the run's: use one that is a LambdaLR, as lr_scheduler_type='cosine' and most of Trainer's are"
            )

    def _follow(self) -> None:
        """Move the schedule to the run's step."""
        assert self.outer is not None
        if self._scheduler is not None:
            self._scheduler.last_epoch = int(self.outer.step) - 1
            self._scheduler.step()

    def _note_loss(self, model: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Add up the losses of forward passes, for `report`: Trainer gives none at a step's end. Where it hands the
        model the number of tokens in all micro-batches, theirs add up to the step's."""
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if model.training and loss is not None:
            share = 1 if "num_items_in_batch" in kwargs else self._share
            self._loss = (self._loss or 0.0) + loss.detach() * share


class _Leased(IterableDataset[Any]):
    def __init__(self, callback: OuterLoopCallback, data: MapStyle | None) -> None:
        self._callback, self._data = callback, data

    def __iter__(self) -> Iterator[Any]:
        outer = self._callback.outer
        if get_worker_info() is not None:
            raise ConfigError("dataloader_num_workers: leases come to the trainer's own process; set it to 0")
        if outer is None:
            raise ConfigError("train_dataset=callback.stream(data): give the callback to Trainer as well")
        order = places_of(outer.run, length_of(self._data))
        data = RunSamples(outer.run) if self._data is None else self._data
        for step in outer.samples():
            for place in order(step):
                yield data[place]
