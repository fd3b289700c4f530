"""Trains as one rank of one worker: the script that is given to `deepspeed`.

deepspeed --hostfile hosts launch/pretrain.py --run run.json --region eu
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geotrain.config import EXIT_FOR_GOOD, Address, ClusterConfig, RunConfig, Topology, load_cluster, load_run
from geotrain.launch.launchers.base import EXIT_FORM, end_file, with_formed
from geotrain.launch.launchers.registry import launcher_of
from geotrain.launch.loading import loading
from geotrain.launch.networks import address_to, networks_to
from geotrain.launch.rank_environment import (
    capability_here,
    extensions_of,
    library_settings,
    rank_environment,
)
from geotrain.worker.job_line import JobLine, say

if TYPE_CHECKING:
    from torch import Tensor

    from geotrain.parallelism.mesh import RankMesh


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train as one rank of a worker. Started by the deepspeed launcher.")
    parser.add_argument("--run", required=True, type=Path, help="the run file")
    parser.add_argument("--region", required=True, help="the region this worker stands in")
    parser.add_argument("--cluster", type=Path, help="the cluster file; default: cluster.json beside the run file")
    parser.add_argument("--worker", help="the worker's name; default: the region's only one")
    parser.add_argument("--resume", action="store_true", help="take up the newest checkpoint of the optimizer")
    parser.add_argument("--formed", help="the worker, where it is not as in the cluster file; given by the launcher")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    with loading():  # they import torch
        from geotrain.outer.messages import Refused
    try:
        run = load_run(args.run)
        cluster = load_cluster(args.cluster or args.run.parent / "cluster.json")
        if args.formed:
            cluster = with_formed(cluster, args.region, args.formed)
        finished = train(run, cluster, args.region, args.worker, args.resume, bool(args.formed))
        leave_worker()
    except ValueError as error:  # ConfigError is one
        return failed(args.region, error, EXIT_FOR_GOOD)
    except (Refused, OSError, TimeoutError) as error:  # a restart may help, also after a quarantine
        return failed(args.region, error, 1)
    except RuntimeError as error:
        from geotrain.inner.runtime.parallel import lost_rank

        lost = lost_rank(error)
        if lost is None:
            raise
        return failed(args.region, lost, 1)
    return 0 if finished else EXIT_FORM


def failed(region: str, error: Exception | str, code: int) -> int:
    say(f"geotrain: worker in {region}: {error}", sys.stderr)
    return code


def train(
    run: RunConfig, cluster: ClusterConfig, region: str, worker_name: str | None, resume: bool, formed: bool = False
) -> bool:
    """Build everything, train, close everything. formed: the worker is not as in the cluster file, and begins without
    a checkpoint that its ranks cannot read. Returns whether the worker has done all its work; no: it is to be formed
    anew."""
    run.check_for_trainer()
    worker, topology = cluster.worker(region, worker_name), Topology(run, cluster)
    setup, server = topology.workers[worker.name], topology.servers[topology.server_of(worker.name)]
    os.environ.update(rank_environment(os.environ, launcher_of(worker)))
    capability, traces = capability_here(os.environ), run.run_folder.absolute() / "profiles" / worker.name
    if capability is not None:
        traces.mkdir(parents=True, exist_ok=True)  # torch writes to no folder that is not there
    os.environ.update(
        library_settings(
            os.environ,
            cores=len(os.sched_getaffinity(0)),
            ranks_here=max(host.slots for host in worker.hosts),
            tensor_parallel=setup.parallel.tensor,
            overlaps_steps=run.acco is not None,
            capability=capability,
            deterministic=setup.precision.deterministic_mode,
            traces=traces,
            extensions=extensions_of(run.run_folder.absolute()),
        )
    )
    # These import DeepSpeed and Megatron-core, which takes seconds: not before the configuration is known to be
    # right.
    with loading():
        from geotrain.data.dataset import end_of_document, training_digest
        from geotrain.data.loader import LeasedLoader, cache_of, open_source, open_training, validation_batches
        from geotrain.inner.build import build_engine
        from geotrain.monitor.utilization import peak_flops, training_flops_per_token
        from geotrain.worker.connection import connected
        from geotrain.worker.trainer import Trainer
        from geotrain.worker.verification import Verifier

    def trouble(what: str) -> None:
        say(f"geotrain: worker in {region}: {what}", sys.stderr)

    end = end_of_document(run.data)
    engine = build_engine(run, setup.parallel, setup.deepspeed, end_of_document=end, precision=setup.precision)
    say(_place(engine.mesh, server), sys.stdout)
    if worker.hosts[1:] and os.environ["LOCAL_RANK"] == "0":
        say(f"rank {engine.mesh.rank}: {networks_to(worker.hosts[0].host, os.environ)}", sys.stdout)
    vocab_size = engine.architecture.vocab_size
    source = open_training(run.data, vocab_size, run.seed)
    micro_batch = setup.deepspeed["train_micro_batch_size_per_gpu"]
    ranks, on_gpu = (engine.dp_rank, engine.dp_size), engine.device.type == "cuda"
    loader = LeasedLoader(
        source, run.samples_per_step, micro_batch, *ranks, pinned=on_gpu, ramp=run.data.rampup_batch_size
    )
    validation: Sequence[Tensor] = ()
    if run.monitor.validate_every_samples is not None and run.data.validation is not None:
        held_out = open_source(run.data.validation, run.data.sequence_length, vocab_size, None, cache_of(run.data))
        sizes = run.data.validation_samples, micro_batch, engine.dp_rank, engine.dp_size
        validation = validation_batches(held_out, *sizes)
    peak = peak_flops(cluster, worker)
    per_token = training_flops_per_token(engine.architecture, run.data.sequence_length)
    job_line = JobLine(run.monitor.every_s)

    def report(numbers: dict[str, Any]) -> None:
        say(job_line.of(numbers, time.monotonic()), sys.stdout)

    digest = training_digest(run.data)
    with connected(run, cluster, worker, data_digest=digest, report=report, trouble=trouble) as member:
        trainer = Trainer(
            member,
            engine,
            loader,
            validation=validation,
            min_step_s=worker.min_step_s,
            peak_flops_per_token_s=None if peak is None else peak / per_token,
        )
        if share := run.monitor.verified_share:
            trainer.verify = Verifier(engine, member, trainer.loop.watch, share)
        asked = run.run_folder / end_file(worker.name)
        asked.unlink(missing_ok=True)  # an earlier incarnation was
        may_form = formed or worker.hosts[1:] or cluster.region(region).spare_hosts  # else nobody would ask
        if may_form and not run.outer.rule.synchronous:  # whose rounds all workers end together
            trainer.loop.ends = asked.exists
        trainer.checkpoints.files.may_lack = formed
        if run.checkpoint.snapshots is not None or worker.hosts[1:]:
            from geotrain.checkpoint.copies import CheckpointCopies  # it imports what servers are of

            CheckpointCopies(trainer.checkpoints.files, run, worker.name, member.write_event)
        trainer.train(resume)
    engine.close()
    return trainer.loop.finished


def leave_worker() -> None:
    """Destroy the process groups, so that NCCL ends its threads and reports no leak. After an error this is left to
    the process's end: with a rank that is lost NCCL would wait."""
    from geotrain.inner.runtime.parallel import shut_down

    with suppress(RuntimeError):  # everything is saved: that another rank has gone already is no failure
        shut_down()


def _place(mesh: RankMesh, server: Address) -> str:
    """Describe for the log what this rank computes, and this machine's address on the way to the server."""
    here = address_to(server.host, server.port) or "an unknown address"
    part = f"context rank {mesh.cp_rank}, " if mesh.cp_size > 1 else ""
    return (
        f"rank {mesh.rank} at {here}: stage {mesh.pp_rank}, replica {mesh.replica}, {part}tensor rank {mesh.tp_rank}"
    )


if __name__ == "__main__":
    sys.exit(main())
