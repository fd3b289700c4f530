"""What the recorded life of a run (`tests.support.recorded_life`) said and left, each part for itself."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from geotrain.commands.evaluate import evaluate
from geotrain.commands.logs import trace_update
from geotrain.commands.operate import RunState
from geotrain.commands.quickstart import PROMPTS
from tests.chaos.faults.audit import accounts
from tests.chaos.faults.scenario import PACKETS
from tests.support.recorded_life import BAD_RECORD, BATCH, CONFIGS, ENOUGH, RECORDED, STEPS, Life, in_wheel, played
from tests.support.small_runs import losses

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1800)]
WORKERS = "eu-0", "us-0"


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    return played(tmp_path_factory.mktemp("life"))


@pytest.fixture(scope="module")
def audit(life: Life) -> dict[str, Any]:
    """The accounts of the run, after an acknowledgement was added to a worker's events that no server gave."""
    life.run.noted = {"end_s": max(e["time_s"] for e in life.run.events("launcher"))}
    told = [e for e in life.run.events("us-0") if e["event"] == "Acknowledged"][-1]
    with (life.run.folder / "events/us-0.jsonl").open("a") as log:
        log.write(json.dumps({**told, "sequence": told["sequence"] + 1000}) + "\n")
    return accounts(life.run)


def summary(life: Life) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((life.run.folder / "summary.json").read_text())
    return found


def test_all_code_and_configurations_are_the_wheels(life: Life) -> None:
    where = "import geotrain, geotrain.kernels.cpu as cpu; print(geotrain.__file__, cpu.library() is not None)"
    assert in_wheel(life, "-c", where).stdout.split() == [str(life.site / "geotrain/__init__.py"), "True"]
    assert in_wheel(life, "-m", "geotrain", "configs", "mine").stdout == "mine\n"
    shipped = [path for path in CONFIGS.rglob("*.*") if "schema" not in path.parts]
    assert len(shipped) > 20
    for path in shipped:
        assert (life.folder / "mine" / path.relative_to(CONFIGS)).read_bytes() == path.read_bytes()
    assert "mine is there already" in life.say("configs again", "configs", "mine").stderr


def test_every_rank_has_the_environment_of_its_worker(life: Life) -> None:
    assert sorted(ranks["LOCAL_RANK"] for ranks in life.ranks) == ["0", "1"]
    for ranks in life.ranks:
        assert (ranks["WORLD_SIZE"], ranks["NOTE"], ranks["OMP_NUM_THREADS"]) == ("2", "two words", "1")


# -- faults


def test_nothing_acknowledged_was_lost_or_applied_twice(audit: dict[str, Any]) -> None:
    assert audit["acknowledged_updates"] > 10 and audit["snapshots_compared"] >= 2 and audit["server_deaths"] >= 1
    assert audit["shards"]["processes"] == 2 and audit["shards"]["recoveries_compared"] >= 1
    for figure in ("applied_twice", "replay_mismatches", "samples_skipped", "samples_twice_uncounted"):
        assert audit[figure] == 0, (figure, *audit["mismatches"])
    assert audit["lost_acknowledged"] == 1  # the false one


def test_what_was_killed_was_started_again(life: Life) -> None:
    events = life.run.events("launcher")
    died = [e["group"] for e in events if e["event"] == "ProcessDied"]
    assert {group: died.count(group) for group in died} == {"eu": 1, "us-0": 1, "eu.shard-0": 1}
    assert all(e["pause_s"] is not None for e in events if e["event"] == "ProcessDied")
    assert "us-0 failed with exit code" in life.output["stopped"] and "started again in" in life.output["stopped"]
    assert life.seen["disturbed"].statuses["us"]["members"]["us-0"]["restarts"] == 1


def test_the_way_of_an_update_is_followed_through_all_servers(life: Life) -> None:
    sent = [e for e in life.run.events("us-0") if e["event"] == "UpdateEncoded"][3]
    found = trace_update(life.run.folder, sent["update"])
    assert found.held == [] and [step.time_s for step in found.steps] == sorted(step.time_s for step in found.steps)
    told = [(step.where, step.what.partition(" us")[0]) for step in found.steps]
    for where, what in (
        *(("us-0", "encoded: "), ("us-0", "sending begins"), ("us", "first part arrived (us-0/")),
        *(("us", "journaled and applied"), ("us", "sent up as"), ("global", "journaled and applied")),
        *(("us", "merged the answer to"), ("us-0", "answer adopted")),
    ):
        assert any(place == where and said.startswith(what) for place, said in told), (where, what, told)


def test_damaged_packets_came_through_as_none(life: Life) -> None:
    packets = life.run.impaired_packets()
    assert packets.keys() == {*PACKETS, "repaired"} and min(packets.values()) > 0, packets
    logs = "".join((life.run.folder / f"logs/{server}.log").read_text() for server in ("global", "eu"))
    assert BAD_RECORD in logs


def test_no_process_outlived_a_launcher(life: Life) -> None:
    assert life.left == []


# -- an operator's commands


