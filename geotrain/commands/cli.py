"""The command line. Each command reads its arguments and calls one function, imported only then: imports are slow."""

from __future__ import annotations

import json
import locale
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from geotrain.commands import cli_operate, cli_plan, cli_serve
from geotrain.commands.cli_operate import RunFolder
from geotrain.commands.cli_options import Changes, ClusterFile, LaunchId, Resume, RunFile, drawn
from geotrain.commands.output import Output, with_json
from geotrain.launch.loading import leave_quickly, loading

app = typer.Typer(
    name="geotrain",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Pretrain language models on GPU clusters in different regions, joined by slow links.",
    epilog="Each command has its own --help, with examples. Completion: geotrain --install-completion.",
)
app.add_typer(cli_serve.serve, name="serve")
app.add_typer(cli_plan.app)
app.add_typer(cli_operate.app)


DType = Literal["float32", "bfloat16", "float16"]


def _print_version(asked: bool) -> None:
    if asked:
        from geotrain import __version__

        print(f"geotrain {__version__}")
        raise typer.Exit


@app.callback()
def before_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Pretrain language models on GPU clusters in different regions, joined by slow links."""


def main() -> None:
    """Entry point. An error of GeoTrain's own, or of the operating system, is one message and exit code 2."""
    out = sys.__stdout__
    if (
        out
        and out.errors != "replace"
        and f"{out.encoding} {locale.getpreferredencoding(False)}".lower() != "utf-8 utf-8"
    ):
        # Files are UTF-8 whatever the locale says, and signs that the output lacks are replaced; so in processes that
        # this one starts. Python reads both once, as it begins.
        os.environ |= {"PYTHONUTF8": "1", "PYTHONIOENCODING": f"{out.encoding}:replace"}
        os.execv(sys.executable, sys.orig_argv)
    leave_quickly()
    try:
        app()
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith("geotrain."):
            raise
        print(f"geotrain: {error}", file=sys.stderr)
        sys.exit(2)


@app.command(epilog="Example: geotrain quickstart")
@with_json
def quickstart(
    resume: Resume = False,
    moe: Annotated[bool, typer.Option("--moe", help="A model with experts, which one region divides.")] = False,
    run: Annotated[Path | None, typer.Option(help="The run file; default: the shipped one.")] = None,
    cluster: Annotated[Path | None, typer.Option(help="The cluster file; default: the shipped one.")] = None,
) -> Output:
    """Two regions train a small model on this machine, on text found here; then export, evaluate, sample.

    Leaves logs, a checkpoint, the export and summary.json in runs/quickstart; with --moe in runs/quickstart-moe.
    """
    from geotrain.commands.quickstart import quickstart as start

    code, summary = start(run, cluster, resume, "-moe" if moe else "")
    return Output(summary, code=code)


@app.command(
    epilog="Example: geotrain prepare texts/*.jsonl.zst --out data/mine --train-bpe 32000 --validation 0.01",
)
@with_json
def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="TEXTS…", help="Files, folders, patterns, or hf:NAME.")],
    out: Annotated[Path, typer.Option(help="Folder for train.bin/.idx, validation.bin/.idx and the tokenizer.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of a Hugging Face tokenizer.")] = None,
    train_bpe: Annotated[int | None, typer.Option(metavar="IDS", help="Train a byte-level BPE of this size.")] = None,
    bytes_: Annotated[bool, typer.Option("--bytes", help="Tokens are bytes.")] = False,
    validation: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Of documents, held out; default: 0.01, of few more.")
    ] = None,
    text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    end_of_document: Annotated[str | None, typer.Option(help="Token that ends a document; default: eos.")] = None,
    begin_of_document: Annotated[
        str | None, typer.Option(help="Token that begins a document; default: none.")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="Default: one for each core.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the data set in --out.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A broken line or row is an error.")] = False,
    shard: Annotated[str | None, typer.Option(metavar="I/N", help="Only this part; `merge` joins them.")] = None,
) -> Output:
    """Turn text (.txt, JSON lines, each also .gz, .zst, .bz2, .xz; .parquet, Hugging Face data sets) into a Megatron
    data set. Lists first what is read and what is not.

    Lines and rows without a text, and what is behind the cut of a cut file, are passed over and counted.
    """
    from geotrain.commands.prepare import prepare_files

    settings = text_key, end_of_document, processes, overwrite, strict, shard, begin_of_document
    manifests = prepare_files(inputs, out, tokenizer, train_bpe, bytes_, validation, *settings)
    return Output({split: manifest.model_dump(mode="json") for split, manifest in manifests.items()})


