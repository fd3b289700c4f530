"""`geotrain up`: gets a run's machines by SkyPilot, trains on them, and tears them down.

SkyPilot is used as a program, `sky`: its pins (click below 8.2, of clouds botocore and grpcio) do not go together
with this package's. Recovery of machines that are taken back is that of its managed jobs.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

import geotrain
from geotrain.commands.dry_run import needs
from geotrain.commands.output import Output
from geotrain.commands.sky_tasks import (
    GRACE_S,
    IDLE_MINUTES,
    Machines,
    Shipment,
    Wanted,
    cluster_of,
    machines_of,
    machines_of_plan,
    shipped,
    task_name,
    tasks_of,
)
from geotrain.common.files import write_whole
from geotrain.common.names import GLOBAL
from geotrain.config import ClusterConfig, ConfigError, RunConfig, load_cluster, load_run
from geotrain.launch.run_rules import misfits
from geotrain.launch.terminal import new_console, table_of
from geotrain.net.transport.authority import make_certificates
from geotrain.parameters.parameter_map import parameter_count
from geotrain.plan.inventory import PlanError, Wish, pins_of, task_of
from geotrain.plan.offers import Offer, inventory_of
from geotrain.plan.planner import plan

START_S, ASK_S = 3600.0, 600.0  # until machines are there; for what else SkyPilot is asked
ENDED = {0: "is over", 100: "failed", 103: "was cancelled"}  # exit codes of `sky logs`; others: it is not known
PLANNED = 0.9  # of a budget: prices differ between zones, and a prediction is one
FOLLOW_S = 1e9  # the job's log is followed as long as it runs
TRIES, PAUSE_S = 20, 30.0  # of `sky logs` in a row without a word of the job's end
WHERE = "uv tool install 'skypilot[aws,gcp]', or of your clouds; then `sky check`"


class SkyError(Exception):
    """SkyPilot is missing, refused a task, or could not get machines."""


class Sky:
    """The program `sky`, and the interpreter that has its package."""

    def __init__(self) -> None:
        found = shutil.which("sky")
        if found is None:
            raise SkyError(f"there is no program `sky` on the PATH, by which machines are got: {WHERE}")
        self._program = found
        line = Path(found).read_bytes().splitlines()[0].decode(errors="replace").removeprefix("#!").strip()
        # Installers start programs in long paths, or ones with spaces, by a shell.
        beside = str(Path(found).resolve().with_name("python"))
        self._python = line.split() if "python" in Path(line).name else [beside]

    def run(self, *words: str, within_s: float = ASK_S, shown: bool = False) -> tuple[int, str]:
        """Run `sky` with these words; returns its exit code and what it said. shown: it writes to the terminal.
        Raises SkyError if it does not end in time."""
        try:
            done = subprocess.run([self._program, *words], capture_output=not shown, text=True, timeout=within_s)
        except subprocess.TimeoutExpired as error:
            raise SkyError(
                f"sky {' '.join(words)} did not end in {within_s:.0f} s; `sky api status` shows why"
            ) from error
        return done.returncode, f"{done.stdout or ''}{done.stderr or ''}".strip()

    def need(self, *words: str, within_s: float = ASK_S) -> str:
        """The same, for what must succeed. Raises SkyError."""
        code, said = self.run(*words, within_s=within_s)
        if code:
            raise SkyError(f"sky {' '.join(words)} failed:\n{said}")
        return said

    def prices(self, tasks: list[dict[str, Any]]) -> list[float | None]:
        """Have SkyPilot validate tasks; returns dollars an hour of each where they are dearest, None where it has no
        catalogue. Raises SkyError."""
        prices: list[float | None] = self._ask(tasks)
        return prices

    def offers(self, spot: bool) -> list[Offer]:
        """List the machines with accelerators that SkyPilot's catalogues have a price of. Raises SkyError."""
        rows = [(*row[:4], row[4 + spot]) for row in self._ask(None)]
        return [Offer(cloud, kind, int(number), place, usd) for cloud, kind, number, place, usd in rows if usd]

    def _ask(self, question: Any) -> Any:
        """Ask what `sky_prices` answers. Raises SkyError."""
        command = [*self._python, str(Path(__file__).with_name("sky_prices.py"))]
        try:
            done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, timeout=ASK_S)
        except subprocess.TimeoutExpired as error:
            raise SkyError(f"SkyPilot's catalogues did not answer in {ASK_S:.0f} s; is the network there?") from error
        if done.returncode:
            raise SkyError(f"SkyPilot refuses the tasks: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
        return json.loads(done.stdout.splitlines()[-1])


def up(
    run_path: Path,
    cluster_path: Path | None,
    wanted: Wanted,
    dry_run: bool = False,
    down: bool = False,
    changes: tuple[str, ...] = (),
) -> Output:
    """Start the run on machines of SkyPilot, follow it to its end, and tear all down.

    Nothing is started unless SkyPilot takes every task. Where starting fails, what was started is torn down. dry_run:
    only print. down: only tear down. Raises ConfigError, SkyError.
    """
    console, run = new_console(), load_run(run_path, changes)
    folder = run.run_folder.absolute() / "up"
    started = sorted(path.stem for path in (folder / "tasks").glob("*.json"))
    if down:
        sky = Sky()
        if not started:
            raise ConfigError(f"{folder}: nothing was started from here")
        return Output({"left": (left := tear_down(sky, run, folder, started, console))}, code=1 if left else 0)
    if started and not dry_run:
        raise ConfigError(
            f"{folder}/tasks: machines were started, and not ended: `geotrain up RUN --down`; or remove that folder, "
            "if `sky status` and `sky jobs queue` show none"
        )
    if wanted.gpu and cluster_path is not None:
        raise ConfigError("--gpu and a cluster file name the machines twice; leave one out")
    if wanted.results is None and not dry_run:
        raise ConfigError(
            "--results hf://OWNER/NAME or s3://BUCKET/PATH: the machines are torn down, and keep nothing"
        )
    planned = load_cluster(cluster_path) if cluster_path else None
    if planned is not None:
        machines = machines_of_plan(planned)
    elif wanted.gpu:
        machines = machines_of(wanted.gpu, wanted.spot)
    elif wanted.budget is not None:
        run, planned, machines = chosen(run, wanted, console)
    else:
        raise ConfigError(
            "name the machines, --gpu CLOUD:COUNTxKIND@REGION,… or the cluster file of `geotrain plan`; or say what "
            "they may cost, --budget USD, and they are chosen"
        )
    cluster = cluster_of(run, machines, planned)
    need = needs(run, cluster)
    for misfit in misfits(run, cluster):
        raise misfit
    top = need.servers[GLOBAL]
    memory_gb = math.ceil(1.25 * (sum(top.kept.values()) + sum(top.passing.values())) / 1e9) + 2
    content, copies = shipped(run.model_dump(by_alias=True, mode="json", exclude_defaults=True))
    sky, checkout = Sky(), Path(geotrain.__file__).parents[1]
    if not (wanted.image or wanted.setup or (checkout / "launch/install.sh").exists()):
        raise ConfigError("GeoTrain is not a checkout here: say with --image or --setup how machines get it")
    shipment = Shipment(folder, copies, uuid.uuid4().hex, memory_gb, checkout)
    prices = sky.prices(list(tasks_of(run, cluster, machines, wanted, shipment).values()))
    total, ends_s = hourly(prices), None
    if wanted.budget is not None:
        if total is None:
            raise ConfigError("--budget: SkyPilot knows no prices here; with a network, `sky gpus list` fetches them")
        last_s = 3600 * wanted.budget / total - 2 * GRACE_S if total else math.inf
        if last_s <= 0:
            raise ConfigError(
                f"--budget {wanted.budget:g}: the machines cost {total:.2f} USD an hour, and {2 * GRACE_S / 60:.0f} "
                f"minutes are kept for start and end; at least {total * 2 * GRACE_S / 3600:.2f}"
            )
        earliest_s = min(time.time() + last_s, run.ends_at.timestamp() if run.ends_at else math.inf)
        ends_s = None if math.isinf(earliest_s) else int(earliest_s)
    if ends_s is not None:  # the global server keeps the time, so that the money ends with no one looking
        content["ends_at"] = datetime.fromtimestamp(ends_s, UTC).isoformat()
    shipment = replace(shipment, ends_s=ends_s)
    tasks = tasks_of(run, cluster, machines, wanted, shipment)
    show(tasks, prices, machines, wanted, console)
    if dry_run:
        return Output({"tasks": tasks, "usd_per_hour": total}, json.dumps(tasks, indent=2))
    write(folder, content, cluster, tasks)
    with _signals_raised():
        start_and_follow(sky, run, folder, tasks, console)
    return Output({"down": list(tasks)})


def chosen(run: RunConfig, wanted: Wanted, console: Console) -> tuple[RunConfig, ClusterConfig, tuple[Machines, ...]]:
    """Choose machines from SkyPilot's catalogues on which the run is trained soonest for its budget, and what of the
    run is not pinned; prints it. Returns the planned run, cluster and machines, first those of the region that gets
    the global server. Raises PlanError, SkyError."""
    assert wanted.budget is not None
    offers = Sky().offers(wanted.spot)
    inventory, offered = inventory_of(offers, parameter_count(run.architecture), wanted.spot)
    tokens = float(run.data.train_samples * run.data.sequence_length)
    wish = Wish(tokens, usd=PLANNED * wanted.budget, idle_s=2 * GRACE_S)
    try:
        task = task_of(run, pins_of(run.model_dump(by_alias=True, exclude_unset=True)), inventory)
        found = plan(task, wish)
    except PlanError as error:
        raise PlanError(f"--budget {wanted.budget:g}, of which {PLANNED:.0%} are planned: {error}") from None
    hours, rate = found.prediction.seconds(tokens) / found.available / 3600, found.prediction.tokens_per_s
    console.print(f"{tokens:.3g} tokens take about {hours:.3g} hours ({rate:,.0f} tokens/s) on the machines chosen")
    machines = machines_of_plan(found.cluster, offered)
    first = [each for each in machines if each.region == found.place.region]
    return found.run, found.cluster, (*first, *(each for each in machines if each not in first))


def hourly(prices: list[float | None]) -> float | None:
    """Add dollars an hour up; None if one is not known."""
    known = [price for price in prices if price is not None]
    return sum(known) if len(known) == len(prices) else None


def show(
    tasks: dict[str, dict[str, Any]],
    prices: list[float | None],
    machines: tuple[Machines, ...],
    wanted: Wanted,
    console: Console,
) -> None:
    """Print a row for each task, and the price."""
    what = ["global server", *(f"{each.hosts} × {each.slots} {each.kind}" for each in machines)]
    rows = [
        {
            "task": task["name"],
            "where": task["resources"]["infra"],
            "machines": words + (" spot" if task["resources"].get("use_spot") else ""),
            "USD/h": "–" if price is None else f"{price:,.2f}",
        }
        for task, words, price in zip(tasks.values(), what, prices, strict=True)
    ]
    console.print(table_of(rows, left=("task", "where", "machines")))
    total = hourly(prices)
    if total is not None:
        until = (
            f"; {wanted.budget:,.0f} USD last {wanted.budget / total:.3g} hours" if wanted.budget and total else ""
        )
        console.print(f"{total:,.2f} USD an hour{until} (without traffic, disks and SkyPilot's controller)")


def write(folder: Path, run: dict[str, Any], cluster: ClusterConfig, tasks: dict[str, dict[str, Any]]) -> None:
    """Write what the tasks name: run.json, cluster.json, certs/, and the tasks. Raises OutputError,
    CertificateError."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    make_certificates(cluster, folder / "certs")
    raw = cluster.model_dump(by_alias=True, mode="json", exclude_defaults=True)
    for name, content in (("run", run), ("cluster", raw), *((f"tasks/{site}", task) for site, task in tasks.items())):
        write_whole(folder / f"{name}.json", json.dumps(content, indent=2) + "\n")


def start_and_follow(sky: Sky, run: RunConfig, folder: Path, tasks: Mapping[str, Any], console: Console) -> None:
    """Start the tasks, print the global server's log until the run is over, tear all down. A signal during the start
    tears all down as well; later the machines go on. Raises SkyError."""
    sites, top = list(tasks), task_name(run, GLOBAL)
    files = {site: str(folder / "tasks" / f"{site}.json") for site in sites}
    secrets = [word for name in tasks[GLOBAL].get("secrets", ()) for word in ("--secret", name)]
    try:
        sky.need("launch", "-y", "-d", "-c", top, *secrets, files[GLOBAL], within_s=START_S)
        address = sky.need("status", "--ip", top).splitlines()[-1].strip()
        console.print(f"{top} is at {address}")
        for site in sites[1:]:
            name = task_name(run, site)
            sky.need("jobs", "launch", "-y", "-d", "-n", name, "--env", f"GEOTRAIN_GLOBAL={address}", files[site])
            console.print(f"{name} is asked for; SkyPilot starts it, and again when its machines are taken back")
    except BaseException:
        tear_down(sky, run, folder, sites, console)
        raise
    try:
        code = follow(sky, top)
    except (KeyboardInterrupt, SystemExit):
        console.print(f"\nthe machines go on: `sky logs {top}` shows the run, `geotrain up RUN --down` ends them")
        return
    if code not in ENDED:
        raise SkyError(
            f"sky logs {top} ends with {code}, {TRIES} times: the machines go on; `geotrain up RUN --down`"
        )
    console.print(f"{top} {ENDED[code]}")
    tear_down(sky, run, folder, sites if code == 0 else sites[1:], console)  # what it holds may not be exported
    if code:
        raise SkyError(
            f"{top} {ENDED[code]}: its machine stays for {IDLE_MINUTES} minutes (`sky logs {top}`, `ssh {top}`), "
            "then or by `geotrain up RUN --down` it ends"
        )


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Make the first SIGTERM or SIGHUP in the block a SystemExit; further ones do not disturb what that begins."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]  # as under nohup

    def end(number: int, _: object) -> None:
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    try:
        for each in caught:
            signal.signal(each, end)
        yield
    finally:
        for each in caught:
            signal.signal(each, before[each])


def follow(sky: Sky, cluster: str) -> int:
    """Print the log of a cluster's job until that has ended; returns the exit code of `sky logs`."""
    for attempt in range(TRIES):
        code, _ = sky.run("logs", cluster, shown=True, within_s=FOLLOW_S)
        if code in ENDED:
            break
        time.sleep(PAUSE_S if attempt else 1.0)
    return code


def tear_down(sky: Sky, run: RunConfig, folder: Path, sites: Sequence[str], console: Console) -> list[str]:
    """End all tasks of the run; returns the names of those that SkyPilot could not end, and keeps the tasks' files
    while there are any."""
    left = []
    for site in sites:
        name = task_name(run, site)
        words = ("down", "-y", name) if site == GLOBAL else ("jobs", "cancel", "-y", "-n", name)
        try:
            code, said = sky.run(*words)
        except SkyError as error:
            code, said = 1, str(error)
        left += [name] * bool(code)
        console.print(f"sky {' '.join(words)}: {said if code else 'done'}", highlight=False, soft_wrap=True)
    if not left and GLOBAL in sites:
        shutil.rmtree(folder / "tasks")
    return left
