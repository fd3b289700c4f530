"""Plays scenarios: a text of commands, a line each, then `----`, then all that came of them.

A file begins with comments that tell its story, one of which says over which transports it is played:

    # transports: memory, sockets

The same lines come out of each. Of a file for `messages` (in memory, too) they are all messages between servers, in
the order in which they were handled; of others, what members are told, and then each server's events. Commands are
the methods `do_…` of `Scenario`. `pytest --rewrite tests/scenarios` writes what comes of them now, and a person reads
the difference.
"""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from geotrain.common.names import GLOBAL
from geotrain.config import LimitsConfig, codec_config
from geotrain.config.outer import OverlapConfig
from geotrain.net.server.server_thread import FULL_RETRY_S
from geotrain.outer.messages import (
    AnswersDue,
    Finished,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    Message,
    OperatorCommand,
    Refused,
    RunComplete,
    SkipSamples,
    UpdatePart,
    Welcome,
)
from geotrain.outer.server.server import Handled
from tests.support.net_worlds import outer
from tests.support.scenario_words import event_text, message_text, refusal_text, reply_text, state_text
from tests.support.scenario_worlds import InMemory, OverSockets, Plan, World

WORLDS: dict[str, Callable[..., World]] = {"sockets": OverSockets}
TRANSPORTS = re.compile(r"^# transports: (.*)$", re.MULTILINE)
LIMITS = "strikes", "strike_window", "norm_deviations", "norm_free_updates", "quarantine_s"


