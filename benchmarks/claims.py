"""The claims, measured: every method through the production's state machines, in virtual time.

    python benchmarks/claims.py --search-only     each method's settings, kept in benchmarks/data
    python benchmarks/claims.py                   with these, the reduced setting
    python benchmarks/claims.py --full            the search, longer runs, three seeds in harsher worlds, too
    python benchmarks/claims.py --full --trials 0 the same with the settings found before
    python benchmarks/claims.py --methods diloco region-momentum --steps 2048 --seeds 1 --no-harsh     a look

Rows are kept in the results file (JSON lines) and never run twice: an interrupted study goes on where it was.
The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from claims_goodput import goodput_table
from claims_markdown import markdown
from claims_methods import DATA, METHODS, OURS, ROOT
from claims_report import plain, plot_curves, replace_block
from claims_runs import Results
from claims_search import TRIALS, TUNED, merge, search, settings_found
from claims_study import FULL, REDUCED, TARGET, Plan, Study
from common import record

from geotrain.files import whole_file


def main() -> None:
    arguments = parse_arguments()
    full, methods = arguments.full, tuple(arguments.methods)
    plan = plan_of(arguments)
    tuned = Path(arguments.tuned)
    results = Results(Path(arguments.results or ROOT / f"runs/claims-{'full' if full else 'reduced'}.jsonl"))
    print(plan.told(methods, arguments.search_only, arguments.harsh), flush=True)
    if plan.trials:
        found = search(
            methods, plan.search_steps, plan.trials, plan.size, lambda jobs: results.complete(jobs, arguments.jobs)
        )
        merge(tuned, found)
    if arguments.search_only:
        print(json.dumps({m: of["settings"] for m, of in found.items()}))
        return
    study = Study(plan, settings_found(methods, tuned), lambda jobs: results.complete(jobs, arguments.jobs))
    report = study.published()
    report["cpu_s"] = sum(row["cpu_s"] for row in results.rows.values())
    if arguments.harsh:
        report["harsh"] = study.harsh()
    report["goodput"] = goodput_table(reduced=not full)
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
        shutil.copy(folder / "claims.json", DATA.with_name("claims.json"))
        figures = {name: found["mean"] for name, found in report["speedup"].items()}
        gap = report["loss_gap_to_synchronous"]
        figures |= {"loss_gap_to_synchronous": gap and gap["mean"], "goodput": report["goodput"]["ours"]}
        record("claims", figures, lambda _: "", "full" if full else "reduced")
    print(json.dumps(plain(report)))


def plan_of(arguments: argparse.Namespace) -> Plan:
    plan = FULL if arguments.full else REDUCED
    for name in ("steps", "harsh_steps", "search_steps", "trials", "seeds", "harsh_seeds"):
        if getattr(arguments, name) is not None:
            plan = replace(plan, **{name: getattr(arguments, name)})
    return replace(plan, trials=plan.trials or TRIALS) if arguments.search_only else plan


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the search, longer runs, more seeds (an hour or two)")
    parser.add_argument("--search-only", action="store_true", help="find the settings, and stop")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--steps", type=int, help="inner steps of all workers together")
    parser.add_argument("--harsh-steps", type=int, help="the same of a run in a harsher world")
    parser.add_argument("--search-steps", type=int, help="of a run of the search")
    parser.add_argument("--trials", type=int, help="settings tried for each method; 0: those found before")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--harsh-seeds", type=int)
    parser.add_argument("--no-harsh", dest="harsh", action="store_false")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--tuned", default=str(TUNED), help="file of the settings found")
    parser.add_argument("--results", help="JSON lines; default runs/claims-*.jsonl")
    parser.add_argument("--docs", action="store_true", help="renew docs/evidence.md and what is committed beside it")
    parser.add_argument("--out", default=str(ROOT / "runs/claims"), help="folder for tables and plots")
    arguments = parser.parse_args(words)
    missing = {TARGET, OURS} - set(arguments.methods)
    if missing and not arguments.search_only:
        parser.error(
            f"--methods lacks {' and '.join(sorted(missing))}: the target is {TARGET}'s final loss, and every "
            f"ratio is to {OURS}; name both, or add --search-only"
        )
    return arguments


if __name__ == "__main__":
    main()