@app.command(epilog="Example: geotrain merge data/web")
@with_json
def merge(
    out: Annotated[Path, typer.Argument(metavar="FOLDER", help="The --out of `prepare --shard`.")],
) -> Output:
    """Make one data set of the shards that several hosts prepared. It moves nothing, and can be done again."""
    from geotrain.data.shards import merge as write_manifests

    made = {str(out / split): manifest for split, manifest in write_manifests(out).items()}
    lines = [f"{where}: {each.tokens:,} tokens in {each.documents:,} documents" for where, each in made.items()]
    return Output({where: manifest.model_dump(mode="json") for where, manifest in made.items()}, "\n".join(lines))


@app.command(epilog="Example: geotrain adopt data/wiki_text_document --tokenizer data/tokenizer")
@with_json
def adopt(
    prefix: Annotated[Path, typer.Argument(help="The .bin/.idx pair, without the ending.")],
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of the tokenizer that made it.")] = None,
) -> Output:
    """Read a data set that Megatron's own tools made and write its manifest beside it, so that runs can train on it.

    Without --tokenizer its largest id decides how large its vocabulary is.
    """
    from geotrain.data.dataset import adopt as write_manifest

    manifest = write_manifest(prefix, tokenizer)
    counts = f"{manifest.tokens:,} tokens in {manifest.documents:,} documents, ids below {manifest.vocab_size:,}"
    return Output(manifest.model_dump(mode="json"), f"{prefix}.json: {counts}")


@app.command(epilog="Example: geotrain launch configs/runs/1b.json configs/clusters/four-regions-ssh.json")
def launch(
    run: RunFile,
    cluster: ClusterFile,
    resume: Resume = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="Start only this region, or 'global', and here. May be given again."),
    ] = None,
    changes: Changes = None,
    launch_id: LaunchId = "",
    apply: Annotated[
        bool, typer.Option("--apply", help="RUN is on: start regions that CLUSTER adds, drain those that it lacks.")
    ] = False,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE=HOST,…", help="Where a site is, in place of the file's hosts. May be given again."
        ),
    ] = None,
    without: Annotated[
        bool,
        typer.Option("--without-checkpoints", help="Resume also workers whose own state (moments) is lost."),
    ] = False,
) -> None:
    """Start a whole run: servers, and every region's deepspeed jobs, here or over ssh; until it ends or Ctrl-C.

    What dies is started again (`restart` in the cluster file). The run's folder holds the files as resolved, and one
    log file a process. With --only, each region is started by hand or by a job of its own, also long after the
    others; --resume then begins what has not begun, so that one command line serves a job that is requeued. With the
    job's number as --launch-id, one that is requeued after its end ends again, and trains no more.
    """
    if apply:
        if resume or only or changes or launch_id or at or without:
            raise typer.BadParameter("--apply changes which regions take part, and nothing else: no other options")
        with loading():
            from geotrain.commands.change_regions import change_regions
        raise typer.Exit(change_regions(run, cluster))
    with loading():
        from geotrain.config import load_run
        from geotrain.launch.launcher import launch as start
        from geotrain.launch.launcher import where_to_go_on
    sites, given, places = tuple(only or ()), tuple(changes or ()), tuple(at or ())
    begun, settings = load_run(run, given), given
    folder = begun.run_folder.absolute()
    while True:
        if resume and (newest := where_to_go_on(folder)) != folder:
            print(f"{folder} was taken back, and goes on in {newest}")
            folder, kept = newest, {"folder": begun.checkpoint.folder, "snapshots": begun.checkpoint.snapshots}
            # Another run's: where it keeps copies and checkpoints nothing of the first may lie.
            apart = (f"checkpoint.{key}={place.rstrip('/')}/{folder.name}" for key, place in kept.items() if place)
            settings = (*given, f"folder={folder}", *apart)
            without = without or not (folder / "run.json").exists()
        code = start(run, cluster, resume, sites, settings, launch_id, places, without_checkpoints=without)
        if code or where_to_go_on(folder) == folder:
            raise typer.Exit(code)
        resume = True