class Scenario:
    """Runs the commands of one file over one transport. A command `x` is the method `do_x`, which writes lines."""

    world: Any  # a `World`: some commands use what only one of its kinds has

    def __init__(self, transport: str, folder: Path) -> None:
        self.transport, self.folder, self.lines = transport, folder, list[str]()
        self.lives: defaultdict[str, int] = defaultdict(lambda: 1)
        self.leases: defaultdict[str, dict[int, int]] = defaultdict(dict)  # worker → job → lease in hand
        self.parts: dict[str, list[UpdatePart]] = {}  # worker → its last update

    # -- the world

    def do_world(
        self,
        *regions: str,
        samples: int = 48,
        fragments: bool = False,
        rule: str = "halos",
        levels: int = 2,
        **settings: Any,
    ):
        """Begin a run: `world eu:a/2,b us:c` has two regions and three workers, of which a has two ranks; all have
        joined. fragments: one a layer. Other settings go into the outer block; with levels=1, in memory only, workers
        are the global server's own members."""
        named = (region.partition(":") for region in regions)
        plan = {name: {w.partition("/")[0]: 1 + ("/" in w) for w in workers.split(",")} for name, _, workers in named}
        for link in {"up", "down", "local"} & set(settings):
            settings[link] = codec_config(settings[link])
        if limits := {key: settings.pop(key) for key in LIMITS if key in settings}:
            settings["limits"] = LimitsConfig(**limits)
        if not fragments:
            settings["fragments"] = {}
        if settings.get("answers") == "wait":
            settings["overlap"] = OverlapConfig(steps=1, adopt="rebase")
        # Not validated: a flat run has no use for most of these settings.
        config = outer(rule, **settings).model_copy(update={"levels": levels})
        told, folder = Plan(plan, config, samples), self.folder / "world"
        if hasattr(self, "world"):  # another story of this file
            self.world.close()
            shutil.rmtree(folder)
        folder.mkdir()
        self.lives.clear(), self.leases.clear(), self.parts.clear()
        self.local, _ = told.outer.worker_codecs
        if self.transport in WORLDS:
            self.world: Any = WORLDS[self.transport](told, folder)
            for worker in self.world.workers:
                self.joins(worker)
            self.world.rest()
        else:
            self.world = InMemory(told, folder, lambda *_: None)
            self.world.told = self.watch if self.transport == "messages" else self.world.told
        self.servers = (*(() if told.outer.flat else plan), GLOBAL)
        for server in self.servers:
            self.world.new_events(server)
        self.lines.clear()

    # -- what members say

    def do_new(self, worker: str) -> None:
        """Have a new incarnation of the worker join, with all its ranks."""
        self.lives[worker] += 1
        self.leases.pop(worker, None)
        self.joins(worker)

    def do_join(self, worker: str, life: int = 0, part: int = -1, **changes: Any) -> None:
        """Have the worker join. life: as which of its incarnations; 0: its present one. part: only this rank.
        changes: other fields."""
        self.joins(worker, life, part, **changes)

    def do_lease(self, worker: str, job: int = 0, step_s: float = 0.0) -> None:
        """Ask for a lease. job: for which of the worker's jobs; 0: its next, which is the one after a job without
        data. step_s: of its inner steps, as it says."""
        fake = self.world.workers[worker][1]
        request = LeaseRequest(worker, job or fake.job + 1, step_s)
        try:
            reply = self.world.lease(worker, self.incarnation(worker), request)
        except Refused as refused:
            self.lines.append(f"{worker}: {message_text(request)} → {refusal_text(refused)}")
            return None
        if isinstance(reply, Lease):
            self.leases[worker][reply.job] = reply.lease
        elif isinstance(reply, Finished) and not job:
            fake.job = reply.job
        return self.say(f"{worker}: {message_text(request)}", reply_text(reply))

    def do_push(
        self, worker: str, fragments: str = "", version: int | None = None, part: int = -1, life: int = 0,
        scale: float = 1.0, **changes: Any,
    ) -> None:  # fmt: skip
        """Send the worker's next update of each of these fragments, or of all. They contain the job's lease; the job
        ends with the last fragment. version: of its anchor; None: the newest. part: only this rank sends its part,
        and the updates stay the next. changes: other fields."""
        region, fake = self.world.workers[worker]
        every = tuple(range(len(self.world.parameter_map.fragments)))
        chosen = tuple(map(int, str(fragments).split(","))) if fragments != "" else every
        ends_job, job = every[-1] in chosen, fake.job + 1
        before = list(fake.sequences)
        generator = torch.Generator().manual_seed(sum(before) + 1)
        numels = {f: self.world.parameter_map.fragments[f].numel for f in chosen}
        deltas = {f: scale * torch.randn(numel, generator=generator) / 10 for f, numel in numels.items()}
        lease = self.leases[worker].get(job)
        newest = self.world.status(region)["versions"]
        anchor = min([newest[f] for f in chosen] if newest else [0]) if version is None else version
        parts = fake.parts(deltas, (lease,) if lease else (), self.incarnation(worker, life), anchor, self.local)
        if "contains" in changes:  # one
            changes["contains"] = (changes["contains"],)
        self.parts[worker] = [replace(each, **changes) for each in parts]
        taken = self.says_parts(worker, part)
        if part >= 0 or not taken:
            fake.sequences, fake.job = before, job - 1
        elif ends_job:
            self.leases[worker].pop(job, None)
        else:
            fake.job = job - 1

    def do_repeat(self, worker: str, part: int = -1) -> None:
        """Send the worker's last update once more, bit for bit."""
        self.says_parts(worker, part)

    def says_parts(self, worker: str, part: int) -> bool:
        region, taken = self.world.workers[worker][0], []
        for each in self.parts[worker]:
            if part in (-1, each.part):
                taken.append(self.call(region, each) is not None)
                self.world.rest()  # what came of one fragment, before the next
        return all(taken)

    def do_pull(self, worker: str, update: int = -1) -> None:
        """Pull the answers to the worker's last updates, by all its ranks. update: to that one of each fragment that
        was sent last; 0: to the join, of all fragments."""
        fake, fragments = self.world.workers[worker][1], range(len(self.world.parameter_map.fragments))
        if update and worker in self.parts:
            fragments = dict.fromkeys(part.fragment for part in self.parts[worker])
        for part in range(len(fake.slicings)):
            for fragment in fragments:
                sequence = fake.sequences[fragment] if update < 0 else update
                try:
                    text = reply_text(self.world.pull(worker, self.incarnation(worker), part, fragment, sequence))
                except Refused as refused:
                    text = refusal_text(refused)
                self.say(f"{worker}, rank {part}, pulls", text)

    def do_train(self, worker: str, jobs: int = 1) -> None:
        """Train so many jobs: a lease, an update of all fragments, its answer."""
        for _ in range(jobs):
            self.do_lease(worker)
            self.do_push(worker)
            self.world.rest()
            self.do_pull(worker)

    def do_leave(self, member: str) -> None:
        self.call(self.world.workers.get(member, (GLOBAL,))[0], Leave(member))

    # -- what happens to them

    def do_restart(self, *servers: str) -> None:
        """Kill servers without a word, and start them again from their folders. Workers have to join again."""
        for server in servers:
            self.world.restart(server)
            self.world.rest()

    def do_copy(self, server: str) -> None:
        """Back up the server's folder."""
        self.world.restart(server, lambda folder: shutil.copytree(folder, self.folder / f"copy of {server}"))

    def do_restore(self, server: str) -> None:
        """Lose the server's disk, and bring it back from the backup."""

        def restore(folder: Path) -> None:
            shutil.rmtree(folder)
            shutil.copytree(self.folder / f"copy of {server}", folder)

        self.world.restart(server, restore)

    def do_rot(self, server: str, tensor: str) -> None:
        """Flip the last bit of this tensor in the server's newest snapshot, while it is down."""

        def flip(folder: Path) -> None:
            file = max((folder / "snapshots").iterdir()) / f"{tensor}.safetensors"
            content = file.read_bytes()
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

        self.world.restart(server, flip)
        self.world.rest()

    def do_lose(self, server: str) -> None:
        """Lose the server's disk."""
        self.world.restart(server, shutil.rmtree)

    def do_fill(self, server: str, after: int = 0) -> None:
        """Fill the server's disk when it has taken so many more messages of its members. In memory only."""
        tell, room = self.world.tell, count(after, -1)

        def told(to: str, message: Message) -> Any:
            if to != server or next(room) > 0:
                return tell(to, message)
            raise Refused("the server's disk is full", FULL_RETRY_S)

        self.world.tell = told

    def do_free(self) -> None:
        """Make room on the disk again."""
        del self.world.tell

    def do_snapshot(self, *servers: str) -> None:
        for server in servers:
            self.world.snapshot(server)

    def do_silent(self, member: str) -> None:
        """Tell the member's server that nothing was heard of it for too long."""
        worker = member in self.world.workers
        server = self.world.workers[member][0] if worker else GLOBAL
        life = self.incarnation(member) if worker else self.world.servers(member).incarnation
        self.call(server, MemberSilent(member, life))

    def do_needs(self, region: str, seconds: float) -> None:
        """Have the region need the answers to its updates in so many seconds. In memory only."""
        self.world.needs[region] = float(seconds)

    def do_due(self, server: str, *members: str) -> None:
        """Tell a server that these members' answers for the first fragment are due."""
        self.call(server, AnswersDue(members, 0))

    def do_passes(self, seconds: str, *heard: str, at: str = "", late: float = 0.0) -> None:
        """Let seconds pass by the clock of a server's failure detector, which then looks. heard: whom it has heard of
        at their end, as a or a/1, its second rank. at: which server; "": the first region's. late: for how long it
        stood still itself. Over sockets only."""
        ranks = [(name, int(rank or 0)) for name, _, rank in (word.partition("/") for word in heard)]
        self.world.passes(at or self.servers[0], float(seconds), ranks, late)

    def do_states(self, server: str) -> None:
        """Show what its server makes of each member, by when it heard of it last."""
        members = self.world.status(server)["members"].items()
        self.lines.append(f"{server}: " + ", ".join(f"{name} is {facts['state']}" for name, facts in members))

    def do_refuse(self, region: str) -> None:
        """Have the global server refuse the region's next update for good."""
        self.world.refuse(region)

    def do_answers(self, member: str) -> None:
        """Show which of the member's updates its server can still answer."""
        server = self.world.workers[member][0] if member in self.world.workers else GLOBAL
        self.lines.append(f"{server} keeps answers for {member}: {sorted(self.world.answers(server, member))}")

    def do_leases(self, region: str) -> None:
        """Show for which jobs of its workers the region has leases."""
        held = self.world.servers(region).worker_data.leases.held
        self.lines.append(f"{region} holds leases of jobs { ({name: sorted(of) for name, of in held.items()}) }")

    # -- the link between a region and the global server

    def do_cut(self, region: str) -> None:
        """Cut the link between a region and the global server."""
        self.world.held.add(region)

    def do_mend(self, region: str) -> None:
        """Mend the link: what waited is delivered."""
        self.world.held.remove(region)

    def do_deliver(self, region: str, count: int = 1) -> None:
        """Deliver so many messages of a region whose link is cut."""
        for _ in range(count):
            self.world.deliver(region)

    # -- the operator

    def do_operator(self, what: str, region: str = "", at: str = GLOBAL) -> None:
        self.call(at, OperatorCommand(what, region))

    def do_set(self, key: str, value: str, at: str = GLOBAL) -> None:
        self.call(at, OperatorCommand(f"set {key}={value}"))

    def do_complete(self) -> None:
        """Have the global server's process end the run, as it does at its very end."""
        self.call(GLOBAL, RunComplete())

    def do_skip(self, first: str, last: str) -> None:
        """Have the run file say that these samples are not to be trained."""
        self.call(GLOBAL, SkipSamples((int(first),), (int(last),)))

    def do_unban(self, worker: str, at: str = "") -> None:
        self.call(at or self.world.workers[worker][0], LiftQuarantine(worker))

    def do_show(self, *servers: str) -> None:
        for server in servers or self.servers:
            self.lines += state_text(server, self.world.status(server))

    def do_waits(self, *servers: str) -> None:
        """Show what servers wait for, while everybody who joined is heard of."""
        for server in servers or self.servers:
            for wait in sorted(self.world.waits(server), key=lambda wait: wait["whom"]):
                self.lines.append(f"{server} waits for {wait['whom'] + ': ' if wait['whom'] else ''}{wait['text']}")

    # -- inside

    def incarnation(self, worker: str, life: int = 0) -> str:
        return f"life-{life or self.lives[worker]}"

    def joins(self, worker: str, life: int = 0, part: int = -1, **changes: Any) -> None:
        region, fake = self.world.workers[worker]
        for join in fake.joins(self.world.identity, self.incarnation(worker, life)):
            if part in (-1, join.part):
                reply = self.call(region, replace(join, **changes))
                if isinstance(reply, Welcome):
                    fake.sequences, fake.job = [sequence - 1 for sequence in reply.sequences], reply.job - 1

    def call(self, server: str, message: Any) -> Any:
        try:
            reply = self.world.tell(server, message)
        except Refused as refused:
            self.say(f"to {server}: {message_text(message)}", refusal_text(refused))
            return None
        self.say(f"to {server}: {message_text(message)}", reply_text(reply) if reply is not None else "")
        return reply

    def say(self, what: str, reply: str) -> None:
        """Write a member's call and its reply, unless all messages are written and it is among them."""
        if self.transport != "messages" or "pulls" in what:
            self.lines.append(what + (f" → {reply}" if reply else ""))

    def watch(self, server: str, message: Any, outcome: Handled | Refused | None) -> None:
        if outcome is None:
            self.lines.append(f"→ {server}: {message_text(message)}")
        elif isinstance(outcome, Refused):
            self.lines.append(f"  {refusal_text(outcome)}")
        else:
            events = (event_text(type(event).__name__, vars(event)) for event in outcome.events)
            self.lines += [f"  {text}" for text in events if text]
            self.lines += [f"  tells {send.to}: {message_text(send.message)}" for send in outcome.sends]
            if outcome.reply is not None:
                self.lines.append(f"  replies: {reply_text(outcome.reply)}")

    def finish_command(self) -> None:
        """Let all arrive that the command set off; then write what happened, server by server."""
        self.world.rest()
        if self.transport != "messages":
            for server in self.servers:
                told = (event_text(*event) for event in self.world.new_events(server))
                self.lines += [f"  {server}: {text}" for text in told if text]

    def play(self, line: str) -> None:
        name, *words = line.split()
        options = dict(word.split("=") for word in words if "=" in word)
        getattr(self, f"do_{name}")(*(w for w in words if "=" not in w), **{k: value(v) for k, v in options.items()})
        self.finish_command()


def value(word: str) -> Any:
    """Read a word of a command: a number, on, off, none, or the word itself."""
    named = {"on": True, "off": False, "none": None}
    if word in named:
        return named[word]
    try:
        return int(word)
    except ValueError:
        try:
            return float(word)
        except ValueError:
            return word


def transports_of(text: str) -> list[str]:
    return TRANSPORTS.findall(text)[0].split(", ")


def blocks(text: str) -> Iterator[tuple[list[str], list[str]]]:
    """Return the comments and the commands of each block."""
    for block in text.strip().split("\n\n"):
        lines = block.partition("\n----")[0].splitlines()
        yield [x for x in lines if x.startswith("#")], [x for x in lines if x and not x.startswith("#")]


def played(text: str, transport: str, folder: Path) -> str:
    """Play the file; returns it with what comes of its commands now."""
    scenario, out = Scenario(transport, folder), list[str]()
    try:
        for comments, commands in blocks(text):
            scenario.lines = []
            for line in commands:
                scenario.play(line)
            result = ["----", *(scenario.lines or ["ok"])] if commands else []
            out.append("\n".join([*comments, *commands, *result]))
    finally:
        if hasattr(scenario, "world"):
            scenario.world.close()
    return "\n\n".join(out) + "\n"
