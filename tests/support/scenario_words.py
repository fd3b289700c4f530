"""Renders messages, events and states as lines of a scenario."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from geotrain.outer.messages import (
    Answer,
    AnswersDue,
    AnswerWanted,
    Finished,
    Join,
    Lease,
    LeaseRequest,
    Leave,
    LiftQuarantine,
    MemberSilent,
    NotJoined,
    OperatorCommand,
    Recall,
    Refused,
    Release,
    RunComplete,
    SkipSamples,
    TakeBack,
    TakenBack,
    Trained,
    UpdatePart,
    UpdateRejected,
    Validated,
    Welcome,
)


def number(message: Any) -> str:
    """The number of an update, as `update_id` has it."""
    return f"{message.fragment}.{message.sequence}"


def message_text(message: Any) -> str:
    match message:
        case UpdatePart(deltas=deltas):
            rank = f", rank {message.part}" if message.part else ""
            leases = f", contains leases {list(message.contains)}" if message.contains else ""
            needed = f", needed in {message.need_s:g} s" if message.need_s else ""
            about = f"from version {deltas[0].anchor_version}{leases}{needed}"
            return f"{message.member}'s update {number(message)}{rank}, {about}"
        case LeaseRequest():
            return f"{message.worker} asks for the lease of job {message.job}"
        case Lease():
            samples = f"samples {message.start} to {message.start + message.samples}"
            task = f", and validation {message.validate}" if message.validate else ""
            return f"lease {message.lease}, {samples}, for {message.worker}'s job {message.job}{task}"
        case Finished():
            return f"{message.worker} is finished, from job {message.job}"
        case Welcome():
            gone = f"; others have leases {list(message.gone)}" if message.gone else ""
            updates = [f"{fragment}.{sequence}" for fragment, sequence in enumerate(message.sequences)]
            return f"welcome, updates {', '.join(updates)} and job {message.job} are next{gone}"
        case Join():
            held = f", answers for leases {list(message.leases)}" if message.leases else ""
            return f"{message.member} joins, rank {message.part} of {message.parts}{held}"
        case Answer():
            versions = ", ".join(map(str, sorted({weights.version for weights in message.weights})))
            what = "changes of the weights" if any(each.increment for each in message.weights) else "weights"
            return f"answer to update {number(message)}, {what} of version {versions or 'none'}"
        case AnswerWanted():
            return f"{message.member} wants the answer to update {number(message)}"
        case Release() | Trained():
            what = "gives back"
            if isinstance(message, Trained):
                what = f"has trained, without an update, as far as fragment {message.fragment} goes,"
            what += ", failed," if isinstance(message, Release) and message.failed else ""
            return f"{what} leases {sorted(message.leases)}"
        case TakeBack():
            return f"asks for leases {sorted(message.leases)} of {message.worker} again"
        case TakenBack():
            gone = f"; others have leases {list(message.gone)}" if message.gone else ""
            return f"{message.worker} has leases {list(message.leases)} again{gone}"
        case Leave():
            return f"{message.member} leaves"
        case MemberSilent():
            return f"{message.member} was silent for too long"
        case AnswersDue():
            return f"answers to {', '.join(message.members)} for fragment {message.fragment} are due"
        case OperatorCommand():
            return f"the operator: {message.what} {message.region}".rstrip()
        case UpdateRejected():
            return f"update {number(message)} of {message.member} was refused for good: {message.reason}"
        case LiftQuarantine():
            return f"{message.member} is unbanned"
        case Recall():
            return "the run is paused, or the region is to leave"
        case RunComplete():
            return "the run is complete"
        case SkipSamples():
            return f"samples {[*zip(message.firsts, message.lasts, strict=True)]} are to be skipped"
        case Validated():
            return f"{message.worker} has validated {message.number}: loss {message.loss:g}"
    return type(message).__name__


def refusal_text(refused: Refused) -> str:
    again = "for good" if refused.retry_s is None else f"for {refused.retry_s:g} s"
    kind = "NotJoined" if isinstance(refused, NotJoined) else "refused"
    return f"{kind} {again}: {refused.reason}"


def reply_text(reply: Any) -> str:
    if isinstance(reply, bool):
        return "applied" if reply else "taken"
    return "nothing yet" if reply is None else str(reply) if isinstance(reply, str | int) else message_text(reply)


def event_text(kind: str, event: dict[str, Any]) -> str | None:
    """Render an event, or return None for one that a scenario leaves out. event: its fields."""
    member = event.get("member", "")
    match kind:
        case "UpdateApplied":
            what = f"{member}'s update {event['fragment']}.{event['sequence']} applied: versions {event['versions']}"
            return f"{what}, staleness {event['staleness']}, {event['samples']} samples"
        case "SentUp":
            return f"update {event['fragment']}.{event['sequence']} sent up: weight {event['weight']}"
        case "Merged":
            update, versions = f"{event['fragment']}.{event['sequence']}", event["global_versions"]
            return f"merged with the global weights after update {update}: versions {versions}"
        case "Joined":
            return f"{member} joined, rank {event['part']}, {'a new' if event['new'] else 'the same'} incarnation"
        case "StartedOver":
            return f"started over from the global weights, without {event['dropped']} updates: {event['reason']}"
        case "TrainedTwice":
            return f"others, too, have trained leases {event['leases']}, which count once"
        case "UpdateRefused":
            return f"refused {member} an update, strike {event['strikes']}: {event['reason']}"
        case "SetAside":
            return f"set aside samples {event['first']} to {event['last']}"
        case "Quarantined":
            return f"quarantined {member}: {event['reason']}"
        case "Steered":
            return f"steered: {event['what']} {event['region']}".rstrip()
        case "ValidationDone":
            return f"validation {event['number']} by {event['worker']}: loss {event['loss']:g}"
        case "UpdateStage" if event["stage"] == "waits":
            return f"{event['update']} waits for the deltas of others"
        case "SentWhole" | "Left" | "Unbanned":
            return f"{member}: {kind}"
    return None


def state_text(name: str, status: dict[str, Any]) -> Iterator[str]:
    """Render what a server's status says: a line or two for it, and one for each member."""
    if "phase" in status:
        draining = f", draining {status['draining']}" if status["draining"] else ""
        yield f"{name}: {status['phase']}{draining}, versions {status['versions']}"
        counts = "{committed_samples} of {train_samples} samples committed"
        aside = f", set aside {status['set_aside']}" if status["set_aside"] else ""
        yield f"  {counts.format(**status)}, {status['open_leases']} leases open{aside}"
    else:
        sent = "{in_flight} in flight, {pending} pending, {lost_updates} lost".format(**status)
        yield f"{name}: versions {status['versions']}, global {status['global_versions']}, updates: {sent}"
    for member, facts in status["members"].items():
        is_now = [what for what in ("joined", "left", "quarantined") if facts[what]] or ["away"]
        counts = [f"{n} {what}" for what in ("updates", "restarts", "refused") if (n := facts[what])]
        yield f"  {member}: {', '.join([*is_now, *counts])}"