@app.command(epilog="Example: geotrain up run.json --gpu aws:8xh100@us-east-2,gcp:8xa100@europe-west4 --dry-run")
@with_json
def up(
    run: RunFile,
    cluster: Annotated[
        Path | None, typer.Argument(metavar="[CLUSTER]", help="As `plan` wrote it; regions: CLOUD-REGION.")
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="CLOUD:COUNTxKIND@REGION,…", help="In place of CLUSTER.")] = "",
    results: Annotated[str | None, typer.Option(metavar="URL", help="Of the export: hf://…, s3://….")] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="USD", help="Stop before it; alone: choose machines.")
    ] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Machines that may be taken back, with --gpu.")] = False,
    image: Annotated[str | None, typer.Option(metavar="docker:NAME", help="A container with GeoTrain.")] = None,
    setup: Annotated[str | None, typer.Option(metavar="COMMAND", help="Instead of installing this checkout.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print tasks and price; start nothing.")] = False,
    down: Annotated[bool, typer.Option("--down", help="End the run's machines; start nothing.")] = False,
    changes: Changes = None,
) -> Output:
    """Get machines from clouds, Kubernetes or Slurm by SkyPilot, train on them, export, and tear them down.

    The program `sky` must be there (uv tool install 'skypilot[aws,gcp]'). Ctrl-C leaves the machines at work.
    """
    from geotrain.commands.sky_tasks import Wanted
    from geotrain.commands.up import up as start

    wanted = Wanted(gpu, spot, image, setup, results, budget)
    return start(run, cluster, wanted, dry_run, down, tuple(changes or ()))


@app.command("launch-site", hidden=True)
def launch_site(
    keep: Annotated[bool, typer.Option("--keep", help="Be the process that keeps the site.")] = False,
) -> None:
    """Keep the processes of one site, started by `launch` on its machine: reads what to do from standard input."""
    with loading():
        from geotrain.launch.far_site import keep_site, launch_site
    raise typer.Exit(keep_site() if keep else launch_site())


@app.command(epilog="Example: geotrain export runs/mine exported")
@with_json
def export(
    folder: RunFolder,
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder to write, or hf://OWNER/NAME.")],
    dtype: Annotated[DType, typer.Option(help="Type of the weights.")] = "bfloat16",
    dcp: Annotated[
        bool, typer.Option("--dcp", help="As torchtitan's checkpoints (Llama, Qwen3), into a folder.")
    ] = False,
    average: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Mean of the snapshots in this last share of the run; 0: the newest."),
    ] = 0.0,
) -> Output:
    """Write the run's newest global weights as a Hugging Face checkpoint, and print which these are.

    Of a live run its global server writes a snapshot first; of one that was killed snapshot and journal are read, and
    stay as they are. On a hub a new repository is private; HF_TOKEN must let one write.
    """
    from geotrain.commands.export import export_run, export_to_hub, in_words

    if output.startswith("hf://"):
        if dcp:
            raise typer.BadParameter("a hub takes Hugging Face checkpoints: leave --dcp out, or name a folder")
        commit, written = export_to_hub(folder, output, dtype, average)
        return Output({"commit": commit, **written}, f"{commit}: {in_words(written)}")
    written = export_run(folder, Path(output), dtype, average, dcp)
    mean = f"the mean of {written['snapshots']} snapshots up to " if average else ""
    return Output({"folder": output, **written}, f"{output}: {mean}{in_words(written)}")


