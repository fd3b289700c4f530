"""`geotrain launch --apply`: adds regions to a run that is on and lets others go, while the rest trains on."""

from __future__ import annotations

import json
from pathlib import Path

from geotrain.commands.operate import LiveRun, RunState, RunStatus
from geotrain.common.files import write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, ConfigError, load_cluster, parse
from geotrain.launch.check import check_together
from geotrain.launch.launcher import launch
from geotrain.launch.terminal import new_console

WANTED = "wanted.json"  # in the run's folder: the cluster with the regions that were added last


def change_regions(run_path: Path, cluster_path: Path) -> int:
    """Have the run's regions be those of the cluster file; wait for the end of those that were added. Returns the
    exit code. Raises ConfigError, Refused, Unreachable, CertificateError; then nothing has changed.

    run_path: the run's folder, or a file of it. Killed anywhere and called again, it goes on: what the run's folder
    holds is written whole, and regions that have drained, or joined, are not asked again.
    """
    run, console = LiveRun(run_path if run_path.is_dir() else run_path.parent), new_console()
    seen = run.see()
    if seen.state is not RunState.RUNNING:
        raise ConfigError(f"{run.folder}: the run is not on: {seen.headline}; launch it with the new cluster file")
    wanted = load_cluster(cluster_path)
    grown, names = with_regions(run, wanted), [region.name for region in wanted.regions if region.workers]
    added = tuple(name for name in names if not _took_part(grown, seen, name))
    draining = seen.statuses[GLOBAL]["draining"]
    for region in (r.name for r in run.cluster.regions if r.workers and r.name not in names):
        if region not in draining and not run.has_left(region, seen):
            run.steer("drain", region)
        console.print(f"drop {region}: it finishes its jobs, sends what it has, and leaves", highlight=False)
    if not added:
        return 0
    console.print(f"add {', '.join(added)}", highlight=False)
    raw = grown.model_dump(by_alias=True, mode="json", exclude_defaults=True)
    write_whole(run.folder / WANTED, json.dumps(raw, indent=2) + "\n")
    return launch(run.folder / "run.json", run.folder / WANTED, resume=True, only=added, added=True)


def with_regions(run: LiveRun, wanted: ClusterConfig) -> ClusterConfig:
    """Return the run's cluster with the regions that only `wanted` has, and what belongs to them. Raises ConfigError
    where others would have to change."""
    now = run.cluster
    if run.config.outer.rule.synchronous or run.config.outer.flat or now.emulate_links:
        raise ConfigError(
            f"{run.folder}: regions join a live run whose rule is asynchronous, with servers in regions "
            "(outer.levels = 2), over links that are not emulated; stop this one, and launch it with the new file"
        )
    if now.global_ssh is not None:
        raise ConfigError(
            f"{run.folder}: its global server is on {now.global_ssh}, and reads the file there: apply it there"
        )
    known = {region.name: region for region in now.regions}
    for region in wanted.regions:
        before = known.get(region.name, region)
        moved = [w.name for w in region.workers if w not in before.workers]
        if moved or len(before.workers) != len(region.workers):
            raise ConfigError(
                f"regions.{region.name}.workers: {', '.join(moved) or 'fewer'}: others than in the run; a region's "
                "workers cannot change while it is on: give hosts that are to join a region of another name"
            )
    new = tuple(region for region in wanted.regions if region.name not in known)
    names = {*known, *(region.name for region in new), GLOBAL}
    pairs = {frozenset(link.regions) for link in now.links}
    links = (ln for ln in wanted.links if frozenset(ln.regions) not in pairs and names.issuperset(ln.regions))
    update = {
        "regions": (*now.regions, *new),
        "links": (*now.links, *links),
        "devices": {**wanted.devices, **now.devices},
    }
    raw = now.model_copy(update=update).model_dump(by_alias=True, mode="json")
    grown = parse(ClusterConfig, raw, "the run's cluster with its new regions")
    check_together(run.config, grown)
    return grown


def _took_part(cluster: ClusterConfig, seen: RunStatus, region: str) -> bool:
    member = seen.statuses[GLOBAL]["members"].get(region, {})
    return bool(member.get("joined") or member.get("updates") or member.get("left"))
