"""The script given to `deepspeed`: one rank of one worker.

deepspeed --hostfile hosts launch/pretrain.py --run run.json --region eu
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from geotrain.config import EXIT_FOR_GOOD, Address, ClusterConfig, RunConfig, load_cluster, load_run
from geotrain.launch.world import rank_environment
from geotrain.net.client import ServerForgot
from geotrain.outer.layout import layout_of
from geotrain.outer.messages import GLOBAL, Refused
from geotrain.outer.server import identity_of

if TYPE_CHECKING:
    from geotrain.inner.parallel import Mesh


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train as one rank of a worker. Started by the deepspeed launcher.")
    parser.add_argument("--run", required=True, type=Path, help="the run file")
    parser.add_argument("--region", required=True, help="the region this worker stands in")
    parser.add_argument("--cluster", type=Path, help="the cluster file; default: cluster.json beside the run file")
    parser.add_argument("--worker", help="the worker's name; default: the region's only one")
    parser.add_argument("--resume", action="store_true", help="take up the newest checkpoint of the optimizer")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    try:
        run = load_run(args.run)
        cluster = load_cluster(args.cluster or args.run.parent / "cluster.json")
        train(run, cluster, args.region, args.worker, args.resume)
    except ValueError as error:  # ConfigError is one
        return failed(args.region, error, EXIT_FOR_GOOD)
    except (Refused, OSError, TimeoutError, ServerForgot) as error:  # who was quarantined may come back later
        return failed(args.region, error, 1)
    except RuntimeError as error:
        from geotrain.inner.parallel import lost_rank

        told = lost_rank(error)
        if told is None:
            raise
        return failed(args.region, told, 1)
    return 0


def failed(region: str, error: Exception | str, code: int) -> int:
    print(f"geotrain: worker in {region}: {error}", file=sys.stderr, flush=True)
    return code


def train(run: RunConfig, cluster: ClusterConfig, region: str, worker_name: str | None, resume: bool) -> None:
    """Build everything, train, close everything."""
    os.environ.update(rank_environment(os.environ))  # under Slurm and Open MPI torch's variables have other names
    # DeepSpeed and Megatron take seconds to import: only once the files are known to be right.
    from geotrain.data.loader import LeasedLoader, open_source, validation_batches
    from geotrain.data.tokens import read_manifest
    from geotrain.inner.dataset import open_tokens
    from geotrain.inner.engine import build_engine
    from geotrain.monitor.events import Acknowledged, EventLog, JobTrained
    from geotrain.monitor.flops import peak_flops, training_flops_per_token
    from geotrain.net.certs import trust_between
    from geotrain.net.client import MemberClient
    from geotrain.trainer import Trainer

    worker = cluster.worker(region, worker_name)
    folder = run.run_folder
    deepspeed = {**run.deepspeed, **worker.deepspeed}
    flat = run.outer.levels == 1
    server = cluster.global_server if flat else cluster.region(region).server
    engine = build_engine(run, worker.parallel or run.parallel, deepspeed)
    print(_place(engine.mesh, server), flush=True)
    vocab_size = engine.architecture.vocab_size
    source = open_source(Path(run.data.train), open_tokens, run.data.sequence_length, vocab_size, run.seed)
    micro_batch = deepspeed["train_micro_batch_size_per_gpu"]
    loader = LeasedLoader(source, run.samples_per_step, micro_batch, engine.dp_rank, engine.dp_size)
    layout = layout_of(run)
    trust = trust_between(cluster, "worker", worker.name, *(("global", GLOBAL) if flat else ("region", region)))
    checkpoints = folder / run.checkpoint.folder / worker.name
    with (
        closing(MemberClient(str(server), trust=trust)) as client,
        EventLog(
            folder / "events" / f"{worker.name}.jsonl", source=worker.name, enabled=run.monitor.enabled
        ) as events,
    ):
        identity = identity_of(run, layout, read_manifest(Path(run.data.train)).sha256)
        trainer = Trainer(run, worker.name, identity, layout, engine, loader, client, checkpoints)
        trainer.min_step_s = worker.min_step_s
        client.on_acknowledged = lambda sequence: events.write(Acknowledged(worker.name, trainer.life, sequence))
        trainer.report = lambda numbers: events.write(
            JobTrained(worker=worker.name, retries=float(client.retries), **numbers)
        )
        peak = peak_flops(cluster, worker)
        if peak is not None:
            per_token = training_flops_per_token(engine.architecture, run.data.sequence_length)
            trainer.peak_flops_per_token_s = peak / per_token
        if run.monitor.validate_every_samples is not None and run.data.validation is not None:
            held_out = open_source(Path(run.data.validation), open_tokens, run.data.sequence_length, vocab_size, None)
            sizes = run.data.validation_samples, micro_batch, engine.dp_rank, engine.dp_size
            trainer.validation = validation_batches(held_out, *sizes)
        trainer.train(resume)
    engine.close()


def _place(mesh: Mesh, server: Address) -> str:
    """What this rank computes, and the address of this machine on the way to the server."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        unsent.connect((server.host, server.port))
        here = unsent.getsockname()[0]
    return f"rank {mesh.rank} at {here}: stage {mesh.pp_rank}, replica {mesh.dp_rank}, tensor rank {mesh.tp_rank}"


if __name__ == "__main__":
    sys.exit(main())