@app.command(epilog='Example: geotrain sample exported "Once upon a time"')
@with_json
def sample(
    folder: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="A Hugging Face checkpoint folder.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")] = "",
    tokens: Annotated[int | None, typer.Option(min=1, help="At most; default: 128, or what fits.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal text.")] = 0,
) -> Output:
    """Write text with an exported model."""
    from geotrain.commands.export import about, in_words
    from geotrain.commands.sample import sample as write

    text, weights = write(folder, prompt, tokens, temperature, seed), about(folder)
    if weights:
        print(f"{folder}: {in_words(weights)}", file=sys.stderr)
    return Output({"text": text, "weights": weights}, text)


@app.command(epilog="Example: geotrain picture runs/quickstart quickstart.svg")
@with_json
def picture(
    folder: RunFolder,
    output: Annotated[Path, typer.Argument(metavar="FILE", help=".png, .svg or .pdf.", callback=drawn)],
) -> Output:
    """Draw what a run's events hold: losses over tokens, and what its links carried."""
    from geotrain.config import load_run
    from geotrain.monitor.picture import picture as draw

    draw(folder, load_run(folder / "run.json").data.sequence_length, output)
    return Output({"file": output}, str(output))


@app.command("eval", epilog="Example: geotrain eval exported --data data/mine/validation --tasks hellaswag,arc_easy")
@with_json
def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="EXPORT", help="A Hugging Face checkpoint folder.")],
    data: Annotated[Path | None, typer.Option(metavar="PREFIX", help="Loss on a prepared .bin/.idx pair.")] = None,
    tasks: Annotated[
        str, typer.Option(metavar="TASK,…", help="Tasks of lm-evaluation-harness: pip install lm-eval.")
    ] = "",
    task_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Tasks of one's own (YAML), in place of the harness's.")
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a sample, with --data; default: the model's positions, at most 1024."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples, or examples a task, at most.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples at a time.")] = 16,
    inside_documents: Annotated[
        bool, typer.Option("--inside-documents", help="With --data, as trained with data.attention = document.")
    ] = False,
) -> Output:
    """Measure an exported model: validation loss, benchmark tasks, or both. Prints JSON."""
    from geotrain.commands.evaluate import measure
    from geotrain.commands.export import about

    said = measure(folder, data, tasks, sequence_length, limit, batch, task_folder, inside_documents)
    if weights := about(folder):
        said |= {"weights": weights}
    return Output(said, json.dumps(said, indent=2))


@app.command(epilog="Example: geotrain certs configs/clusters/four-regions-ssh.json certs/mine")
@with_json
def certs(
    cluster: Annotated[Path, typer.Argument(metavar="CLUSTER", help="The cluster file.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write.")],
) -> Output:
    """Make the run's certificate authority, and a certificate for every server and worker that has none.

    Name the folder in the cluster file's `security` block, and copy to each machine ca.pem and its own pair only.
    Certificates that have expired, or will within 30 days, are renewed; keys stay, so that only .pem files change.
    """
    from geotrain.config import load_cluster
    from geotrain.net.transport.authority import make_certificates

    made = make_certificates(load_cluster(cluster), folder)
    lines = [
        str(path) if path.suffix == ".key" or path.with_suffix(".key") in made else f"{path} (renewed)"
        for path in made
    ]
    if folder / "ca.pem" in made and folder / "ca.key" not in made:
        lines.append("The authority had expired, or was to expire soon: copy ca.pem to every machine.")
    return Output({"files": made}, "\n".join(lines))


@app.command(epilog="Example: geotrain configs configs")
@with_json
def configs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write; it must not exist.")],
) -> Output:
    """Copy the run, model and cluster files that come with GeoTrain, to begin one's own from."""
    from geotrain.commands.configs import copy_configs

    copy_configs(folder)
    return Output({"folder": folder}, str(folder))


@app.command(epilog="Example: geotrain schema --out configs/schema")
@with_json
def schema(
    out: Annotated[Path, typer.Option(help="Folder to write.")] = Path("configs/schema"),
    docs: Annotated[Path, typer.Option(help="The reference to write.")] = Path("docs/configuration.md"),
) -> Output:
    """Write the JSON Schema of run and cluster files, for editors, and their reference as Markdown."""
    from geotrain.commands.schema_page import write_schema

    written = write_schema(out, docs)
    return Output({"files": written}, "\n".join(map(str, written)))
