"""The loss of a small stand-in model, trained in virtual time in the world and by the rules of your own run.

    python -m benchmarks.studies.loss_curve configs/runs/1b.json configs/clusters/four-regions-ssh.json --tflops 150
    python -m benchmarks.studies.loss_curve run.json cluster.json --step-s 2.5 --local-steps 64 --picture curve.svg

Takes minutes. The losses tell rules and settings apart; they are not those of your model. The options are those of
`geotrain simulate`. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.common import command_line
from benchmarks.studies.learner.training import Curve, Study, training_task
from geotrain.commands.simulate import WhatIf, question
from geotrain.config import OuterConfig, RunConfig
from geotrain.parameters.parameter_map import parameter_map_of
from geotrain.simulate.forecast import nothing_committed
from geotrain.simulate.spec import WorldSpec
from geotrain.simulate.world import VirtualWorld

STEPS = 4096  # inner steps of the small model, of all workers together


def main() -> None:
    parser = command_line(__doc__, recorded=False)
    parser.add_argument("run", type=Path, metavar="RUN.json")
    parser.add_argument("cluster", type=Path, metavar="CLUSTER.json")
    speed = parser.add_mutually_exclusive_group(required=True)
    speed.add_argument("--tflops", type=float, help="what one rank really reaches")
    speed.add_argument("--step-s", type=float, help="measured seconds of an inner step")
    parser.add_argument("--local-steps", "-H", type=int, help="what if: H")
    parser.add_argument("--updates-per-send", "-K", type=int, help="what if: K")
    parser.add_argument("--codec", help="what if: codec of both directions between regions")
    parser.add_argument("--without", metavar="REGION", help="what if: one region less")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")
    args = parser.parse_args()
    what_if = WhatIf(args.local_steps, args.updates_per_send, args.codec, args.without)
    asked = question(args.run, args.cluster, step_s=args.step_s, tflops=args.tflops, what_if=what_if)
    points = loss_curve(*asked)
    if args.picture:
        draw(points, f"{asked[0].name}: {asked[1].rule}", args.picture)
    print(json.dumps({"loss_curve": points}))


def loss_curve(run: RunConfig, outer: OuterConfig, spec: WorldSpec) -> list[dict[str, float]]:
    """Points of the curve; the messages have the size of the run's own model. Raises ConfigError."""
    study = Study(steps=STEPS, length=32)
    curve = Curve(study, points=16)
    world = VirtualWorld(spec, training_task(study, outer, parameter_map_of(run).numel), curve.watch)
    trained = world.run()["committed_steps"]
    if not trained:
        raise nothing_committed(run, STEPS, spec, outer)
    curve.add(world, trained / STEPS)
    return [{"seconds": p.time_s, "share": p.committed_share, "loss": p.test} for p in curve.points]


def draw(points: list[dict[str, float]], title: str, path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 4.5))
    axes.plot([p["seconds"] for p in points], [p["loss"] for p in points], marker=".")
    axes.set(title=f"{title}, small byte model in this world", xlabel="virtual seconds", ylabel="nats a byte")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
