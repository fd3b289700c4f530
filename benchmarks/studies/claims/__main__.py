"""Measure the claims: every method through the production's state machines, in virtual time.

    python -m benchmarks.studies.claims --search-only  each method's settings, kept in benchmarks/data
    python -m benchmarks.studies.claims                with these, the methods that the figures compare, three seeds
    python -m benchmarks.studies.claims --full         the search, and all methods
    python -m benchmarks.studies.claims --full --trials 0 the same with the settings found before
    python -m benchmarks.studies.claims --methods diloco region-momentum-muon --steps 2048 --seeds 1     a look

Every method is trained with AdamW and with Muon. Rows are kept in the results file (JSON lines) and never run twice:
an interrupted study goes on where it was. The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from benchmarks import DATA, ROOT
from benchmarks.common import command_line, record
from benchmarks.studies.claims.markdown import markdown
from benchmarks.studies.claims.methods import METHODS, muon
from benchmarks.studies.claims.report import plain, plot_curves, replace_block
from benchmarks.studies.claims.runs import Results
from benchmarks.studies.claims.search import TRIALS, TUNED, merge, search, settings_found, with_settings
from benchmarks.studies.claims.study import FULL, GAPS, MINE, NEEDED, REDUCED, TARGET, Plan, Study
from geotrain.common.files import whole_file


def main() -> None:
    arguments = parse_arguments()
    full, methods = arguments.full, tuple(arguments.methods)
    plan = plan_of(arguments)
    tuned = Path(arguments.tuned)
    results = Results(Path(arguments.results))
    if plan.trials:
        lengths = plan.search_steps, plan.trials, plan.steps
        seeds = arguments.final_seeds
        found = search(methods, *lengths, plan.size, lambda jobs: results.complete(jobs, arguments.jobs), seeds)
        merge(tuned, found)
    if arguments.search_only:
        print(json.dumps({m: of["settings"] for m, of in found.items()}))
        return
    study = Study(plan, settings_found(methods, tuned), lambda jobs: results.complete(jobs, arguments.jobs))
    report = study.published()
    report["cpu_s"] = sum(row["cpu_s"] for row in results.rows.values())
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    titles = {m: METHODS[m].title for m in methods}
    text = markdown(report, titles)
    for name, content in (("claims.md", text), ("claims.json", json.dumps(plain(report), indent=1) + "\n")):
        with whole_file(folder / name) as file:
            file.write(content)
    plot_curves(study.rows, titles, report["target_loss"], folder / "evidence.png", "HALoS's environment")
    if arguments.docs:
        picture = "![Test loss over virtual time and over tokens](evidence.png)"
        replace_block(ROOT / "docs/evidence.md", "claims", f"{text}\n{picture}")
        shutil.copy(folder / "evidence.png", ROOT / "docs/evidence.png")
        shutil.copy(folder / "claims.json", DATA / "claims.json")
        figures = {name: found["mean"] for name, found in report["speedup"].items()}
        figures |= {name: report[name] and report[name]["mean"] for name in GAPS}
        record("claims", figures, lambda _: "", "full" if full else "reduced")
    print(json.dumps(plain(report)))


def plan_of(arguments: argparse.Namespace) -> Plan:
    plan = FULL if arguments.full else REDUCED
    for name in ("steps", "search_steps", "trials", "seeds"):
        if getattr(arguments, name) is not None:
            plan = replace(plan, **{name: getattr(arguments, name)})
    return replace(plan, trials=plan.trials or TRIALS) if arguments.search_only else plan


def _has_target(methods: list[str]) -> bool:
    return TARGET in methods or muon(TARGET) in methods


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = command_line(__doc__, recorded=False)
    parser.add_argument("--full", action="store_true", help="the search, all methods (hours)")
    parser.add_argument("--search-only", action="store_true", help="find the settings, and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--steps", type=int, help="inner steps of all workers together")
    parser.add_argument("--search-steps", type=int, help="of a run of the search")
    parser.add_argument("--trials", type=int, help="settings tried for each method; 0: those found before")
    parser.add_argument(
        "--final-seeds", type=int, default=1, help="of the search's runs at full length; its rates by their mean"
    )
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all; reduced: the figures'")
    parser.add_argument("--tuned", default=str(TUNED), help="file of the settings found")
    parser.add_argument("--results", default=str(ROOT / "runs/claims.jsonl"), help="JSON lines")
    parser.add_argument("--docs", action="store_true", help="renew docs/evidence.md and what is committed beside it")
    parser.add_argument("--out", default=str(ROOT / "runs/claims"), help="folder for tables and plots")
    arguments = parser.parse_args(words)
    if arguments.methods is None:
        wanted = METHODS if arguments.full or arguments.search_only else NEEDED
        searching = arguments.search_only or (arguments.full and arguments.trials != 0)
        arguments.methods = list(wanted) if searching else with_settings(tuple(wanted), Path(arguments.tuned))
        if left := set(wanted) - set(arguments.methods):
            print(f"left out, for --search-only has not been run for them: {', '.join(sorted(left))}")
    if not arguments.search_only and (MINE not in arguments.methods or not _has_target(arguments.methods)):
        parser.error(
            f"--methods lacks {TARGET} or {MINE}: the target is {TARGET}'s final loss, with either optimizer, and "
            f"every ratio is to {MINE}; name both, or add --search-only"
        )
    return arguments


if __name__ == "__main__":
    main()