def test_the_status_of_a_run_that_trains(life: Life) -> None:
    once = life.said["status while it trains"]
    assert once.returncode == RunState.RUNNING
    assert "quickstart-moe: running; " in once.stdout and "tokens/s" in once.stdout


def test_page_and_metrics_tell_of_every_region(life: Life) -> None:
    page, told = life.page, life.seen["disturbed"].statuses
    assert [member["name"] for member in page["members"]] == ["eu", "us"]
    assert page["phase"] == "running" and page["tokens"] > 0 and page["points"] and len(page["shards"]) == 1
    assert "eu" in {member for _, _, _, member, _ in page["marks"]}
    measured = [line for line in life.metrics.splitlines() if line.startswith("geotrain_")]
    for region in ("eu", "us"):
        assert any(f'"{region}"' in line for line in measured), region
        assert told[region]["metrics"].endswith("/metrics")


def test_servers_measure_what_their_events_promise(life: Life) -> None:
    for which, member in (("global", "eu"), ("eu", "eu-0")):
        events = life.run.events(which)
        updates = [e for e in events if e["event"] == "UpdateApplied" and e["member"] == member]
        for event in updates:
            assert (event["tokens"] is not None) == (which == "global")
        assert max(event["delta_norm"] for event in updates) > 0
        heard = [e for e in events if e["event"] == "MemberSampled" and e["member"] == member]
        assert max(e["received_bytes"] for e in heard) > 0 and max(e["received_bytes_per_s"] for e in heard) > 0
        servers = [e for e in events if e["event"] == "ServerSampled"]
        assert all(e["rss_bytes"] > 1e7 and e["disk_free_bytes"] > 0 for e in servers)
        assert sum(e["journal_flushes"] for e in servers) > 0 and max(e["calls"] for e in servers) > 0
    said = set().union(*(e["metrics"] for e in life.run.events("global") if e["event"] == "MemberSampled"))
    assert said >= {"workers", "in_flight", "retries", "rss_bytes"}, "a region's heartbeats bring them"


def test_there_is_one_launcher_of_a_run(life: Life) -> None:
    beside = life.said["launch beside it"]
    assert beside.returncode == 2 and "this run is running already" in beside.stderr


def test_only_members_are_unbanned(life: Life) -> None:
    for member in ("eu-0", "us"):
        assert life.said[f"unban {member}"].stdout == f"{member}: unbanned\n", life.said[f"unban {member}"].stderr
    nobody = life.said["unban x"]
    assert nobody.returncode == 2
    assert "'x' is no worker or region of this run; there are eu, eu-0" in nobody.stderr


def test_each_rank_of_a_worker_records_its_steps(life: Life) -> None:
    assert life.said["profile us-0"].returncode == 0, life.said["profile us-0"].stderr
    assert "'us' is no worker" in life.said["profile us"].stderr
    recorded = [e for e in life.run.events("us-0") if e["event"] == "Profiled"]
    assert sorted(e["rank"] for e in recorded) == [0, 1] and {e["steps"] for e in recorded} == {RECORDED}
    for event in recorded:
        trace = json.loads(gzip.decompress(Path(event["path"]).read_bytes()))["traceEvents"]
        marks = Counter(e["name"] for e in trace if "dur" in e)
        assert marks["geotrain.step"] == RECORDED and marks["geotrain.encode"] >= 1 and marks["aten::mm"] > RECORDED


def test_a_paused_run_rests_until_it_is_resumed(life: Life) -> None:
    assert life.said["pause"].stdout == "paused\n"
    assert life.seen["paused"].headline.startswith("paused; ")
    assert "paused; " in life.said["status while it is paused"].stdout
    assert life.said["resume"].stdout == "running\n"


def test_a_snapshot_is_written_where_it_says(life: Life) -> None:
    written = life.said["snapshot"]
    assert written.returncode == 0, written.stdout + written.stderr
    places = dict(line.split(": ", 1) for line in written.stdout.splitlines())
    assert set(places) == {"global", "eu", "us"}
    for place in places.values():  # older ones are dropped meanwhile, but kept in the archive
        name = Path(place.partition(":")[2])
        assert (life.folder / "archive" / name.parts[-3] / "snapshots" / name.name / "meta.json").exists()


def test_a_drained_region_leaves_the_others_alone(life: Life) -> None:
    drained = life.said["drain"]
    assert drained.returncode == 0 and "draining" not in drained.stdout, drained.stderr
    assert all(member["left"] for member in life.seen["drained"].statuses["us"]["members"].values())
    assert life.seen["drained"].state is RunState.RUNNING


def test_a_stopped_run_keeps_what_it_trained(life: Life) -> None:
    stopped, last = life.said["stop"], life.seen["stopped"]
    assert stopped.returncode == 0 and "stopped; " in stopped.stdout, stopped.stderr
    told = "% of the data is trained, and kept; the run goes on with: geotrain launch "
    assert told in life.output["stopped"]
    top = last.statuses["global"]
    assert last.state is RunState.STOPPED and 0 < top["committed_samples"] < ENOUGH and top["open_leases"] == 0
    again = life.said["stop again"]
    assert again.returncode == 2 and "--resume" in again.stderr, again.stderr
    assert "the run is not on, nothing was done: stopped; " in again.stderr
    again = life.said["launch again"]
    assert again.returncode == 2 and "holds a run already: continue it with --resume" in again.stderr


def test_a_resume_without_a_workers_state_does_not_go_by_unseen(life: Life) -> None:
    refused = life.said["resume without a worker's state"]
    assert refused.returncode == 2 and "worker 'eu-0' has trained" in refused.stderr
    assert "or go on with --without-checkpoints" in refused.stderr
    assert re.search(r"us-0: \S+/job-\d+: passed over: damaged manifest.json", life.output["finished"])


def test_what_the_operator_did_is_in_the_events(life: Life) -> None:
    steered = [event["what"] for event in life.run.events("global") if event["event"] == "Steered"]
    assert steered == ["pause", "resume", "drain", "stop"]


# -- the end


def test_the_resumed_run_trains_all_its_data(life: Life) -> None:
    last = json.loads(life.said["status"].stdout)
    top = last["servers"]["global"]
    assert (life.said["status"].returncode, last["state"]) == (RunState.FINISHED, "finished")
    assert top["committed_samples"] == top["train_samples"] and top["complete"] and top["open_leases"] == 0
    assert 0 < top["effective"] <= 1
    before = life.seen["stopped"].statuses
    assert top["committed_samples"] >= before["global"]["committed_samples"] + STEPS * BATCH
    for region in ("eu", "us"):  # counted from the run's beginning
        carried = before[region]["links"]["up_bytes"]
        assert last["servers"][region]["links"]["up_bytes"] > carried > 0


def test_a_finished_run_is_left_alone(life: Life) -> None:
    again = life.said["launch a finished run"].stderr
    assert "holds a run that is finished: all its data is trained" in again
    assert "raise data.train_samples and launch with --resume" in again
    again = life.said["resume a finished run"].stdout
    assert "quickstart-moe: is finished" in again and "processes started" not in again
    paused = life.said["pause a finished run"]
    assert paused.returncode == 2 and "nothing was done: finished; 100.0% committed" in paused.stderr


def test_it_learns(life: Life) -> None:
    jobs = losses(life.folder / "run.json")
    assert {worker for worker, _ in jobs} == {*WORKERS}
    for worker in WORKERS:
        mine = [loss for (name, _), loss in sorted(jobs.items()) if name == worker]
        assert min(mine[len(mine) // 2 :]) < 0.8 * mine[0], worker
    found = summary(life)
    assert found["validation_loss_final"] < 0.8 * found["validation_loss_start"]
    sequence = life.run.run.data.sequence_length
    by_export = evaluate(life.run.folder / "export", life.run.folder / "data/validation", 64, sequence)
    assert found["validation_loss_final"] == pytest.approx(by_export, abs=1e-4)
    validated = life.seen["finished"].statuses["global"]["validation"]  # by a worker, of weights not much older
    assert validated["worker"] in WORKERS and validated["loss"] < 0.8 * found["validation_loss_start"]


def test_the_summary_adds_up(life: Life) -> None:
    found = summary(life)
    samples = life.seen["finished"].statuses["global"]["committed_samples"]
    assert found["tokens"] == life.run.run.data.sequence_length * samples and found["inner_steps"] == samples // BATCH
    assert found["data_parallel_bytes"] == 4 * found["parameters"] * (samples // BATCH // 2)
    assert (found["committed_share"], found["lost_updates"], found["workers"]) == (1.0, 0, 2)
    assert len(set(found["layouts"].values())) == 2
    assert "emulated links carried" in life.output["finished"]
    told = (life.output["stopped"] + life.output["finished"]).splitlines()  # now and then, while it trains
    for region in ("eu", "us"):
        assert any(line.startswith(f"{region}: loss") for line in told)
    for prompt in PROMPTS:
        assert prompt in life.output["finished"].partition("export")[2]


def test_logs_and_checkpoints_are_where_they_belong(life: Life) -> None:
    folder = life.run.folder
    shards = "global.shard-0", "eu.shard-0"
    assert {p.stem for p in (folder / "logs").iterdir()} == {"global", "eu", "us", "wan", *shards, *WORKERS}
    assert ": loss " in (folder / "logs/eu-0.log").read_text()
    assert "us-0: joined" in (folder / "logs/us.log").read_text(), "what happens, in words"
    layouts = {
        path.parts[-3]: json.loads(path.read_text())["layout"].get("expert", 1)
        for path in (folder / "checkpoints").glob("*/*/manifest.json")
    }
    assert layouts == {"eu-0": 1, "us-0": 2}


def test_transformers_loads_the_export(life: Life) -> None:
    model = AutoModelForCausalLM.from_pretrained(life.run.folder / "export", local_files_only=True)
    text = torch.tensor([[1, 2, 3, 4]])
    assert torch.isfinite(model(text).logits).all()
